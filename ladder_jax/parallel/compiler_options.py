"""Compiler options that make collectives asynchronous: one table by kind of device, with the
evidence for each option.

The evidence is schedules compiled with jax 0.12.0.1, libtpu 0.0.50.1 and the CUDA 13 plugin.
`ladder-jax overlap` compiles them again, and `make audit` fails when a new compiler behaves
otherwise.
"""

import dataclasses
import enum

from ladder_jax.config import CollectiveMatmul, Launch, Loop, Phase


class Overlap(enum.Enum):
    """Whether a program's reductions can overlap compute: options that serve one kind harm the
    other.
    """

    HIDES = "hides"  # ladder kinds
    # standard, parallel, desync: the fastest reduction is best, asynchronous or not
    WAITS = "waits"


class Split(enum.Enum):
    """What is split beside the tensor-parallel dimensions, and therefore gathered and
    reduce-scattered.
    """

    WEIGHTS = "weights"  # over the fsdp axis
    SEQUENCE = "sequence"  # of the stream, over the tensor ranks
    EXPERTS = "experts"  # over the tensor ranks; each gathers the rows of its own by their places
    ROWS = "rows"  # of experts, which the tensor ranks exchange


@dataclasses.dataclass(frozen=True)
class Traits:
    """What a program's compiler options depend on, beside the device. launch: CHAINED or
    EXPLICIT.
    """

    overlap: Overlap
    phase: Phase
    loop: Loop
    split: frozenset[Split] = frozenset()
    collective_matmul: CollectiveMatmul = CollectiveMatmul.NONE
    launch: Launch = Launch.CHAINED


Programs = tuple[Split | CollectiveMatmul, ...]


@dataclasses.dataclass(frozen=True)
class Option:
    """A compiler option, the programs for which it is set, and the evidence for it (`why`).

    waits: set also where reductions wait. loop, launch: for these alone; None: for all.
    of: set for programs that split one of these, or have matmuls of one of these forms; empty: for
        all. unless: not for programs that do, or have. rescue: set only after the compiler has
        failed without it.
    """

    name: str
    value: bool | int | float | str
    why: str
    waits: bool = False
    phases: tuple[Phase, ...] = tuple(Phase)
    loop: Loop | None = None
    launch: Launch | None = None
    rescue: bool = False
    of: Programs = ()
    unless: Programs = ()

    def serves(self, traits: Traits) -> bool:
        own = {*traits.split, traits.collective_matmul}
        return (
            (self.waits or traits.overlap is Overlap.HIDES)
            and traits.phase in self.phases
            and self.loop in (None, traits.loop)
            and self.launch in (None, traits.launch)
            and own.isdisjoint(self.unless)
            and not (self.of and own.isdisjoint(self.of))
        )


_OFFLOAD = Option(
    "xla_tpu_enable_sparse_core_collective_offload_all_reduce",
    True,
    "synchronous on the TensorCore without it; the SparseCore reduces beside it (schedules of v5p and v6e)",
)
_OFFLOAD_SMALL = Option(
    "xla_tpu_sparse_core_all_reduce_offload_min_size_in_bytes",
    0,
    "below 64 KiB the compiler keeps an all-reduce on the TensorCore, synchronous (a batch-1 decode's 16 KiB)",
    phases=(Phase.DECODE,),
)
_EARLIER = Option(
    "xla_tpu_sparse_core_all_reduce_latency_multiplier",
    3.0,
    "the compiler believes in less time than the wire takes, and issues too late: of a rematerialised scan's backward"
    " it left an all-reduce two small operations (v6e), in two halves of a batch a fortieth of a sublayer (v5p); with 3"
    " half a sublayer and a quarter, at no more estimated cycles (v5p: 0.05 %)",
    phases=(Phase.TRAIN,),
    unless=(Split.EXPERTS,),
)
_EARLIER_BESIDE_EXPERTS = Option(
    _EARLIER.name,
    20.0,
    "the same beside experts, whose rows' last sum alone the compiler takes for long enough: of a training step of"
    " qwen3-30b-a3b over 8 ranks, no kernel of the experts was beside attention's all-reduce on v5p, v6e and tpu7x, nor"
    " with 10; with 20 all three, at 0.2 % more estimated cycles (v5p)",
    phases=(Phase.TRAIN,),
    of=(Split.EXPERTS,),
)
_OFFLOAD_HALVES = tuple(
    Option(
        f"xla_tpu_enable_sparse_core_collective_offload_{kind}",
        True,
        f"every {kind.replace('_', '-')} is synchronous on the TensorCore without it (schedules of v5p and v6e)",
        waits=True,
        of=(Split.WEIGHTS, Split.SEQUENCE),
    )
    for kind in ("all_gather", "reduce_scatter")
)
_SEVERAL = Option(
    "xla_tpu_enable_concurrent_sparse_core_offloading",
    True,
    "one collective at a time without it, and weights took the sublayers' outputs' place: v6e, 2 layers, hid 4 of 8"
    " all-reduces, and 7 with it, at the same estimated cycles",
    waits=True,
    of=(Split.WEIGHTS,),
)

_SEVERAL_SIDES = Option(
    "xla_tpu_enable_sparse_core_collective_offload_nd_reduce_scatter",
    True,
    "a reduce-scatter over several sides of the torus becomes one synchronous all-reduce of a layer's seven gradients"
    " without it: v5p:2x2x2, 4 layers of 1B over fsdp 8, hid no byte of them; with it 6 of the 7 inside the scan",
    waits=True,
    of=(Split.WEIGHTS,),
)


def _stream(kib, fewer):
    return Option(
        "xla_tpu_scoped_vmem_limit_kib",
        kib,
        "room for matmuls to stream their matrices from main memory, where the compiler would prefetch whole ones into"
        f" vector memory and read them there again: {fewer} estimated cycles of a decode step, in either topology",
        waits=True,
        phases=(Phase.DECODE,),
        loop=Loop.UNROLLED,
    )


_GATHER = Option(
    "xla_tpu_offload_gather_to_sparsecore",
    False,
    "otherwise the SparseCore gathers the experts' rows, and reduces nothing beside their kernels: in a prefill of"
    " 2,048 tokens, 4 layers of qwen3-30b-a3b with a shared expert over 8 ranks, attention's all-reduce began after the"
    " last of a layer's kernels on v5p, v6e and tpu7x; with it before the first",
    of=(Split.EXPERTS,),
)

_ALL_TO_ALL = Option(
    "xla_tpu_enable_async_all_to_all",
    True,
    "every all-to-all is synchronous without it (schedules of v5p and tpu7x)",
    waits=True,
    of=(Split.ROWS,),
)

_OFFLOADED = (
    *(*_OFFLOAD_HALVES, _GATHER, _ALL_TO_ALL, _OFFLOAD, _SEVERAL, _SEVERAL_SIDES),
    *(_OFFLOAD_SMALL, _EARLIER, _EARLIER_BESIDE_EXPERTS),
)

TABLE: dict[str, tuple[Option, ...]] = {
    "TPU v5 lite": (
        Option(
            "xla_tpu_enable_async_collective_fusion_fuse_all_reduce",
            True,
            "fuses the steps of an all-reduce with the matmuls beside it; v5e has no SparseCore",
        ),
        Option(
            "xla_enable_async_all_reduce",
            True,
            "needed together with the fusion; a hard error on v5p and v6e, which once gave NaN (jax#38741)",
        ),
        Option(
            "xla_tpu_scoped_vmem_limit_kib",
            65536,
            "room for that fusion: without it half of a scanned decode's all-reduces stay synchronous, and a scanned"
            " training step takes 8 % more estimated cycles",
            loop=Loop.SCAN,
        ),
        Option(
            "xla_tpu_scoped_vmem_limit_kib",
            65536,
            "an unrolled training step's backward hides one or two more with it, in 2 % fewer estimated cycles",
            phases=(Phase.TRAIN,),
            loop=Loop.UNROLLED,
        ),
        Option(
            "xla_tpu_scoped_vmem_limit_kib",
            65536,
            "over 2x2 chips (tensor 4) an unrolled prefill fails without it, over 2x4 with it; it costs a decode 30 %",
            phases=(Phase.PREFILL, Phase.DECODE),
            loop=Loop.UNROLLED,
            rescue=True,
        ),
    ),
    "TPU v5": (*_OFFLOADED, _stream(65536, "8 % fewer")),
    "TPU v6 lite": _OFFLOADED,
    # Collectives run on the SparseCore by default.
    "TPU7x": (
        _GATHER,
        _EARLIER_BESIDE_EXPERTS,
        _ALL_TO_ALL,
        _OFFLOAD_SMALL,
        Option(
            "xla_tpu_sparse_core_all_gather_latency_multiplier",
            0.5,
            "the compiler gives all of attention to the gather of the next input, and nothing to the reduce-scatter"
            " before it: in 4 layers 3 of 7 were left bare; with half of its estimate, none",
            phases=(Phase.PREFILL,),
            of=(Split.SEQUENCE,),
        ),
        Option(
            "xla_tpu_sparse_core_all_gather_latency_multiplier",
            0.5,
            "the same of a shared expert's input beside the rows of the routed ones: in a training step of 4 layers of"
            " qwen1.5-moe-a2.7b 4 of 9 forward all-to-alls were hidden, and 8 with it",
            phases=(Phase.TRAIN,),
            of=(Split.ROWS,),
        ),
        _stream(49152, "8 % fewer"),
        Option(
            "xla_tpu_control_large_2nd_minor_layout_for_x16",
            False,
            "ahead of the loop over tokens the compiler tiles every matrix anew, for matmuls that gain nothing by it: a"
            " second copy of the weights in memory, and 1.13 times the least bytes a token where it is 1.03 without",
            waits=True,
            phases=(Phase.DECODE,),
        ),
    ),
    "NVIDIA": (
        Option(
            "xla_gpu_enable_latency_hiding_scheduler",
            True,
            "the default on an H100 or B200, but not on every spec (an A100-like one)",
            waits=True,
        ),
        Option(
            "xla_gpu_experimental_use_collective_kernels",
            "",
            "an all-reduce of at most 4 MiB is a Triton kernel by default: fast, and never overlapped but in two"
            " halves; this gives NCCL",
            phases=(Phase.DECODE,),
            launch=Launch.CHAINED,
        ),
        Option(
            "xla_gpu_experimental_parallel_collective_overlap_limit",
            4,
            "one collective at a time by default: weights and sublayers' outputs took each other's place, and 8 of 16"
            " all-reduces were left with nothing beside them; with 4, one. A ring's second direction was synchronous",
            waits=True,
            of=(Split.WEIGHTS, CollectiveMatmul.RING),
        ),
        Option(
            "xla_gpu_experimental_parallel_collective_overlap_limit",
            4,
            "with a shared expert two stand in each half of attention; one at a time, 4 layers of qwen1.5-moe-a2.7b hid"
            " 1 of 8 all-to-alls as a ladder and 4 as farskip, and 7 with 4",
            of=(Split.ROWS,),
            unless=(Split.WEIGHTS, CollectiveMatmul.RING),
        ),
        Option(
            "xla_gpu_collective_permute_combine_threshold_bytes",
            0,
            "permutes of two rings merged without it, in the backward pass, where an input is gathered again beside the"
            " scatter of its gradient: 2 scanned layers of training hid 15 of 21 collectives, and 18 of 22 with it",
            waits=True,
            of=(CollectiveMatmul.RING,),
        ),
        Option(
            "xla_gpu_all_gather_combine_threshold_bytes",
            2**28,
            "one or two messages a layer instead of six: each hides under a sublayer or more, where of six some hid"
            " under nothing. Larger, it would join the embedding's and the head's to the first layer's",
            waits=True,
            of=(Split.WEIGHTS,),
        ),
        Option(
            "xla_gpu_reduce_scatter_combine_threshold_bytes",
            2**29,
            "the same for gradients, which are in float32",
            waits=True,
            of=(Split.WEIGHTS,),
        ),
    ),
}
