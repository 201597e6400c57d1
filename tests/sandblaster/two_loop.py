"""The L-BFGS search direction by operations on the vectors themselves.

Algorithm 7.4 of Nocedal and Wright 2006 to the letter, as Dean et al. 2012 run it: one
dot product, one addition at a time, 4m + 2 requests instead of one. It is the reference
that `direction` is tested against, and shows what that saves.
"""

from collections.abc import Sequence

from distbelief.protocol.vector_commands import Axpy, Copy, Dot, Scale, VectorName
from sandblaster.optimizers.base import Steps, perform
from sandblaster.optimizers.lbfgs import Correction


def two_loop(
    history: Sequence[Correction], *, gradient: VectorName, target: VectorName
) -> Steps[None]:
    """Let target be -H g; the oldest correction comes first."""
    yield from perform(Copy(target=target, x=gradient), Scale(target=target, a=-1.0))
    if not history:
        return

    alphas: list[float] = []
    curvatures: list[float] = []
    for s, y in reversed(history):
        curvature, product = yield from perform(Dot(x=s, y=y), Dot(x=s, y=target))
        alpha = product / curvature
        yield from perform(Axpy(target=target, a=-alpha, x=y))
        alphas.append(alpha)
        curvatures.append(curvature)

    newest = history[-1][1]
    (square,) = yield from perform(Dot(x=newest, y=newest))
    yield from perform(Scale(target=target, a=curvatures[0] / square))

    steps = zip(history, reversed(alphas), reversed(curvatures), strict=True)
    for (s, y), alpha, curvature in steps:
        (product,) = yield from perform(Dot(x=y, y=target))
        yield from perform(Axpy(target=target, a=alpha - product / curvature, x=s))
