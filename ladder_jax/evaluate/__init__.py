"""Evaluation: perplexity; and through lm-evaluation-harness multiple choice, written answers, and
its own tasks.
"""

from ladder_jax.evaluate.model import Model as Model, open_model as open_model
from ladder_jax.evaluate.perplexity import (
    Perplexity as Perplexity,
    perplexity as perplexity,
    text_perplexity as text_perplexity,
)
from ladder_jax.evaluate.scorer import Score as Score, Scorer as Scorer, Span as Span
from ladder_jax.evaluate.tasks import (
    Choice as Choice,
    Generation as Generation,
    MultipleChoice as MultipleChoice,
    Question as Question,
    generation as generation,
    multiple_choice as multiple_choice,
    read_choices as read_choices,
    read_questions as read_questions,
)
