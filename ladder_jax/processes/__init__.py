"""One run on several processes: jax connects them; a watchdog names the one that is lost, stuck or
failed.
"""

from ladder_jax.processes.join import joined as joined
from ladder_jax.processes.options import (
    ProcessSpec as ProcessSpec,
    Timeouts as Timeouts,
    spec as spec,
    timeouts as timeouts,
)
