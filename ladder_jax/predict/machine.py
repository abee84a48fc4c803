"""A machine's constants: a name of this package's table, or a YAML file of the user's, read and checked."""

import dataclasses
import math
import pathlib
import typing

from ladder_jax.errors import UserError, member, unknown
from ladder_jax.predict.link import Link, Network, Ring

TABLE = pathlib.Path(__file__).parent / "hardware"
NAMES = tuple(
    "h100-nvlink h100-no-nvlink h100-2-nodes h200-nvlink b200-nvlink v5e v5p v6e tpu7x".split()
)  # in the order of docs and messages; each is a file of TABLE


@dataclasses.dataclass(frozen=True)
class Machine:
    """Devices that are alike, and what joins them.

    devices: the most that `link` joins; memory: bytes a device;
    flops, bandwidth: published bfloat16 operations and bytes of memory a second, of one device;
    flops_share, bandwidth_share: what programs reach of them;
    launch: seconds that a device loses at each kernel that it starts;
    contention: how much longer memory traffic and arithmetic take while a collective is in flight (0.5: half
        as long again), because it uses the same memory and cores;
    link: None where there is but one device;
    sources: where each constant comes from, by its dotted name.
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
    sources: dict[str, str] = dataclasses.field(default_factory=dict)

    def seconds(self, *, flops: float, size: float, launches: float = 0.0) -> float:
        """Of kernels that compute `flops` and move `size` bytes, whichever lasts longer, and of starting them."""
        work = max(flops / (self.flops * self.flops_share), size / (self.bandwidth * self.bandwidth_share))
        return work + launches * self.launch

    def all_reduce(self, size: float, *, ranks: int) -> float:
        return self.link.all_reduce(size, ranks=ranks) if self.link else 0.0


REQUIRED = "devices memory flops bandwidth flops_share bandwidth_share launch contention".split()
SHARES = ("flops_share", "bandwidth_share")
MAY_BE_ZERO = ("launch", "contention", "latency", "step")
WHOLE = ("devices", "size")


def load(name: str) -> Machine:
    """The machine called `name`, or in the YAML file of that name. Raises UserError, in one line.

    A file gives a number for each constant, or `{value: 4.8e12, source: where from}`; with `based_on: NAME` only those
    that differ from that machine's.
    """
    path = pathlib.Path(name)
    if path.suffix not in (".yaml", ".yml"):
        if name not in NAMES:
            raise unknown("hardware (not a .yaml file either)", name, NAMES)
        path = TABLE / f"{name}.yaml"
    values, sources = _flat(_tree(path, seen=()), path)
    return _machine(path.stem, values, sources, f"hardware {str(path)!r}" if name not in NAMES else name)


def _tree(path: pathlib.Path, *, seen: tuple[str, ...]) -> dict:
    """The file's sections, laid over those of the machine that it is based on."""
    import yaml

    where = f"hardware {str(path)!r}"
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {where}: {error.strerror}") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{where} is not YAML: {' '.join(str(error).split())[:200]}") from None
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
    """A constant is replaced whole, or only its `source`; a section (`link`, `network`) constant by constant."""
    merged = dict(base)
    for key, value in over.items():
        section = key in ("link", "network") or (isinstance(value, dict) and set(value) == {"source"})
        both = section and isinstance(value, dict) and isinstance(base.get(key), dict)
        merged[key] = _merge(base[key], value) if both else value
    return merged


def _flat(tree: dict, path: pathlib.Path, prefix: str = "") -> tuple[dict[str, typing.Any], dict[str, str]]:
    """Values and sources by dotted names."""
    values, sources = {}, {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if name in ("link", "link.network") and isinstance(value, dict):
            below = _flat(value, path, f"{name}.")
            values, sources = values | below[0], sources | below[1]
        elif isinstance(value, dict):
            if extra := set(value) - {"value", "source"}:
                raise unknown(f"key in {name} of hardware {str(path)!r}:", min(extra, key=str), ("value", "source"))
            values[name] = value.get("value")
            if value.get("source"):
                sources[name] = " ".join(str(value["source"]).split())
        else:
            values[name] = value
    return values, sources


def _machine(name: str, values: dict, sources: dict, where: str) -> Machine:
    link = [f"link.{field}" for field in ("latency", "step", "bandwidth")]
    network = [f"link.network.{field}" for field in ("size", "step", "bandwidth")]
    allowed = [*REQUIRED, *link, "link.ring", *network]
    for key in values:
        if key not in (*allowed, "link"):
            raise unknown(f"constant of {where}:", key, allowed)
    alone = values.get("link", ...) is None  # `link: null`, for one device
    with_network = any(key in values for key in network)
    needed = [*REQUIRED, *(() if alone else link), *(network if with_network else ())]
    for key in needed:
        if values.get(key) is None:
            raise UserError(f"{where} lacks the constant {key} (needed: {', '.join(needed)})")
    number = {key: _number(values[key], key, where) for key in needed}
    made = None
    if not alone:
        ring = member(Ring, f"value for link.ring of {where}:", values.get("link.ring", "one-way"))
        joined = Network(int(number[network[0]]), *(number[key] for key in network[1:])) if with_network else None
        made = Link(*(number[key] for key in link), ring=ring, network=joined)
    constants = {key: int(number[key]) if key in WHOLE else number[key] for key in REQUIRED}
    if alone and constants["devices"] > 1:
        raise UserError(f"{where} has {constants['devices']} devices but no link: give latency, step and bandwidth")
    return Machine(name=name, link=made, sources=sources, **constants)


def _number(value: object, key: str, where: str) -> float:
    """YAML 1.1 reads 3e12 as text, so text is tried too."""
    last = key.rpartition(".")[2]
    try:
        number = float(value) if not isinstance(value, bool) else math.nan
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise UserError(f"{key} of {where} must be a number, not {value!r}")
    least = "not be negative" if last in MAY_BE_ZERO else "be positive"
    if number < 0 or (number == 0 and last not in MAY_BE_ZERO):
        raise UserError(f"{key} of {where} must {least}, not {value}")
    if last in SHARES and number > 1:
        raise UserError(f"{key} of {where} is a share of the published rate, at most 1, not {value}")
    if last in WHOLE and number != int(number):
        raise UserError(f"{key} of {where} must be a whole number, not {value}")
    return number
