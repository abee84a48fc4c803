"""Read and check a machine's constants: a named machine of this package, or a user's YAML file."""

import dataclasses
import math
import pathlib
from collections.abc import Iterable

from ladder_jax.config.fields import build, check, fit
from ladder_jax.config.load import parse_yaml
from ladder_jax.errors import UserError, unknown
from ladder_jax.predict.link import FITTED, Algorithm, Kernel, Link, Network

TABLE = pathlib.Path(__file__).parent / "hardware"
NAMES = (
    *("h100-nvlink", "h100-no-nvlink", "h100-2-nodes", "h100-2-nodes-roce", "h200-nvlink", "b200-nvlink"),
    *("b300-nvlink", "l40s-no-peer", "a800-pcie", "v5e", "v5p", "v6e", "tpu7x"),
)  # each is a file in TABLE; docs and messages use this order


@dataclasses.dataclass(frozen=True)
class Machine:
    """Identical devices and the link between them.

    devices: largest number of devices that `link` joins.
    memory: bytes per device.
    flops, bandwidth: published bfloat16 operations, and bytes of memory traffic, a second and device.
    flops_share, bandwidth_share: the shares of these rates that programs reach.
    launch: seconds that starting a kernel costs.
    contention: relative slowdown of compute while a collective is in flight, because the collective uses the same
        memory and cores (0.5: half as long again).
    link: None for a single device.
    sources: the source of each constant, by dotted name.
    """

    name: str
    devices: int
    memory: float
    flops: float
    bandwidth: float
    flops_share: float
    bandwidth_share: float
    launch: float
    contention: float
    link: Link | None = None
    sources: dict = dataclasses.field(default_factory=dict, repr=False)

    def seconds(self, *, flops: float, size: float, launches: float = 0.0) -> float:
        """Time of kernels that compute `flops` and move `size` bytes: the longer of the two, plus the launches."""
        work = max(flops / (self.flops * self.flops_share), size / (self.bandwidth * self.bandwidth_share))
        return work + launches * self.launch

    def all_reduce(self, size: float, *, ranks: int, among: Iterable[Algorithm] = FITTED) -> float:
        return self.fastest_all_reduce(size, ranks=ranks, among=among)[1]

    def fastest_all_reduce(
        self, size: float, *, ranks: int, among: Iterable[Algorithm]
    ) -> tuple[Algorithm | None, float]:
        """The fastest of these algorithms, and its seconds; (None, 0.0) without communication."""
        return self.link.fastest(size, ranks=ranks, among=among) if self.link else (None, 0.0)


SECTIONS = {  # of the constants of each kind, those that are a section of their own
    Machine: {"link": Link},
    Link: {"network": Network, **dict.fromkeys(("one_shot", "two_shot", "in_network", "nccl_in_network"), Kernel)},
}
MAY_BE_ZERO = ("launch", "contention", "latency", "step", "one_shot")
SHARES = ("flops_share", "bandwidth_share")


def load(name: str) -> Machine:
    """The machine of that name, or of the YAML file at that path. Raises UserError for an invalid one.

    A file has a number for each constant, or `{value: 4.8e12, source: TEXT}`. With `based_on: NAME` it has only the
    constants that differ from those of machine NAME.
    """
    path = pathlib.Path(name)
    if path.suffix not in (".yaml", ".yml"):
        if name not in NAMES:
            raise unknown("hardware (not a .yaml file either)", name, NAMES)
        path = TABLE / f"{name}.yaml"
    where = f"hardware {str(path)!r}"
    tree = _tree(path, where=where)
    try:
        values, sources = _apart(tree)
        machine = _made(Machine, {**values, "name": path.stem, "sources": sources})
        alone = machine.devices == 1
        check(alone or machine.link, f"has {machine.devices} devices but no link: give latency, step and bandwidth")
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    return machine


def _tree(path: pathlib.Path, *, where: str) -> dict:
    """The file's sections, merged into those of the machine in `based_on`."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read {where}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{where} is not UTF-8 text") from None
    tree = parse_yaml(text, what=where)
    if not isinstance(tree, dict):
        raise UserError(f"{where} must hold constants such as 'bandwidth: 3.35e12', not {type(tree).__name__}")
    if "based_on" not in tree:
        return tree
    base = str(tree.pop("based_on"))
    if base not in NAMES:
        raise unknown(f"'based_on' of {where}:", base, NAMES)
    return _merge(_tree(TABLE / f"{base}.yaml", where=base), tree)


def _merge(base: dict, over: dict) -> dict:
    """Merge `over` into `base`: it replaces a constant, or only its `source`; the sections are merged."""
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(base.get(key), dict)
        merged[key] = _merge(base[key], value) if both and "value" not in value else value
    return merged


def _apart(tree: dict, path: str = "") -> tuple[dict, dict[str, str]]:
    """The constants without their sources, and the sources by dotted name."""
    values, sources = {}, {}
    for key, value in tree.items():
        if not isinstance(value, dict):
            values[key] = value
        elif "value" in value or "source" in value:
            for other in value:
                if other not in ("value", "source"):
                    raise unknown(f"key in {path}{key}:", other, ("value", "source"))
            values[key] = value.get("value")
            if value.get("source"):
                sources[f"{path}{key}"] = " ".join(str(value["source"]).split())
        else:
            values[key], below = _apart(value, f"{path}{key}.")
            sources |= below
    return values, sources


def _made[T](kind: type[T], tree: dict, path: str = "") -> T:
    """The constants of a section at the dotted `path`, each there and in its range."""
    sections = SECTIONS.get(kind, {})
    below = {
        key: _made(sections[key], value, f"{path}{key}.") if key in sections and isinstance(value, dict) else value
        for key, value in tree.items()
    }
    needed = [field.name for field in dataclasses.fields(kind) if field.default is field.default_factory]
    made = build(kind, dict.fromkeys(needed) | below, path)
    for name in needed:
        check(getattr(made, name) is not None, f"lacks the constant {path}{name} (needed: {', '.join(needed)})")
    fit(made, path.rstrip("."))
    for name, value in vars(made).items():
        if not isinstance(value, int | float):
            continue
        allowed = "not be negative" if name in MAY_BE_ZERO else "be positive"
        positive = 0 < value < math.inf or (value == 0 and name in MAY_BE_ZERO)
        check(positive, f"{path}{name} must {allowed}, not {value:g}")
        share = "is a share of the published rate, at most 1"
        check(value <= 1 or name not in SHARES, f"{path}{name} {share}, not {value:g}")
    return made
