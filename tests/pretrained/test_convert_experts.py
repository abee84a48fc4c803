"""Models with experts converted by measurement: sensitivities and the refit, against the dense loop
in float64.
"""

import pytest

from tests import cases, experts
from tests.covering import full
from tests.pretrained.least_squares import check
from tests.pretrained.test_refit import BOTH, INPUTS
from tests.pretrained.test_sensitivity import check_losses


def parameters(kind, dense=0):
    return cases.parameters(experts.define("standard", kind, dense_layers=dense))


ROWS = [
    ("farskip", "shared", 1, dict(tensor=4), BOTH),
    full("farskip", "shared", 0, dict(tensor=4), BOTH),
    full("hybrid-farskip", "ungated", 0, dict(data=2), INPUTS),
    full("farskip-first", "shared", 0, dict(tensor=2), INPUTS),
    full("farskip", "shared", 2, dict(tensor=8), BOTH),
    full("ladder", "shared", 0, dict(), BOTH),
    full("ladder", "routed", 2, dict(tensor=2), BOTH),
    full("hybrid-ladder", "routed", 0, dict(tensor=2), INPUTS),
    full("hybrid-ladder", "routed", 1, dict(data=2), INPUTS),
]


@pytest.mark.parametrize("name, kind, dense, mesh, projections", ROWS)
def test_the_refit_is_the_least_squares_solution(name, kind, dense, mesh, projections):
    """Router, every expert and the shared one, in the experts' and in the layers' order; nothing
    else is touched.

    Of output projections attention's, and those of first layers without experts.
    """
    model = experts.model(name, kind, dense_layers=dense)
    shape = experts.shape(name, model)
    check(parameters(kind, dense), model, shape, projections=projections, **mesh)


SUBSETS = [
    ("farskip", "shared", 1, 2),
    full("farskip", "shared", 0, 2),
    full("farskip", "ungated", 2, 4),
    full("ladder", "routed", 0, 1),
    full("ladder-2", "routed", 1, 2),
]


@pytest.mark.parametrize("name, kind, dense, tensor", SUBSETS)
def test_losses_of_any_subset_are_the_references(name, kind, dense, tensor):
    definition = experts.define(name, kind, tensor=tensor, dense_layers=dense)
    shape = experts.shape(name, definition.config)
    check_losses(definition, parameters(kind, dense), shape, (), (0, 1), (2,), (0, 2))
