"""Other programs' tensors, by their names and [out, in], as our arrays, and our arrays as theirs.

In our arrays inputs come first, heads are separate dimensions, and experts are stacked. Values are
read one array at a time.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping

import jax.numpy as jnp
import numpy as np

from ladder_jax.config import ModelConfig
from ladder_jax.errors import UserError
from ladder_jax.nn import parameter
from ladder_jax.pretrained import source
from ladder_jax.pretrained.source import Arrays, Key, Shape, Source, Stored


@dataclasses.dataclass(frozen=True)
class Names:
    """Another program's names of our arrays.

    prefix: of a layer's tensors, before its number. outside, in_layer: by our names, without the
        stack's. Each expert has a tensor of its own, whose number stands for "{expert}".
    """

    prefix: str
    outside: Mapping[str, str]
    in_layer: Mapping[str, str]

    def of(self, key: Key, *, model: ModelConfig) -> str:
        if key.layer is None:
            return self.outside[key.name]
        name = self.in_layer[key.name.partition("/")[2]]
        return f"{self.prefix}{key.layers(model)[key.layer]}.{name}"


@dataclasses.dataclass(frozen=True)
class _Form:
    """One of our arrays, as other programs have it.

    ours: our shape. dims: letters of one tensor's dimensions in our layout. theirs: its shape,
        [out, in]. names: of the tensors, of experts one each.
    """

    key: Key
    ours: Shape
    dims: str
    theirs: Shape
    names: list[str]

    def read(self, tensors: list[Stored], dtype: np.dtype) -> np.ndarray:
        ours = self.ours[-len(self.dims) :]
        parts = [one.read() for one in tensors]
        if self.dims != "VD":
            parts = [one.T.reshape(ours) for one in parts]
        if len(ours) == len(self.ours):
            return parts[0]
        return np.stack(parts).astype(dtype, copy=False)

    def written(self, array: np.ndarray, expert: int) -> np.ndarray:
        """The tensor of `array`, or of its expert."""
        if array.ndim > len(self.dims):
            array = array[expert]
        if self.dims == "VD":
            return array
        return array.reshape(self.theirs[::-1]).T


def _forms(model: ModelConfig, names: Names) -> Iterator[_Form]:
    letters = source.dims(model)
    for key, ours in source.expected_shapes(model).items():
        stacked = letters[key.name]
        dims = stacked.removeprefix("E")
        theirs = _torch_shape(dims, ours[-len(dims) :])
        if key.name.endswith("/share"):
            theirs = (1, *theirs)
        count = ours[0] if stacked.startswith("E") else 1
        name = names.of(key, model=model)
        numbered = [name.format(expert=n) for n in range(count)]
        yield _Form(key, ours, dims, theirs, numbered)


def _torch_shape(dims: str, ours: Shape) -> Shape:
    """[N x H, D] for our [D, N, H]. Vectors are flat. Tables are [V, D] in both."""
    if not parameter.is_matrix(dims):
        return (math.prod(ours),)
    if dims == "VD":
        return ours
    # the dimensions that a matmul sums over come first
    inputs = 1 if dims.startswith("D") else len(dims) - 1
    return (math.prod(ours[inputs:]), math.prod(ours[:inputs]))


def arrays(path: str, model: ModelConfig, found: Mapping[str, Stored], names: Names) -> Arrays:
    """All arrays of the model. Raises UserError if a tensor is missing, extra, or of another shape.

    found: the tensors in the file or folder `path`, by its names, in its layout.
    """
    arrays = {}
    rest = dict(found)
    for form in _forms(model, names):
        tensors = []
        for name in form.names:
            if name not in rest:
                raise UserError(f"{path!r} holds no {name}")
            one = rest.pop(name)
            tensors.append(one)
            if one.shape != form.theirs:
                raise UserError(
                    f"{path!r}: {name} is {one.shape}, but {form.theirs} by its configuration"
                )
        dtypes = {one.dtype for one in tensors}
        dtype = functools.reduce(jnp.promote_types, dtypes)
        read = functools.partial(form.read, tensors, dtype)
        arrays[form.key] = Stored(form.ours, dtype, read)
    if rest:
        first, *others = sorted(rest)
        more = f" and {len(others)} more" if others else ""
        raise UserError(f"{path!r} holds {first}{more}, not in the model of its configuration")
    return arrays


def written(exported: Source, names: Names) -> dict[str, Stored]:
    """The tensors to write, by their names."""

    @functools.lru_cache(maxsize=1)  # its experts come in turn
    def newest(key: Key) -> np.ndarray:
        return exported.arrays[key].read()

    def tensor(form: _Form, expert: int) -> np.ndarray:
        return form.written(newest(form.key), expert)

    found = {}
    for form in _forms(exported.model, names):
        dtype = exported.arrays[form.key].dtype
        for expert, name in enumerate(form.names):
            read = functools.partial(tensor, form, expert)
            found[name] = Stored(form.theirs, dtype, read)
    return found
