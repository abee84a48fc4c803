"""What can be set, its presets, and how files and overrides become one RunConfig."""

from ladder_jax.config.presets import preset as preset
from ladder_jax.config.resolve import from_dict as from_dict
from ladder_jax.config.resolve import load as load
from ladder_jax.config.resolve import model_from_dict as model_from_dict
from ladder_jax.config.resolve import to_dict as to_dict
from ladder_jax.config.schema import Biases as Biases
from ladder_jax.config.schema import ConversionConfig as ConversionConfig
from ladder_jax.config.schema import DataConfig as DataConfig
from ladder_jax.config.schema import DecodeConfig as DecodeConfig
from ladder_jax.config.schema import DistillConfig as DistillConfig
from ladder_jax.config.schema import Dtype as Dtype
from ladder_jax.config.schema import Format as Format
from ladder_jax.config.schema import Launch as Launch
from ladder_jax.config.schema import Loop as Loop
from ladder_jax.config.schema import LoraConfig as LoraConfig
from ladder_jax.config.schema import MeshConfig as MeshConfig
from ladder_jax.config.schema import ModelConfig as ModelConfig
from ladder_jax.config.schema import OnBadStep as OnBadStep
from ladder_jax.config.schema import OnDamaged as OnDamaged
from ladder_jax.config.schema import Pace as Pace
from ladder_jax.config.schema import Phase as Phase
from ladder_jax.config.schema import Quantize as Quantize
from ladder_jax.config.schema import Remat as Remat
from ladder_jax.config.schema import RopeScaling as RopeScaling
from ladder_jax.config.schema import RunConfig as RunConfig
from ladder_jax.config.schema import TrainConfig as TrainConfig
