"""The model as its user meets it: a Transformer with its tokenizer, from any model's name to text
and back to files.
"""

import dataclasses
import os
import pathlib
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util
from jax.sharding import Mesh

from ladder_jax import nn, parallel
from ladder_jax.config import DecodeConfig, Dtype, Loop, ModelConfig, Quantize, to_dict
from ladder_jax.config.fields import build, check, check_type, member
from ladder_jax.data import tokenizer as tokenizers
from ladder_jax.data.tokenizer import Tokenizer
from ladder_jax.decode import Generator, Request, default_tensor, memory
from ladder_jax.decode.request import ends
from ladder_jax.decode.steps import CHUNK
from ladder_jax.errors import UserError
from ladder_jax.files import expanded
from ladder_jax.nn import Params
from ladder_jax.parallel import NamedMesh
from ladder_jax.pretrained import formats, hub, source
from ladder_jax.pretrained.formats import Format, open_model
from ladder_jax.pretrained.huggingface import folder as huggingface
from ladder_jax.pretrained.source import Source

type Conversation = Sequence[Mapping[str, str]]
"""Messages such as {"role": "user", "content": "Hello"}."""


class Transformer(nn.Transformer):
    """`nn.Transformer` with a tokenizer: `from_pretrained("SmolLM2-135M.gguf").generate("Once upon
    a time")`.

    tokenizer: None if there is none; by default bytes, for a vocabulary of 256. decode: the
        defaults of `generate`.
    context: the longest sequence that the model was trained for, in tokens; None if unknown.
    refit: what `convert` says of its refit of the weights; None without one.
    """

    _define = staticmethod(formats.define)

    def __init__(
        self,
        config: ModelConfig,
        *,
        rngs: nnx.Rngs | None = None,
        mesh: Mesh | NamedMesh | None = None,
        params: Params | None = None,
        tokenizer: Tokenizer | None = None,
        decode: DecodeConfig | None = None,
        context: int | None = None,
        refit: bytes | None = None,
    ):
        """As `nn.Transformer`. Raises UserError for a tokenizer with more tokens than the model,
        too.
        """
        super().__init__(config, rngs=rngs, mesh=mesh, params=params)
        check_type("decode", decode, DecodeConfig, type(None))
        check(
            not isinstance(tokenizer, str), f"tokenizer must be a Tokenizer, not {tokenizer!r:.80}"
        )
        if tokenizer is None and config.vocab_size == tokenizers.Bytes().vocab_size:
            tokenizer = tokenizers.Bytes()
        if tokenizer is not None:
            tokenizers.check_vocabulary(tokenizer, vocab_size=config.vocab_size)
        self.tokenizer = tokenizer
        self.decode = decode or DecodeConfig()
        self.context = context
        self.refit = refit

    def __repr__(self) -> str:
        return f"{super().__repr__()}\n  tokenizer: {self.tokenizer!r}"

    def generate(
        self, prompt: str | Conversation, *, stop: Sequence[str] = (), **settings: Any
    ) -> str:
        """The text that follows `prompt`; for a list of messages, the answer by the tokenizer's
        chat template.

        stop: ends before these strings. settings: any of `DecodeConfig`, such as max_new_tokens=50,
        temperature=0.8, seed=1, quantize="int8"; greedy by default. The first call compiles, and
        lays a copy of the weights out for decoding, which is kept until they change. Raises
        UserError for a wrong setting, and without a tokenizer.
        """
        return "".join(self.stream(prompt, stop=stop, **settings))

    def stream(
        self, prompt: str | Conversation, *, stop: Sequence[str] = (), **settings: Any
    ) -> Iterator[str]:
        """`generate`'s text, as it grows."""
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise UserError(
                "this model has no tokenizer: set model.tokenizer, or decode tokens by a decode.Generator"
            )
        check_type("prompt", prompt, str, list, tuple)
        settings = {**to_dict(self.decode), **settings}
        config = build(DecodeConfig, settings, "decode.")
        encode = tokenizer.encode if isinstance(prompt, str) else tokenizer.chat
        tokens = encode(prompt)
        request = Request.of(tokens, config=config, **ends(stop, tokenizer=tokenizer))
        length = len(request.prompt) + request.max_new_tokens
        generator = _generator(self, loop=config.loop, quantize=config.quantize, capacity=length)

        def texts() -> Iterator[str]:
            with memory.explained("generating"):
                for piece in generator.pieces(request, decoder=tokenizer.to_bytes, config=config):
                    yield piece.text

        return texts()

    def save(self, path: str | os.PathLike, *, format: str | Format = Format.CHECKPOINT) -> None:
        """Write a checkpoint to the new folder `path`, for `load` and every command, or with
        "huggingface" an export.

        See `formats.save`. Raises UserError with several processes, too.
        """
        formats.save(self.source(), path, format=member(Format, "format", format))

    def push_to_hub(
        self, repository: str, *, private: bool | None = None, message: str | None = None
    ) -> str:
        """Upload an export to `org/name` of the Hugging Face Hub, as the user of `hf auth login` or
        HF_TOKEN.

        Returns its URL. private, errors: as in `pretrained.push_to_hub`.
        """
        repository = hub.repository_of(repository)  # before all weights are written
        with tempfile.TemporaryDirectory() as scratch:
            folder = pathlib.Path(scratch) / "export"
            self.save(folder, format=Format.HUGGING_FACE)
            return hub.push(folder, repository, private=private, message=message)

    def source(self) -> Source:
        """The model as `pretrained` reads models: for `pretrained.write_huggingface`, or another
        model's parameters. Raises UserError where a file of its tokenizer was a link out of the
        folder.
        """
        if jax.process_count() > 1:
            raise UserError(
                "a model on several processes is saved by checkpoint.Store, which writes each one's shards"
            )
        source.check_alone(self.config, path="the model in memory")
        params = traverse_util.flatten_dict(self.params, sep="/")
        arrays = source.stored(self.config, params.get)
        where = "the model in memory"
        files = getattr(self.tokenizer, "files", {})
        for name in files:
            huggingface.check_inside(pathlib.Path(self.tokenizer.where, name))
        generation = tokenizers.json_object(files.get(tokenizers.GENERATION, "{}"), where=where)
        return Source(
            where,
            self.config,
            arrays,
            self.context,
            huggingface.without_program(files, where=where),
            generation,
            self.refit,
            self.decode,
            isinstance(self.tokenizer, tokenizers.Bytes),
        )


def from_pretrained(
    name: str | os.PathLike,
    *,
    mesh: Mesh | NamedMesh | None = None,
    residual: str | None = None,
    ladder_layers: str | int | Sequence[int] | None = None,
    ranks: int | None = None,
    dtype: Dtype | np.dtype | str | None = None,
) -> Transformer:
    """The model called `name` with its tokenizer: a checkpoint, a Hugging Face folder, a GGUF file,
    or `org/name[@revision]` of the Hub.

    mesh: by default that of `jax.set_mesh`; without one, as many tensor-parallel devices as it was
    trained on, if there are as many; else one.
    ladder_layers: convert these in memory: N (the last N), [i, j] or "all"; residual, ranks: to
    which kind (default ladder), and for ladder-fresh, the ranks that it is for. dtype: "bfloat16"
    or "float32", of the parameters and of compute; None keeps the stored dtypes, and computes in
    the configuration's.

    Arrays are read one at a time, each onto its shards. Raises UserError where there is no such
    model, for other formats, damaged files, and models that cannot be represented.
    """
    if dtype is not None:
        dtype = member(Dtype, "dtype", dtype)
    opened = open_model(name, ladder_layers=ladder_layers, residual=residual, ranks=ranks)
    tokenizer = opened.tokenizer() if opened.has_tokenizer else None
    if mesh is None:
        mesh = parallel.context_mesh() or parallel.make_mesh(tensor=default_tensor(opened.config))
    mesh = parallel.mesh_of(mesh)
    config = parallel.with_ranks(opened.config.model, tensor=mesh.shape["tensor"])
    stored = None
    if dtype is not None:
        config = dataclasses.replace(config, dtype=dtype, residual_dtype=dtype)
        stored = jnp.dtype(dtype.value)
    definition = formats.define(config, mesh=mesh)
    params = opened.params(definition, dtype=stored)
    return Transformer(
        config,
        mesh=mesh,
        params=params,
        tokenizer=tokenizer,
        decode=opened.config.decode,
        context=opened.config.train.sequence,
        refit=opened.refit,
    )


def load(
    path: str | os.PathLike,
    *,
    mesh: Mesh | NamedMesh | None = None,
    dtype: Dtype | np.dtype | str | None = None,
) -> Transformer:
    """What `Transformer.save` or a run wrote; as `from_pretrained`, which never asks the Hub
    here.
    """
    check_type("path", path, str, os.PathLike)
    if not expanded(path).exists():
        raise UserError(f"there is no model at {str(path)!r}")
    return from_pretrained(path, mesh=mesh, dtype=dtype)


class _Prepared(NamedTuple):
    """A model's newest generator. of: its parameters, by which it was made; form: its settings."""

    of: tuple[weakref.ref, ...]
    form: dict[str, Loop | Quantize]
    generator: Generator


_prepared = weakref.WeakKeyDictionary[Transformer, _Prepared]()
"""Beside the models: a graph that Flax splits off one, which jax keeps with a compiled function,
would hold what its attributes hold.
"""


def _generator(model: Transformer, *, capacity: int, **form: Loop | Quantize) -> Generator:
    """The model's, made again for another form, and when a parameter was replaced.

    capacity: positions that the devices' memory must have room for. form: loop, quantize.
    """
    leaves = jax.tree.leaves(model.params)
    kept = _prepared.get(model)  # once: another thread may replace it
    if kept and kept.form == form and all(ref() is leaf for ref, leaf in zip(kept.of, leaves)):
        return kept.generator
    del kept  # before there are more copies of the weights
    _prepared.pop(model, None)
    with memory.explained("generating"):
        rows = model.definition.layout.batch_ranks
        memory.check_slots(model.definition, slots=rows, capacity=capacity, chunk=CHUNK, **form)
        generator = Generator(model, **form)
    _prepared[model] = _Prepared(tuple(map(weakref.ref, leaves)), form, generator)
    return generator
