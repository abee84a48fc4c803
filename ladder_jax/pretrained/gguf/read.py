"""A GGUF file as a Source."""

import json
import pathlib
from typing import Any

from ladder_jax.errors import UserError
from ladder_jax.pretrained.gguf import names, tokenizer
from ladder_jax.pretrained.gguf.file import File, open_file
from ladder_jax.pretrained.gguf.model import model_of
from ladder_jax.pretrained.source import Source, check


def read(path: pathlib.Path) -> Source:
    """Its description only: no weights are read yet.

    Raises UserError for a file that is cut off or damaged, of another architecture, or of which something would have
    to be left out; and where its tokenizer does not fit its model.
    """
    file = open_file(path)
    if file.fields.get("split.count", 1) > 1:
        raise UserError(f"{str(path)!r} is one of several parts: join them first (llama-gguf-split --merge)")
    try:
        model = model_of(file)
    except UserError as error:  # the configuration's own words do not name the file
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
    """Which tokens begin, end and pad: all that a GGUF file says of it. The end of a turn is an end, too."""
    ids = lambda *names: [file.fields.get(f"tokenizer.ggml.{name}_token_id") for name in names]
    ends = list(dict.fromkeys(found for found in ids("eos", "eot", "eom") if found is not None))
    (bos,), (pad,) = ids("bos"), ids("padding")
    found = {"bos_token_id": bos, "eos_token_id": ends or None, "pad_token_id": pad}
    return json.loads(json.dumps({name: value for name, value in found.items() if value is not None}))
