"""Meshes, partition rules and collectives: everything that knows about several devices."""

from ladder_jax.parallel.collectives import (
    all_gather as all_gather,
    all_max as all_max,
    all_ranks as all_ranks,
    all_reduce as all_reduce,
    anywhere as anywhere,
    is_v5e as is_v5e,
    pvary as pvary,
    rank as rank,
    ranks as ranks,
    reduce_scatter as reduce_scatter,
    resolve_launch as resolve_launch,
    start_all_reduce as start_all_reduce,
    varying as varying,
)
from ladder_jax.parallel.compiled import (
    Compiled as Compiled,
    cache_programs as cache_programs,
    compile_options as compile_options,
    has_accelerator as has_accelerator,
    on_mesh as on_mesh,
    on_own_mesh as on_own_mesh,
    over_mesh as over_mesh,
    over_ranks as over_ranks,
    prefer_cpu as prefer_cpu,
    use_compilation_cache as use_compilation_cache,
)
from ladder_jax.parallel.compiler_options import (
    Overlap as Overlap,
    Split as Split,
    Traits as Traits,
)
from ladder_jax.parallel.mesh import (
    Layout as Layout,
    NamedMesh as NamedMesh,
    apart as apart,
    context_mesh as context_mesh,
    layout as layout,
    make_mesh as make_mesh,
    mesh_of as mesh_of,
    with_ranks as with_ranks,
)

prefer_cpu()  # before anything of ours asks jax for its devices
