"""Settings: frozen dataclasses with their presets, and the files and overrides that make one
RunConfig of them.
"""

from ladder_jax.config.load import from_dict as from_dict
from ladder_jax.config.load import load as load
from ladder_jax.config.load import model_from_dict as model_from_dict
from ladder_jax.config.load import to_dict as to_dict
from ladder_jax.config.model import EXPERT_RESIDUALS as EXPERT_RESIDUALS
from ladder_jax.config.model import PRESETS as PRESETS
from ladder_jax.config.model import RESIDUALS as RESIDUALS
from ladder_jax.config.model import SCANNED as SCANNED
from ladder_jax.config.model import UNROLLED as UNROLLED
from ladder_jax.config.model import Biases as Biases
from ladder_jax.config.model import CollectiveMatmul as CollectiveMatmul
from ladder_jax.config.model import Dtype as Dtype
from ladder_jax.config.model import Execution as Execution
from ladder_jax.config.model import Interleave as Interleave
from ladder_jax.config.model import Launch as Launch
from ladder_jax.config.model import Loop as Loop
from ladder_jax.config.model import ModelConfig as ModelConfig
from ladder_jax.config.model import Phase as Phase
from ladder_jax.config.model import QKNorm as QKNorm
from ladder_jax.config.model import Remat as Remat
from ladder_jax.config.model import RopeScaling as RopeScaling
from ladder_jax.config.model import check_collective_matmul as check_collective_matmul
from ladder_jax.config.model import check_halves as check_halves
from ladder_jax.config.model import check_interleave as check_interleave
from ladder_jax.config.model import layer_indices as layer_indices
from ladder_jax.config.model import parse_residual as parse_residual
from ladder_jax.config.model import preset as preset
from ladder_jax.config.model import recipe as recipe
from ladder_jax.config.model_sections import ExpertParallelism as ExpertParallelism
from ladder_jax.config.model_sections import MoEConfig as MoEConfig
from ladder_jax.config.model_sections import RouterSoftmax as RouterSoftmax
from ladder_jax.config.model_sections import SideConfig as SideConfig
from ladder_jax.config.model_sections import check_exchange as check_exchange
from ladder_jax.config.retrain import START as START
from ladder_jax.config.retrain import ConversionConfig as ConversionConfig
from ladder_jax.config.retrain import DistillConfig as DistillConfig
from ladder_jax.config.retrain import LoraConfig as LoraConfig
from ladder_jax.config.retrain import Pace as Pace
from ladder_jax.config.run import DataConfig as DataConfig
from ladder_jax.config.run import DecodeConfig as DecodeConfig
from ladder_jax.config.run import FolderConfig as FolderConfig
from ladder_jax.config.run import Format as Format
from ladder_jax.config.run import MeshConfig as MeshConfig
from ladder_jax.config.run import OnBadStep as OnBadStep
from ladder_jax.config.run import OnDamaged as OnDamaged
from ladder_jax.config.run import Quantize as Quantize
from ladder_jax.config.run import RunConfig as RunConfig
from ladder_jax.config.run import TrainConfig as TrainConfig
from ladder_jax.config.run import check_fits_mesh as check_fits_mesh

presets = PRESETS  # `lj.presets`
