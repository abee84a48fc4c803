"""The sensitivity of layers: the loss on a text with layers converted to ladder layers, singly and together."""

from ladder_jax.pretrained.sensitivity.calibration import Text as Text
from ladder_jax.pretrained.sensitivity.calibration import parse_text as parse_text
from ladder_jax.pretrained.sensitivity.calibration import rows_of as rows_of
from ladder_jax.pretrained.sensitivity.calibration import rows_of_texts as rows_of_texts
from ladder_jax.pretrained.sensitivity.measure import Search as Search
from ladder_jax.pretrained.sensitivity.measure import count as count
from ladder_jax.pretrained.sensitivity.measure import measure as measure
from ladder_jax.pretrained.sensitivity.result import Result as Result
from ladder_jax.pretrained.sensitivity.result import Subset as Subset
