"""Read and check a machine's constants: a named machine of this package, or a user's YAML file."""

import dataclasses
import itertools
import math
import pathlib
import typing
from collections.abc import Iterable

from ladder_jax.config.load import parse_yaml
from ladder_jax.errors import UserError, member, unknown
from ladder_jax.predict.link import FITTED, Algorithm, Halves, Kernel, Kernels, Link, Network, Ring

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
    link: Link | None
    sources: dict[str, str] = dataclasses.field(default_factory=dict, repr=False)

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


REQUIRED = "devices memory flops bandwidth flops_share bandwidth_share launch contention".split()
SHARES = ("flops_share", "bandwidth_share")
MAY_BE_ZERO = ("launch", "contention", "latency", "step", "one_shot")
SECTIONS = {  # optional ones, by dotted name: all of a section's constants or none
    "link.network": Network,
    **{f"link.{name}": Kernel for name in ("one_shot", "two_shot", "in_network", "nccl_in_network")},
}
CHOICES = {"link.ring": Ring, "link.kernels": Kernels, "link.halves": Halves}
WHOLE = ("devices", "size")


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
    values, sources = _flat(_tree(path, seen=()), path)
    return _machine(path.stem, values, sources, f"hardware {str(path)!r}" if name not in NAMES else name)


def _tree(path: pathlib.Path, *, seen: tuple[str, ...]) -> dict:
    """The file's sections, merged into those of the machine in `based_on`."""
    where = f"hardware {str(path)!r}"
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
    if base in seen:
        raise UserError(f"{where} is based on itself")
    return _merge(_tree(TABLE / f"{base}.yaml", seen=(*seen, base)), tree)


def _merge(base: dict, over: dict) -> dict:
    """Merge `over` into `base`: it replaces a constant, or only its `source`; the sections are merged."""
    merged, sections = dict(base), ("link", *(name.rpartition(".")[2] for name in SECTIONS))
    for key, value in over.items():
        section = key in sections or (isinstance(value, dict) and set(value) == {"source"})
        mergeable = section and isinstance(value, dict) and isinstance(base.get(key), dict)
        merged[key] = _merge(base[key], value) if mergeable else value
    return merged


def _flat(tree: dict, path: pathlib.Path, prefix: str = "") -> tuple[dict[str, typing.Any], dict[str, str]]:
    """Values and sources by dotted name."""
    values, sources = {}, {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if _is_section(name, value):
            section = _flat(value, path, f"{name}.")
            values, sources = values | section[0], sources | section[1]
        elif isinstance(value, dict):
            if extra := set(value) - {"value", "source"}:
                raise unknown(f"key in {name} of hardware {str(path)!r}:", min(extra, key=str), ("value", "source"))
            values[name] = value.get("value")
            if value.get("source"):
                sources[name] = " ".join(str(value["source"]).split())
        else:
            values[name] = value
    return values, sources


def _is_section(name: str, value: object) -> bool:
    """`one_shot` names a section of the link, and a constant of the network."""
    return isinstance(value, dict) and (name == "link" or name in SECTIONS)


def _machine(name: str, values: dict, sources: dict, where: str) -> Machine:
    fields = {
        section: [f"{section}.{field.name}" for field in dataclasses.fields(kind)] for section, kind in SECTIONS.items()
    }
    link = [f"link.{field}" for field in ("latency", "step", "bandwidth")]
    optional = ["link.network.one_shot"]
    allowed = [*REQUIRED, *link, *CHOICES, *itertools.chain.from_iterable(fields.values())]
    for key in values:
        if key not in (*allowed, "link", *SECTIONS):
            raise unknown(f"constant of {where}:", key, allowed)
    no_link = values.get("link", ...) is None  # `link: null`, for one device
    given = [section for section, keys in fields.items() if any(key in values for key in keys)]
    sections = [key for section in given for key in fields[section] if key not in optional or key in values]
    needed = [*REQUIRED, *(() if no_link else link), *sections]
    for key in needed:
        if values.get(key) is None:
            raise UserError(f"{where} lacks the constant {key} (needed: {', '.join(needed)})")
    number = {key: _number(values[key], key, where) for key in needed}
    constants = {key: int(number[key]) if key in WHOLE else number[key] for key in REQUIRED}
    if no_link and constants["devices"] > 1:
        raise UserError(f"{where} has {constants['devices']} devices but no link: give latency, step and bandwidth")
    return Machine(
        name=name, link=None if no_link else _link(values, number, fields, given, where), sources=sources, **constants
    )


def _link(values: dict, number: dict, fields: dict[str, list[str]], given: list[str], where: str) -> Link:
    last = lambda key: key.rpartition(".")[2]
    settings = {
        last(key): member(kind, f"value for {key} of {where}:", values[key])
        for key, kind in CHOICES.items()
        if key in values
    }
    for section in given:
        constants = {last(key): number[key] for key in fields[section] if key in number}
        constants = {key: int(value) if key in WHOLE else value for key, value in constants.items()}
        settings[last(section)] = SECTIONS[section](**constants)
    return Link(*(number[f"link.{field}"] for field in ("latency", "step", "bandwidth")), **settings)


def _number(value: object, key: str, where: str) -> float:
    """The checked number. It may be a string, because YAML 1.1 reads 3e12 as one."""
    last = key.rpartition(".")[2]
    try:
        number = float(value) if not isinstance(value, bool) else math.nan
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise UserError(f"{key} of {where} must be a number, not {value!r}")
    bound = "not be negative" if last in MAY_BE_ZERO else "be positive"
    if number < 0 or (number == 0 and last not in MAY_BE_ZERO):
        raise UserError(f"{key} of {where} must {bound}, not {value}")
    if last in SHARES and number > 1:
        raise UserError(f"{key} of {where} is a share of the published rate, at most 1, not {value}")
    if last in WHOLE and number != int(number):
        raise UserError(f"{key} of {where} must be a whole number, not {value}")
    return number
