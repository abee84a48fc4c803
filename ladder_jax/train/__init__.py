"""Training: the compiled step, the loop around it, and the folder that a run writes."""

from ladder_jax.train.gradients import Pretraining as Pretraining
from ladder_jax.train.gradients import TrainingTask as TrainingTask
from ladder_jax.train.gradients import loss_and_gradients as loss_and_gradients
from ladder_jax.train.gradients import mean_loss as mean_loss
from ladder_jax.train.run import Result as Result
from ladder_jax.train.run import resolve as resolve
from ladder_jax.train.run import run as run
from ladder_jax.train.step import TrainState as TrainState
from ladder_jax.train.step import abstract_batch as abstract_batch
from ladder_jax.train.step import abstract_state as abstract_state
from ladder_jax.train.step import initial_state as initial_state
from ladder_jax.train.step import train_step as train_step
from ladder_jax.train.timing import parse_profile as parse_profile
