"""Compile for hardware that this machine lacks, and read from the schedule how much communication
is hidden.
"""

from ladder_jax.schedule.judge import assert_hidden as assert_hidden
from ladder_jax.schedule.judge import audit as audit
from ladder_jax.schedule.report import Report as Report
from ladder_jax.schedule.targets import TARGETS as TARGETS
from ladder_jax.schedule.targets import Target as Target
from ladder_jax.schedule.targets import devices as devices
from ladder_jax.schedule.targets import make_mesh as make_mesh
from ladder_jax.schedule.targets import parse as parse
