"""Training: the compiled step, the loop around it, and the folder that a run writes."""

from ladder_jax.train.gradients import (
    Pretraining as Pretraining,
    TrainingTask as TrainingTask,
    loss_and_gradients as loss_and_gradients,
    mean_loss as mean_loss,
)
from ladder_jax.train.run import Result as Result, resolve as resolve, run as run
from ladder_jax.train.step import (
    TrainState as TrainState,
    abstract_batch as abstract_batch,
    abstract_state as abstract_state,
    initial_state as initial_state,
    train_step as train_step,
)
from ladder_jax.train.timing import parse_profile as parse_profile
