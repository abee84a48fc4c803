"""Keeps a program beside the others here: as a compiler scheduled it, without what the parser does
not read.

    python -m tests.hlo.record NAME < TEXT     (`schedule.audit` reads the same text:
    `compiled.as_text()`)

Attributes are long, and change with every compiler. The programs that are here were made by
`python -m tests.hlo.generate` at commit 22e2e364.
"""

import pathlib
import re
import sys


def trim(text):
    """Drop what the parser does not read: tables of source lines, most of backend_config, kernels'
    bodies.
    """
    text = (
        text[: text.index("\n")].partition(", entry_computation_layout")[0]
        + text[text.index("\n") :]
    )
    text = re.sub(r"\n(FileNames|FunctionNames|FileLocations|StackFrames)\n(.+\n)*", "\n", text)
    return "\n".join(map(_trim_line, text.splitlines())) + "\n"


def _trim_line(line):
    line = re.sub(r' (scheduling_name|deduplicated_name)="[^"]*"| stack_frame_id=\d+', "", line)
    head, found, config = line.partition(", backend_config=")
    if not found:
        return line
    kept = re.findall(r'"(?:estimated_cycles|known_trip_count)":(?:"\d+"|\{[^}]*\})', config)
    kept += re.findall(r'"lhs_contracting_dimensions":\[[^\]]*\]', config)
    return f"{head}, backend_config={{{','.join(kept)}}}" if kept else head


if __name__ == "__main__":
    pathlib.Path(__file__).with_name(f"{sys.argv[1]}.hlo").write_text(trim(sys.stdin.read()))
