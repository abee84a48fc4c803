"""The README's first snippet with an installed package: `python -P .ci/snippet.py`, with that
environment's Python.
"""

import os
import pathlib
import re

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")

import ladder_jax  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parent.parent
if pathlib.Path(ladder_jax.__file__).resolve().is_relative_to(ROOT / "ladder_jax"):
    raise SystemExit(
        f"this is the repository's own ladder_jax, not an installed one: {ladder_jax.__file__}"
    )
snippet = re.findall(
    r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S
)[0]
print(f"ladder_jax {ladder_jax.__version__} of {pathlib.Path(ladder_jax.__file__).parent}")
scope = {}
exec(compile(snippet, "README.md", "exec"), scope)  # noqa: S102
if scope["logits"].shape != (2, 16, 256):
    raise SystemExit(f"the snippet's logits are {scope['logits'].shape}")
