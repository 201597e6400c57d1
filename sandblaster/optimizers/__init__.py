"""Optimizers: L-BFGS, conjugate gradients, gradient descent, OWL-QN, multi-batch L-BFGS."""

from sandblaster.optimizers.descent import ConjugateGradient, GradientDescent
from sandblaster.optimizers.lbfgs import LBFGS
from sandblaster.optimizers.multi_batch_lbfgs import MultiBatchLBFGS
from sandblaster.optimizers.owlqn import OWLQN


AnyMethod = LBFGS | ConjugateGradient | GradientDescent | OWLQN | MultiBatchLBFGS
"""In a job file: `method = { name = "lbfgs", n_history = 20 }`."""
