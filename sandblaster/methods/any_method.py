"""All methods, by the names that job files give them."""

from sandblaster.methods.conjugate_gradient import ConjugateGradient
from sandblaster.methods.gradient_descent import GradientDescent
from sandblaster.methods.lbfgs import LBFGS
from sandblaster.methods.multi_batch import MultiBatchLBFGS
from sandblaster.methods.owlqn import OWLQN


AnyMethod = LBFGS | ConjugateGradient | GradientDescent | OWLQN | MultiBatchLBFGS
"""In a job file: `method = { name = "lbfgs", n_history = 20 }`."""
