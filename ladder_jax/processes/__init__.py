"""One run on several processes: who they are, their meeting, and what becomes of the run when one of them is lost.

`ladder-jax train` is then two processes on each host: a worker, which computes, and its parent, which does not import
jax. The parents meet before any worker starts (`rendezvous`), hear from each other while they run (`team`), and stop
their workers with one clear line when one of them is lost or hangs (`supervise`). jax's own end there is an abort in
the middle of a C++ thread, a stack trace on each host and no name.
"""

from ladder_jax.processes.patience import Patience as Patience
from ladder_jax.processes.place import Place as Place
from ladder_jax.processes.place import find as find
from ladder_jax.processes.settings import SETTINGS as SETTINGS
from ladder_jax.processes.supervise import supervise as supervise
from ladder_jax.processes.worker import Worker as Worker
from ladder_jax.processes.worker import attached as attached
