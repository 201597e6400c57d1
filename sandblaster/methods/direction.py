"""The L-BFGS search direction, from dot products alone.

Algorithm 7.4 (two-loop recursion) of Nocedal and Wright, Numerical Optimization, 2nd
edition, 2006, carried out on the coefficients of a linear combination (Chen, Wang &
Zhou, Large-scale L-BFGS using MapReduce, 2014): the direction is

    d = -H g = sum of a_i s_i + sum of b_i y_i + c g

and only its coefficients are computed here; the shards form it with one command.
`two_loop` is the recursion on the vectors themselves. Names here and in the book:

    step_difference      s_k = x_{k+1} - x_k
    gradient_difference  y_k = g_{k+1} - g_k
"""

from collections.abc import Sequence
from dataclasses import dataclass

from distbelief.commands import VectorName
from sandblaster.methods.gram import Combination, GramMatrix


@dataclass(frozen=True, slots=True)
class Correction:
    """One remembered pair of differences, with s.y > 0."""

    step_difference: VectorName
    gradient_difference: VectorName


def direction(
    gram: GramMatrix, history: Sequence[Correction], *, gradient: VectorName
) -> Combination:
    """Return -H g as a linear combination; the oldest correction comes first."""
    result = {gradient: -1.0}
    alphas: list[float] = []
    for pair in reversed(history):
        s, y = pair.step_difference, pair.gradient_difference
        alpha = gram.dot(result, s) / gram[s, y]
        result[y] = -alpha
        alphas.append(alpha)

    if history:
        s, y = history[-1].step_difference, history[-1].gradient_difference
        scale = gram[s, y] / gram[y, y]
        result = {name: scale * a for name, a in result.items()}

    for pair, alpha in zip(history, reversed(alphas), strict=True):
        s, y = pair.step_difference, pair.gradient_difference
        beta = gram.dot(result, y) / gram[s, y]
        result[s] = alpha - beta
    return result
