"""Pretrained models of other programs: in, and out again."""

from ladder_jax.pretrained.source import Key as Key
from ladder_jax.pretrained.source import Source as Source
from ladder_jax.pretrained.source import Stored as Stored
