"""The direction from dot products alone, against the recursion, against the matrix."""

from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

from distbelief.protocol.vector_commands import Axpy, Dot, Gram, LinearCombination, Term, VectorName
from sandblaster.optimizers.base import GramMatrix, Reply, Steps, perform
from sandblaster.optimizers.lbfgs import Correction, direction
from tests.sandblaster.local import Local


Doubles = NDArray[np.float64]


def unused(x: Doubles) -> tuple[float, Doubles]:
    raise AssertionError(x)


def inverse_hessian(pairs: list[tuple[Doubles, Doubles]], n: int) -> Doubles:
    """H by equation 7.16 of Nocedal & Wright, as a matrix."""
    if not pairs:
        return np.eye(n)
    s, y = pairs[-1]
    h = np.eye(n) * (s @ y) / (y @ y)
    for s, y in pairs:
        v = np.eye(n) - np.outer(y, s) / (s @ y)
        h = v.T @ h @ v + np.outer(s, s) / (s @ y)
    return h


def made_pairs(
    n: int, m: int, *, condition: float, seed: int
) -> tuple[Doubles, list[tuple[Doubles, Doubles]]]:
    """A gradient, and pairs as a quadratic of that condition gives them."""
    rng = np.random.default_rng(seed)
    curvatures = np.geomspace(1.0, condition, n)
    steps = [rng.normal(size=n) / np.sqrt(curvatures) for _ in range(m)]
    return rng.normal(size=n), [(s, curvatures * s) for s in steps]


def laid_out(
    gradient: Doubles, pairs: list[tuple[Doubles, Doubles]], *, n_shards: int
) -> tuple[Local, list[Correction]]:
    local = Local(np.zeros(len(gradient)), unused, n_shards=n_shards)
    local.put("gradient", gradient)
    history = []
    for k, (s, y) in enumerate(pairs):
        local.put(f"s{k}", s)
        local.put(f"y{k}", y)
        history.append((f"s{k}", f"y{k}"))
    return local, history


def vector_free(local: Local, history: list[Correction]) -> Doubles:
    names = ("gradient", *(name for pair in history for name in pair))
    gram = GramMatrix()
    gram.put(names, names, local.perform((Gram(rows=names, columns=names),)))
    combination = direction(gram, history, gradient="gradient")
    terms = tuple(Term(a, name) for name, a in combination.items())
    local.perform((LinearCombination(target="direction", terms=terms),))
    return local.get("direction")


def two_loop(
    history: Sequence[Correction], *, gradient: VectorName, target: VectorName
) -> Steps[None]:
    """Let target be -H g, by operations on the vectors themselves; the oldest comes first.

    Algorithm 7.4 of Nocedal and Wright 2006 to the letter, as Dean et al. 2012 run it.
    """
    yield from perform(LinearCombination(target=target, terms=(Term(-1.0, gradient),)))
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
    scale = Term(curvatures[0] / square, target)
    yield from perform(LinearCombination(target=target, terms=(scale,)))

    steps = zip(history, reversed(alphas), reversed(curvatures), strict=True)
    for (s, y), alpha, curvature in steps:
        (product,) = yield from perform(Dot(x=y, y=target))
        yield from perform(Axpy(target=target, a=alpha - product / curvature, x=s))


def by_two_loops(local: Local, history: list[Correction]) -> Doubles:
    steps = two_loop(history, gradient="gradient", target="reference")
    reply: Reply | None = None
    with suppress(StopIteration):
        while True:
            request = next(steps) if reply is None else steps.send(reply)
            reply = local.answer(request)
    return local.get("reference")


@settings(max_examples=30)
@given(
    n=st.integers(1, 60),
    m=st.integers(0, 8),
    n_shards=st.integers(1, 4),
    seed=st.integers(0, 1 << 30),
)
def test_dot_products_alone_give_the_direction_of_the_recursion_and_of_the_matrix(
    n: int, m: int, n_shards: int, seed: int
) -> None:
    gradient, pairs = made_pairs(n, m, condition=100.0, seed=seed)
    local, history = laid_out(gradient, pairs, n_shards=n_shards)
    expected = -inverse_hessian(pairs, n) @ gradient
    scale = np.abs(expected).max()
    np.testing.assert_allclose(vector_free(local, history), expected, rtol=0, atol=1e-12 * scale)
    np.testing.assert_allclose(by_two_loops(local, history), expected, rtol=0, atol=1e-12 * scale)


@pytest.mark.parametrize("condition", [1e4, 1e8])
@pytest.mark.parametrize("n_shards", [1, 2, 5])
def test_the_direction_is_the_recursions_to_twelve_digits(condition: float, n_shards: int) -> None:
    gradient, pairs = made_pairs(500, 10, condition=condition, seed=1)
    local, history = laid_out(gradient, pairs, n_shards=n_shards)
    ours, reference = vector_free(local, history), by_two_loops(local, history)
    error = np.linalg.norm(ours - reference) / np.linalg.norm(reference)
    assert error <= 1e-12


def test_a_matrix_forgets_and_renames_whole_vectors() -> None:
    gram = GramMatrix((("a", "b", 1.0), ("b", "b", 2.0), ("b", "c", 3.0)))
    gram.rename("b", "c")
    assert gram.entries() == (("a", "c", 1.0), ("c", "c", 2.0))
    gram.restrict(("c",))
    assert gram["c", "c"] == 2.0
    assert gram.entries() == (("c", "c", 2.0),)
