"""`python -m ladder_jax` is `ladder-jax`."""

import sys

from ladder_jax.cli import main

sys.exit(main())
