"""One run on several processes: jax connects them; a watchdog names the one that is lost, stuck or
failed.
"""

from ladder_jax.processes.join import Member as Member
from ladder_jax.processes.join import joined as joined
from ladder_jax.processes.options import ProcessSpec as ProcessSpec
from ladder_jax.processes.options import Timeouts as Timeouts
from ladder_jax.processes.options import spec as spec
from ladder_jax.processes.options import timeouts as timeouts
