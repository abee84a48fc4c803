"""The arrays of fitted sublayers: in memory, or in a folder, from which an interrupted run goes on."""

import functools
import json
import pathlib
import zipfile
from collections.abc import Mapping

import numpy as np

from ladder_jax import files
from ladder_jax.pretrained.source import Key, Stored

REQUEST = "request.json"


class Kept:
    """One file for each fitted sublayer. folder: None keeps them in memory.

    request: what the results depend on, as JSON. Results in the folder that belong to another request are removed.
    """

    def __init__(self, folder: pathlib.Path | None, *, request: Mapping[str, object]):
        self._folder, self._memory = folder, {}
        if folder is None:
            return
        folder.mkdir(exist_ok=True)
        text = json.dumps(request, sort_keys=True)
        file = folder / REQUEST
        if not file.is_file() or file.read_text(encoding="utf-8") != text:
            for leftover in folder.glob("*.npz"):
                leftover.unlink()
            files.write_atomically(str(file), lambda path: pathlib.Path(path).write_text(text, encoding="utf-8"))

    def put(self, sublayer: str, arrays: Mapping[Key, np.ndarray], about: Mapping[str, float]) -> dict[Key, Stored]:
        """Keeps the arrays of `sublayer`, and numbers about them; returns the arrays as they are read later."""
        if self._folder is None:
            return {key: _stored(array, functools.partial(lambda a: a, array)) for key, array in arrays.items()}
        named = {f"{key.layer}:{key.name}": _bytes(array) for key, array in arrays.items()}
        numbers = {f"about:{name}": np.float64(value) for name, value in about.items()}
        files.write_atomically(str(self._file(sublayer)), lambda path: _save(path, {**named, **numbers}))
        return {key: _stored(array, self._reader(sublayer, key, array.dtype)) for key, array in arrays.items()}

    def get(self, sublayer: str, arrays: Mapping[Key, Stored]) -> tuple[dict[Key, Stored], dict[str, float]] | None:
        """What was kept of `sublayer`, in place of the unfitted `arrays`; None if there is none, or it is damaged."""
        if self._folder is None or not self._file(sublayer).is_file():
            return None
        try:
            with np.load(self._file(sublayer)) as content:
                about = {name.removeprefix("about:"): float(content[name]) for name in content if name[:6] == "about:"}
                for key in arrays:
                    content[f"{key.layer}:{key.name}"]  # compares its checksum
        except (OSError, ValueError, KeyError, zipfile.BadZipFile):
            return None
        return {key: _stored(old, self._reader(sublayer, key, old.dtype)) for key, old in arrays.items()}, about

    def _file(self, sublayer: str) -> pathlib.Path:
        return self._folder / f"{sublayer}.npz"

    def _reader(self, sublayer: str, key: Key, dtype: np.dtype):
        def read():
            with np.load(self._file(sublayer)) as content:
                return content[f"{key.layer}:{key.name}"].view(dtype)

        return read


def _stored(array: np.ndarray | Stored, read) -> Stored:
    return Stored(tuple(array.shape), np.dtype(array.dtype), read)


def _bytes(array: np.ndarray) -> np.ndarray:
    """As unsigned integers: NumPy's files have no bfloat16."""
    return array.view(f"u{array.dtype.itemsize}")


def _save(path: str, arrays: Mapping[str, np.ndarray]) -> None:
    with open(path, "wb") as file:
        np.savez(file, **arrays)
