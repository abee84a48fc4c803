"""Settings: frozen dataclasses with their presets, and the files and overrides that make one
RunConfig of them.
"""

from ladder_jax.config.load import (
    Json as Json,
    from_dict as from_dict,
    is_file as is_file,
    load as load,
    model_from_dict as model_from_dict,
    to_dict as to_dict,
)
from ladder_jax.config.model import (
    EXPERT_RESIDUALS as EXPERT_RESIDUALS,
    PRESETS as PRESETS,
    RESIDUALS as RESIDUALS,
    SCANNED as SCANNED,
    UNROLLED as UNROLLED,
    Biases as Biases,
    CollectiveMatmul as CollectiveMatmul,
    Dtype as Dtype,
    Execution as Execution,
    Interleave as Interleave,
    Launch as Launch,
    Loop as Loop,
    ModelConfig as ModelConfig,
    Phase as Phase,
    QKNorm as QKNorm,
    Remat as Remat,
    RopeScaling as RopeScaling,
    check_execution as check_execution,
    layer_indices as layer_indices,
    parse_residual as parse_residual,
    preset as preset,
    recipe as recipe,
)
from ladder_jax.config.model_sections import (
    ExpertParallelism as ExpertParallelism,
    MoEConfig as MoEConfig,
    RouterSoftmax as RouterSoftmax,
    SideConfig as SideConfig,
    check_exchange as check_exchange,
)
from ladder_jax.config.retrain import (
    START as START,
    ConversionConfig as ConversionConfig,
    DistillConfig as DistillConfig,
    LoraConfig as LoraConfig,
    Pace as Pace,
)
from ladder_jax.config.run import (
    DataConfig as DataConfig,
    DecodeConfig as DecodeConfig,
    FolderConfig as FolderConfig,
    Format as Format,
    MeshConfig as MeshConfig,
    OnBadStep as OnBadStep,
    OnDamaged as OnDamaged,
    Quantize as Quantize,
    RunConfig as RunConfig,
    TrainConfig as TrainConfig,
    check_fits_mesh as check_fits_mesh,
)

presets = PRESETS  # `lj.presets`
