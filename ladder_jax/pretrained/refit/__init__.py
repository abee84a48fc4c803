"""Fit the projections of converted sublayers again, in closed form, to the inputs that they now have.

A converted sublayer was trained to read n(x), the normalised stream, and now reads n(z), where z lacks the newest
outputs. Those are largely predictable from z. So for each sublayer, in the order of the forward pass and behind the
sublayers that are fitted already, one matrix M is fitted by ridge regression on a calibration text (sums over tokens):

    M = argmin |n(z) M - n(x)|^2 + l |M - 1|^2 = (G + l 1)^-1 (C + l 1),  G = n(z)^T n(z),  C = n(z)^T n(x)

n is the normalisation without its gain g, and l = ridge * trace(G) / D. M becomes part of the projections that read the
input (query, key, value; gate, up; of experts the router, every expert's gate and up, and the shared one's gate, up and
share): W <- M diag(g) W, and the gain becomes 1. So the model has the same parameters and the same program. Nothing is
trained, and biases and the other parameters stay.

Then, if that is requested, the output projection W: with h what it reads now, and y the output that the sublayer as it
was gives of the whole input, it becomes W + X,

    X = argmin |h (W + X) - y|^2 + l |X|^2,  l = ridge * trace(h^T h) / M

In reading order: least_squares.py, the statistics, M and X; programs.py and passes.py, the forward pass by sublayers;
projections.py, the arrays that are fitted; fit.py, the loop over sublayers; kept.py, the results of an interrupted run.
"""

from ladder_jax.pretrained.refit.fit import Fit as Fit
from ladder_jax.pretrained.refit.fit import FittedProjections as FittedProjections
from ladder_jax.pretrained.refit.fit import Refit as Refit
from ladder_jax.pretrained.refit.fit import Refitted as Refitted
from ladder_jax.pretrained.refit.fit import check_rows as check_rows
from ladder_jax.pretrained.refit.fit import count as count
from ladder_jax.pretrained.refit.fit import refit as refit
from ladder_jax.pretrained.refit.projections import SUBLAYERS as SUBLAYERS
