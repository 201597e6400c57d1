"""All methods, by the names that job files give them."""

from sandblaster.conjugate_gradient import ConjugateGradient
from sandblaster.gradient_descent import GradientDescent
from sandblaster.lbfgs import LBFGS
from sandblaster.multi_batch import MultiBatchLBFGS
from sandblaster.owlqn import OWLQN


AnyMethod = LBFGS | ConjugateGradient | GradientDescent | OWLQN | MultiBatchLBFGS
"""In a job file: `method = { name = "lbfgs", n_history = 20 }`."""
