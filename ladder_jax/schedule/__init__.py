"""Compile for hardware that this machine lacks, and read from the schedule how much communication
is hidden.
"""

from ladder_jax.schedule.judge import assert_hidden as assert_hidden, audit as audit
from ladder_jax.schedule.report import Report as Report
from ladder_jax.schedule.targets import (
    TARGETS as TARGETS,
    Target as Target,
    devices as devices,
    make_mesh as make_mesh,
    parse as parse,
)
