"""What can be set: frozen dataclasses, a file a section, validated as they are made. Imports no jax."""

from ladder_jax.config.schema.checks import check as check
from ladder_jax.config.schema.checks import check_positive as check_positive
from ladder_jax.config.schema.data import DataConfig as DataConfig
from ladder_jax.config.schema.data import Format as Format
from ladder_jax.config.schema.decode import DecodeConfig as DecodeConfig
from ladder_jax.config.schema.decode import Quantize as Quantize
from ladder_jax.config.schema.execution import Dtype as Dtype
from ladder_jax.config.schema.execution import Launch as Launch
from ladder_jax.config.schema.execution import Loop as Loop
from ladder_jax.config.schema.execution import Phase as Phase
from ladder_jax.config.schema.mesh import MeshConfig as MeshConfig
from ladder_jax.config.schema.mesh import check_fits_mesh as check_fits_mesh
from ladder_jax.config.schema.model import Biases as Biases
from ladder_jax.config.schema.model import ModelConfig as ModelConfig
from ladder_jax.config.schema.model import RopeScaling as RopeScaling
from ladder_jax.config.schema.retrain import START as START
from ladder_jax.config.schema.retrain import ConversionConfig as ConversionConfig
from ladder_jax.config.schema.retrain import DistillConfig as DistillConfig
from ladder_jax.config.schema.retrain import LoraConfig as LoraConfig
from ladder_jax.config.schema.retrain import Pace as Pace
from ladder_jax.config.schema.run import FolderConfig as FolderConfig
from ladder_jax.config.schema.run import OnDamaged as OnDamaged
from ladder_jax.config.schema.run import RunConfig as RunConfig
from ladder_jax.config.schema.train import OnBadStep as OnBadStep
from ladder_jax.config.schema.train import Remat as Remat
from ladder_jax.config.schema.train import TrainConfig as TrainConfig
