"""Small runs on a text: their settings, and what they log."""

from ladder_jax import config, train
from ladder_jax.train import metrics

TINY = """
    model.num_layers=1 model.d_model=32 model.d_ff=32 model.dtype=float32 model.residual_dtype=float32
    train.batch=4 train.sequence=32 train.warmup_steps=5 train.log_every=1
""".split()

NINE_STEPS = """
    train.steps=9 train.checkpoint_every=4 train.warmup_steps=2 train.evaluate_every=6
    train.evaluation_batches=1 train.loss_chunk=48 mesh.tensor=2
""".split()
"""Of test_loop and test_cli, which compile one program then."""


def words(data, directory, *more):
    """The settings, as on the command line after the preset."""
    return [*TINY, f"data.path={data}", f"run.dir={directory}", *more]


def run(data, directory, *more, say=lambda line: None):
    """The result of a run in this process, which needs no seconds to start."""
    return train.run(config.load("tiny", overrides=words(data, directory, *more)), say=say)


def losses(directory):
    return [
        (row["step"], row["loss"], row.get("validation_loss")) for row in metrics.read(directory)
    ]
