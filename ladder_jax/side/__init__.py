"""A small network beside a frozen model, which trains in its place. A client of `nn`, which knows
nothing of it.
"""

from ladder_jax.side.model import SIDE as SIDE, SideModel as SideModel, define as define
