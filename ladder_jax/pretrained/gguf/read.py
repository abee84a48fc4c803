"""Read a GGUF file as a Source."""

import json
import pathlib
from typing import Any

from ladder_jax.errors import UserError
from ladder_jax.pretrained.gguf import names, tokenizer
from ladder_jax.pretrained.gguf.file import File, open_file
from ladder_jax.pretrained.gguf.model import model_of
from ladder_jax.pretrained.source import Source, check


def read(path: pathlib.Path) -> Source:
    """The model at `path`, without reading weights yet.

    Raises UserError if the file is damaged or cut off, the architecture or a setting is not supported, or the tokenizer
    does not fit the model.
    """
    file = open_file(path)
    if file.fields.get("split.count", 1) > 1:
        raise UserError(f"{str(path)!r} is one of several parts: join them first (llama-gguf-split --merge)")
    try:
        model = model_of(file)
    except UserError as error:  # ModelConfig's errors do not name the file
        raise (error if str(path) in str(error) else UserError(f"{str(path)!r}: {error}")) from None
    context = file.fields.get(f"{file.fields['general.architecture']}.context_length")
    return check(
        Source(
            path=str(path),
            model=model,
            arrays=names.arrays(file, model),
            context=context,
            files=tokenizer.files(file, vocab_size=model.vocab_size),
            generation=_generation(file),
        )
    )


def _generation(file: File) -> dict[str, Any]:
    """The special tokens, the only generation settings in a GGUF file. An end-of-turn token also ends a text."""
    ids = lambda *names: [file.fields.get(f"tokenizer.ggml.{name}_token_id") for name in names]
    ends = list(dict.fromkeys(token for token in ids("eos", "eot", "eom") if token is not None))
    (bos,), (pad,) = ids("bos"), ids("padding")
    tokens = {"bos_token_id": bos, "eos_token_id": ends or None, "pad_token_id": pad}
    return json.loads(json.dumps({name: token for name, token in tokens.items() if token is not None}))
