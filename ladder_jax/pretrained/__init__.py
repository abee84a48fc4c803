"""Read pretrained models in other programs' formats, load them onto a mesh, and write them back.

source = pretrained.open("SmolLM2-135M")
params = pretrained.load(source, mesh=mesh)
pretrained.write_huggingface(source, pathlib.Path("copy"))
"""

from ladder_jax.pretrained.formats import open_source as open
from ladder_jax.pretrained.huggingface.write import write as write_huggingface
from ladder_jax.pretrained.load import load as load
from ladder_jax.pretrained.load import reader as reader
from ladder_jax.pretrained.source import Key as Key
from ladder_jax.pretrained.source import Source as Source
from ladder_jax.pretrained.source import Stored as Stored

__all__ = ["Key", "Source", "Stored", "load", "open", "reader", "write_huggingface"]
