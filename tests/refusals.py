"""What the package says of a user's mistake."""

import contextlib

import pytest

from ladder_jax.errors import UserError


@contextlib.contextmanager
def refused(said):
    """The block must raise a UserError, of one line, in which the regular expression `said` is
    found.
    """
    with pytest.raises(UserError, match=said) as caught:
        yield caught
    assert "\n" not in str(caught.value)
