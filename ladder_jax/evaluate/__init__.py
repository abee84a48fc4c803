"""Evaluation: perplexity; and through lm-evaluation-harness multiple choice, written answers, and
its own tasks.
"""

from ladder_jax.evaluate.model import Model as Model
from ladder_jax.evaluate.model import open_model as open_model
from ladder_jax.evaluate.perplexity import Perplexity as Perplexity
from ladder_jax.evaluate.perplexity import perplexity as perplexity
from ladder_jax.evaluate.perplexity import text_perplexity as text_perplexity
from ladder_jax.evaluate.scorer import Score as Score
from ladder_jax.evaluate.scorer import Scorer as Scorer
from ladder_jax.evaluate.scorer import Span as Span
from ladder_jax.evaluate.tasks import Choice as Choice
from ladder_jax.evaluate.tasks import Generation as Generation
from ladder_jax.evaluate.tasks import MultipleChoice as MultipleChoice
from ladder_jax.evaluate.tasks import Question as Question
from ladder_jax.evaluate.tasks import generation as generation
from ladder_jax.evaluate.tasks import multiple_choice as multiple_choice
from ladder_jax.evaluate.tasks import read_choices as read_choices
from ladder_jax.evaluate.tasks import read_questions as read_questions
