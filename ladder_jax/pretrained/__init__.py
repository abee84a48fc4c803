"""Read pretrained models in other programs' formats, load them onto a mesh, and write them back.

source = pretrained.open("SmolLM2-135M")
params = pretrained.load(source, mesh=mesh)
pretrained.write_huggingface(source, pathlib.Path("copy"))
"""

from ladder_jax.pretrained.formats import (
    OpenedModel as OpenedModel,
    model_config as model_config,
    open_model as open_model,
    open_source as open,
    write_huggingface as write_huggingface,
)
from ladder_jax.pretrained.hub import push as push_to_hub
from ladder_jax.pretrained.source import (
    Key as Key,
    Source as Source,
    Stored as Stored,
    load as load,
    reader as reader,
)
from ladder_jax.pretrained.transformer import (
    Transformer as Transformer,
    from_pretrained as from_pretrained,
)

__all__ = [
    "Key",
    "OpenedModel",
    "Source",
    "Stored",
    "Transformer",
    "from_pretrained",
    "load",
    "model_config",
    "open",
    "open_model",
    "push_to_hub",
    "reader",
    "write_huggingface",
]
