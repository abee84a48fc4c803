"""The Transformer as a Flax module, compiled for its mesh."""

import functools

import jax
from flax import nnx
from jax.sharding import Mesh

from ladder_jax.config import Execution, Loop, ModelConfig, Phase
from ladder_jax.errors import UserError
from ladder_jax.nn import arguments
from ladder_jax.nn.forward import forward_pass, logits
from ladder_jax.nn.model_def import ModelDef, Params, define, initialize
from ladder_jax.nn.parameter import Module, next_key
from ladder_jax.parallel import (
    Compiled,
    NamedMesh,
    context_mesh,
    make_mesh,
    mesh_of,
    on_mesh,
    on_own_mesh,
    over_ranks,
    with_ranks,
)
from ladder_jax.residual import Topology


class Transformer(Module):
    """A Llama-family decoder: `Transformer(preset("tiny"), rngs=nnx.Rngs(0), mesh=make_mesh(tensor=4))`.

    Its attributes are Flax modules (`model.layers.attention.query`), each parameter of which is a
    global array laid out over the mesh; the layers' parameters are stacked, [L, ...].
    """

    define = staticmethod(define)

    def __init__(
        self,
        config: ModelConfig,
        *,
        rngs: nnx.Rngs | None = None,
        mesh: Mesh | NamedMesh | None = None,
        params: Params | None = None,
    ):
        """Initial values by `rngs.params`, or `params` in their place, all of them.

        mesh: axes data, fsdp, tensor, or others' by `mesh_of`; by default that of `jax.set_mesh`, or else one device.
            The initial values do not depend on it.
        Raises UserError where the model cannot be split over the mesh, or `params` are another model's.
        """
        if not isinstance(config, ModelConfig):
            raise UserError(f"a Transformer takes a ModelConfig, such as preset('tiny'), not {config!r:.80}")
        if (rngs is None) == (params is None):
            raise UserError("a Transformer takes either rngs=nnx.Rngs(seed), for new weights, or params=")
        mesh = mesh_of((context_mesh() or make_mesh()) if mesh is None else mesh)
        config = with_ranks(config, tensor=mesh.shape["tensor"])
        self.definition = self.define(config, mesh=mesh)
        for name, module in self.definition.declare().items():
            setattr(self, name, module)
        if params is None:
            params = initialize(self.definition, key=next_key(rngs))
        else:
            arguments.check_params(params, expected=self.definition.abstract)
            if not mesh.is_own:  # the caller's code has them by their types
                params = jax.device_put(params, jax.tree.map(lambda a: a.sharding, self.definition.abstract))
        nnx.update(self, params)

    @property
    def config(self) -> ModelConfig:
        return self.definition.config

    @property
    def mesh(self) -> Mesh:
        """The caller's; of `make_mesh`, where ranks share a key/value head, with the axes kv and group for tensor."""
        layout = self.definition.layout
        return layout.mesh if layout.given.is_own else layout.given.mesh

    @property
    def topology(self) -> Topology:
        return self.definition.topology

    @property
    def params(self) -> Params:
        """The plain nested dict of arrays that compiled functions take."""
        return nnx.to_pure_dict(nnx.state(self))

    def __repr__(self) -> str:
        first, *parameters = super().__repr__().splitlines()
        return "\n".join([f"{first}, {self.definition.layout}", f"  {self.config}", *parameters])

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Float32 logits [B, T, V] for integer tokens [B, T]; B must be divisible by data x fsdp.

        Compiled for the mesh's devices. Under `jax.jit`, `jax.grad` and the like it is a function like any other, and
        their program's options are the caller's: `model.definition.topology.compile_options(mesh, phase="train")`.
        Ids outside the vocabulary are a UserError, but for traced ones, which nobody knows yet. An array on a device
        is read for that, so the call waits until it is there.
        """
        sizes = dict(batch_ranks=self.definition.layout.batch_ranks, vocab_size=self.config.vocab_size)
        return compiled_logits(self.definition)(self.params, arguments.checked_tokens(tokens, **sizes))


@functools.cache
def compiled_logits(definition: ModelDef, *, loop: Loop = Loop.SCAN) -> Compiled:
    """A compiled (params, tokens [B, T]) -> logits [B, T, V], the whole model in one shard_map.

    Raises UserError for another model's parameters.
    """
    execution = Execution(loop=loop)

    def local(params, tokens):
        run = forward_pass(definition, tokens.shape, execution=execution)
        state, extra = run.embed(params, tokens)
        state, extra, _ = run.layers(state, extra, params=params)
        return logits(definition, params, run.finish(params, state, extra))

    dims = ((definition.dims, "BT"), "BTV")
    ranked = over_ranks(local, layout=definition.layout, in_dims=dims[0], out_dims=dims[1])
    meshed = on_mesh(ranked, layout=definition.layout, in_dims=dims[0], out_dims=dims[1])

    def stripped(params, tokens):
        arguments.check_params(params, expected=definition.abstract)  # once a shape, while it is traced
        return meshed(params, tokens)[..., : definition.config.vocab_size]

    traits = definition.traits(execution, phase=Phase.PREFILL)
    whole = on_own_mesh(stripped, layout=definition.layout, out_dims=dims[1])
    return Compiled(whole, mesh=definition.layout.mesh, traits=traits)
