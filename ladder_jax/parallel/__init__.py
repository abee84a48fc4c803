"""Meshes, partition rules and collectives: everything that knows about several devices."""

from ladder_jax.parallel.collectives import all_gather as all_gather
from ladder_jax.parallel.collectives import all_max as all_max
from ladder_jax.parallel.collectives import all_ranks as all_ranks
from ladder_jax.parallel.collectives import all_reduce as all_reduce
from ladder_jax.parallel.collectives import anywhere as anywhere
from ladder_jax.parallel.collectives import is_v5e as is_v5e
from ladder_jax.parallel.collectives import pvary as pvary
from ladder_jax.parallel.collectives import rank as rank
from ladder_jax.parallel.collectives import ranks as ranks
from ladder_jax.parallel.collectives import reduce_scatter as reduce_scatter
from ladder_jax.parallel.collectives import resolve_launch as resolve_launch
from ladder_jax.parallel.collectives import start_all_reduce as start_all_reduce
from ladder_jax.parallel.collectives import varying as varying
from ladder_jax.parallel.compiled import Compiled as Compiled
from ladder_jax.parallel.compiled import compile_options as compile_options
from ladder_jax.parallel.compiled import has_accelerator as has_accelerator
from ladder_jax.parallel.compiled import on_mesh as on_mesh
from ladder_jax.parallel.compiled import on_own_mesh as on_own_mesh
from ladder_jax.parallel.compiled import over_mesh as over_mesh
from ladder_jax.parallel.compiled import over_ranks as over_ranks
from ladder_jax.parallel.compiled import prefer_cpu as prefer_cpu
from ladder_jax.parallel.compiled import use_compilation_cache as use_compilation_cache
from ladder_jax.parallel.compiler_options import Overlap as Overlap
from ladder_jax.parallel.compiler_options import Split as Split
from ladder_jax.parallel.compiler_options import Traits as Traits
from ladder_jax.parallel.mesh import Layout as Layout
from ladder_jax.parallel.mesh import NamedMesh as NamedMesh
from ladder_jax.parallel.mesh import apart as apart
from ladder_jax.parallel.mesh import context_mesh as context_mesh
from ladder_jax.parallel.mesh import layout as layout
from ladder_jax.parallel.mesh import make_mesh as make_mesh
from ladder_jax.parallel.mesh import mesh_of as mesh_of
from ladder_jax.parallel.mesh import with_ranks as with_ranks

prefer_cpu()  # before anything of ours asks jax for its devices
