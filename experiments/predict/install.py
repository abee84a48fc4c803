"""Writes fitted constants where the package keeps them, rounded to three digits."""

import pathlib
import re

from ladder_jax import predict

PACKAGE = pathlib.Path(predict.__file__).parent
H100, OFF, NODES = (f"hardware/{name}.yaml" for name in ("h100-nvlink", "h100-no-nvlink", "h100-2-nodes"))
B200 = "hardware/b200-nvlink.yaml"
PLACES = {
    "flops_share": [(H100, "flops_share")],
    "bandwidth_share": [(H100, "bandwidth_share")],
    "launch": [(H100, "launch")],
    "contention": [(H100, "contention")],
    "latency": [(H100, "  latency"), (OFF, "  latency")],
    "nvlink bandwidth": [(H100, "  bandwidth")],
    "off step": [(OFF, "  step")],
    "off bandwidth": [(OFF, "  bandwidth")],
    "network step": [(NODES, "    step")],
}


def rounded(value: float) -> float:
    return float(f"{value:.3g}")


def install(constants: dict[str, float]) -> None:
    for name, places in PLACES.items():
        for file, key in places:
            _replace(PACKAGE / file, rf"(?m)^({key}: \{{value: )[^,]+", constants[name])
    _replace(PACKAGE / B200, r"(?m)^(  bandwidth: \{value: )[^,]+", 2 * rounded(constants["nvlink bandwidth"]))
    _replace(PACKAGE / "implementation.py", r"(cache_speed=)(?!1\.0,?\n)[\d.]+", constants["cache_speed"])


def _replace(file: pathlib.Path, pattern: str, value: float) -> None:
    text, count = re.subn(pattern, rf"\g<1>{_written(rounded(value))}", file.read_text())
    if count != 1:
        raise ValueError(f"{file}: {pattern} stands there {count} times")
    file.write_text(text)


def _written(value: float) -> str:
    """In millionths or in billions, as people write seconds and bytes a second."""
    for unit, name in ((1e-6, "e-6"), (1e9, "e9")):
        if 1 <= value / unit < 1000:
            return f"{value / unit:.4g}{name}"
    return f"{value:g}"
