"""Training: optimizer, step, loop, and the folder a run leaves."""

from ladder_jax.train import profile as profile
from ladder_jax.train.gradients import loss_and_gradients as loss_and_gradients
from ladder_jax.train.gradients import mean_loss as mean_loss
from ladder_jax.train.loop import Result as Result
from ladder_jax.train.loop import run as run
from ladder_jax.train.step import TrainState as TrainState
from ladder_jax.train.step import abstract_batch as abstract_batch
from ladder_jax.train.step import abstract_state as abstract_state
from ladder_jax.train.step import initial_state as initial_state
from ladder_jax.train.step import train_step as train_step
