"""Optimizers: L-BFGS, conjugate gradients, gradient descent, OWL-QN."""

from sandblaster.optimizers.descent import ConjugateGradient, GradientDescent
from sandblaster.optimizers.lbfgs import LBFGS
from sandblaster.optimizers.owlqn import OWLQN


AnyMethod = LBFGS | ConjugateGradient | GradientDescent | OWLQN
"""In a job file: `method = { name = "lbfgs", history = 20 }`."""
