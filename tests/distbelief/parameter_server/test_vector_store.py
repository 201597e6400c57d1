"""A shard's vectors against numpy on the whole vectors, on any number of shards."""

from collections.abc import Iterator
from typing import Literal, get_args

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

from distbelief.core.errors import RemoteProtocolError, StorageError
from distbelief.core.vectors import Vector
from distbelief.parameter_server.layout import Layout, TensorSpec
from distbelief.parameter_server.vector_store import VectorStore
from distbelief.protocol.vector_commands import (
    Axpy,
    Command,
    Copy,
    Dot,
    Fill,
    Function,
    Gram,
    LinearCombination,
    Norm,
    Pointwise,
    Scalars,
    Term,
    combine,
)


ElementType = Literal["float32", "float64"]
Doubles = NDArray[np.float64]


class Shards:
    """Some shards, and whole vectors laid out over them, element after element."""

    def __init__(self, size: int, *, n_shards: int = 1, dtype: ElementType = "float64") -> None:
        spec = [TensorSpec(name="w", shape=(size,)), TensorSpec(name="z", shape=(3,))]
        self.layout = Layout.of(spec, n_shards=n_shards, dtype=dtype)
        self.algebras = [VectorStore(self.layout, k) for k in range(n_shards)]

    def put(self, name: str, values: Doubles) -> None:
        for elements, part in self._parts(name):
            part[:] = values[elements]

    def get(self, name: str) -> Doubles:
        whole = np.zeros(sum(t.n_elements for t in self.layout.tensors))
        for elements, part in self._parts(name):
            whole[elements] = part
        return whole

    def perform(self, *batch: Command) -> Scalars:
        return combine(batch, [algebra.perform(batch) for algebra in self.algebras])

    def _parts(self, name: str) -> Iterator[tuple[slice, Vector]]:
        first = self.layout.tensors[0].n_elements
        for k, algebra in enumerate(self.algebras):
            vector = algebra.vector(name)
            for s in self.layout.segments(k):
                start = first * s.tensor_index + s.start
                yield (
                    slice(start, start + s.n_elements),
                    vector[s.offset : s.offset + s.n_elements],
                )


def made(size: int, *, seed: int) -> Doubles:
    values = np.random.default_rng(seed).normal(size=size + 3)
    values[np.abs(values) < 0.3] = 0.0
    return values


def plain(function: Function, x: Doubles, y: Doubles, a: float) -> Doubles:
    """Element by element, from the definitions."""
    pairs = zip(x.tolist(), y.tolist(), strict=True)
    return np.array([plain_element(function, p, q, a) for p, q in pairs])


def plain_element(function: Function, x: float, y: float, a: float) -> float:
    def sign(t: float) -> float:
        return float((t > 0) - (t < 0))

    shrunk = y - a if y > a else (y + a if y < -a else 0.0)
    return {
        "align": x if x * y > 0 else 0.0,
        "oppose": x if x * y < 0 else 0.0,
        "orthant": sign(x) if x else sign(-y),
        "pseudo_gradient": y + a * sign(x) if x else shrunk,
        "max": max(y, x),
        "min": min(y, x),
        "share": x / y if x * y > 0 else 0.0,
        "only": 1.0 if x == 0 and y != 0 else 0.0,
        "unless": x if y == 0 else 0.0,
    }[function]


@settings(max_examples=40)
@given(
    size=st.integers(1, 400),
    n_shards=st.integers(1, 5),
    dtype=st.sampled_from(get_args(ElementType)),
    a=st.sampled_from([0.0, 0.5, -1.25]),
)
def test_commands_do_what_numpy_does_on_any_number_of_shards(
    size: int, n_shards: int, dtype: ElementType, a: float
) -> None:
    shards = Shards(size, n_shards=n_shards, dtype=dtype)
    x, y = (made(size, seed=seed).astype(dtype).astype(float) for seed in (1, 2))
    shards.put("x", x)
    shards.put("y", y)
    shards.perform(
        Copy(target="copy", x="x"),
        Fill(target="fill", a=a),
        Copy(target="axpy", x="y"),
        Axpy(target="axpy", a=a, x="x"),
        LinearCombination(target="sum", terms=(Term(a, "x"), Term(2.0, "y"), Term(0.5, "fill"))),
        LinearCombination(target="y2", terms=(Term(1.0, "y"),)),
        LinearCombination(target="y2", terms=(Term(3.0, "y2"), Term(1.0, "y2"))),
        LinearCombination(target="many", terms=(*(Term(0.25, "x"),) * 4, Term(a, "y"))),
    )
    expected = {
        "copy": x,
        "fill": np.full(size + 3, a),
        "axpy": y + a * x,
        "sum": a * x + 2.0 * y + 0.5 * a,
        "y2": 4.0 * y,
        "many": x + a * y,
    }
    for name, values in expected.items():
        np.testing.assert_allclose(
            shards.get(name),
            values.astype(dtype).astype(float),
            rtol=1e-15,
            atol=1e-15,
            err_msg=name,
        )

    dot, norm_1, norm_2, norm_inf, *gram = shards.perform(
        Dot(x="x", y="y"),
        Norm(x="fill", order="1"),  # padding would show
        Norm(x="x", order="2"),
        Norm(x="x", order="inf"),
        Gram(rows=("x", "y"), columns=("y", "x", "x")),
    )
    np.testing.assert_allclose(dot, x @ y, atol=1e-13)
    np.testing.assert_allclose(norm_1, abs(a) * (size + 3))
    np.testing.assert_allclose(norm_2, np.linalg.norm(x))
    assert norm_inf == np.abs(x).max()
    np.testing.assert_allclose(gram, [x @ y, x @ x, x @ x, y @ y, y @ x, y @ x], atol=1e-13)


def test_a_gram_matrix_without_some_elements_is_that_of_the_others() -> None:
    shards = Shards(40_000, n_shards=2)
    x, y, without = made(40_000, seed=1), made(40_000, seed=2), made(40_000, seed=3)
    for name, values in (("x", x), ("y", y), ("w", without)):
        shards.put(name, values)
    found = shards.perform(Gram(rows=("x", "y"), columns=("y", "x"), without="w"))
    x, y = (np.where(without == 0.0, one, 0.0) for one in (x, y))
    np.testing.assert_allclose(found, [x @ y, x @ x, y @ y, y @ x], rtol=1e-12, atol=1e-9)


def test_constants_are_there_whatever_is_restored() -> None:
    layout = Shards(100, n_shards=1).layout
    lower = np.full(layout.n_gradient(0), -1.0)
    algebra = VectorStore(layout, 0, constants={"lower": lower})
    for restore in (algebra.restore, algebra.adopt, algebra.return_to):
        restore({"x": np.ones(layout.n_gradient(0))})
        assert algebra.names() == ("lower", "x")
        algebra.perform((Pointwise(target="x", function="min", x="x", y="lower"),))
        np.testing.assert_array_equal(algebra.vector("x"), -1.0)
        np.testing.assert_array_equal(algebra.vector("lower"), -1.0)


@pytest.mark.parametrize("function", get_args(Function))
@pytest.mark.parametrize("n_shards", [1, 3])
def test_pointwise_functions_are_what_they_are_defined_as(
    function: Function, n_shards: int
) -> None:
    shards = Shards(300, n_shards=n_shards)
    x, y = made(300, seed=3), made(300, seed=4)
    shards.put("x", x)
    shards.put("y", y)
    shards.perform(Pointwise(target="t", function=function, x="x", y="y", a=0.7))
    np.testing.assert_allclose(shards.get("t"), plain(function, x, y, 0.7), rtol=1e-15, atol=0.0)
    shards.perform(Pointwise(target="x", function=function, x="x", y="y", a=0.7))
    np.testing.assert_array_equal(shards.get("x"), shards.get("t"))
    for k, algebra in enumerate(shards.algebras):
        n = sum(segment.n_elements for segment in shards.layout.segments(k))
        assert np.count_nonzero(algebra.vector("t")) <= n  # padding stays zero


def test_signs_agree_even_where_the_product_vanishes() -> None:
    shards = Shards(1)
    shards.put("x", np.full(4, 1e-200))
    shards.perform(Pointwise(target="t", function="align", x="x", y="x"))
    np.testing.assert_array_equal(shards.get("t"), np.full(4, 1e-200))


def test_vectors_longer_than_a_piece_are_whole() -> None:
    size = 20_000
    shards = Shards(size, n_shards=2, dtype="float32")
    x = made(size, seed=5).astype(np.float32).astype(float)
    shards.put("x", x)
    square, largest, absolute = shards.perform(
        LinearCombination(target="twice", terms=(Term(2.0, "x"),)),
        Pointwise(target="same", function="align", x="x", y="x"),
        Dot(x="x", y="x"),
        Norm(x="x", order="inf"),
        Norm(x="x", order="1"),
    )
    np.testing.assert_array_equal(shards.get("twice"), 2.0 * x)
    np.testing.assert_array_equal(shards.get("same"), x)
    np.testing.assert_allclose([square, absolute], [x @ x, np.abs(x).sum()], rtol=1e-13)
    assert largest == np.abs(x).max()


def test_float32_vectors_are_summed_in_float64() -> None:
    shards = Shards(100_000, dtype="float32")
    shards.perform(Fill(target="x", a=1e30))
    (square,) = shards.perform(Dot(x="x", y="x"))
    np.testing.assert_allclose(square, 100_003 * float(np.float32(1e30)) ** 2)


def test_what_a_command_writes_is_rounded_once() -> None:
    shards = Shards(1, dtype="float32")
    shards.perform(
        Fill(target="x", a=1.0),
        Fill(target="tiny", a=2.0**-25),
        LinearCombination(
            target="sum", terms=(Term(1.0, "x"), Term(1.0, "tiny"), Term(1.5, "tiny"))
        ),
    )
    assert shards.get("sum")[0] == 1.0 + 2.0**-23  # one by one, neither would count


def test_nan_and_infinity_are_valid_results() -> None:
    shards = Shards(2)
    shards.put("x", np.array([np.nan, 1e308, 1.0, 1.0, 1.0]))
    shards.perform(Axpy(target="x", a=1e300, x="x"))
    dot, norm = shards.perform(Dot(x="x", y="x"), Norm(x="x", order="inf"))
    assert np.isnan(dot)
    assert np.isnan(norm)


def test_a_shard_without_parameters_measures_nothing() -> None:
    layout = Layout.of([TensorSpec(name="w", shape=(3,))], n_shards=2)
    empty = VectorStore(layout, 1)
    batch = (Fill(target="x", a=1.0), Dot(x="x", y="x"), Norm(x="x", order="inf"))
    assert empty.perform(batch) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            (Fill(target="x", a=2.0), Copy(target="t", x="y")),
            "command 1 of 2, Copy, needs vector 'y'",
        ),
        ((Fill(target="x", a=2.0), Axpy(target="y", a=2.0, x="x")), "needs vector 'y'"),
        (
            (Fill(target="x", a=2.0), Fill(target="y", a=0.0), Fill(target="z", a=0.0)),
            "the most is 2",
        ),
        ((Fill(target="x", a=2.0), Gram(rows=("x",) * 129, columns=("x",) * 128)), "16512 numbers"),
    ],
)
def test_a_batch_that_fails_changes_nothing(batch: tuple[Command, ...], message: str) -> None:
    layout = Layout.of([TensorSpec(name="w", shape=(5,))], n_shards=1, dtype="float64")
    algebra = VectorStore(layout, 0, n_vectors_max=2)
    algebra.perform((Fill(target="x", a=1.0),))
    with pytest.raises(RemoteProtocolError, match=message):
        algebra.perform(batch)
    assert algebra.names() == ("x",)
    assert algebra.perform((Norm(x="x", order="inf"),)) == (1.0,)


def test_vectors_made_from_within_count_as_well() -> None:
    layout = Layout.of([TensorSpec(name="w", shape=(5,))], n_shards=1)
    algebra = VectorStore(layout, 0, n_vectors_max=1)
    algebra.vector("x")
    algebra.vector("x")
    with pytest.raises(RemoteProtocolError, match="the most is 1"):
        algebra.vector("y")


def test_what_is_saved_is_restored_to_the_bit_and_nothing_else() -> None:
    layout = Layout.of([TensorSpec(name="w", shape=(5,))], n_shards=1, dtype="float64")
    first, second = VectorStore(layout, 0), VectorStore(layout, 0)
    first.vector("s0")[:] = np.random.default_rng(0).normal(size=64)
    first.vector("y0")[:] = np.nan
    second.vector("stale")
    saved = first.export()
    assert set(first.export(["y0", "absent"])) == {"y0"}
    second.restore(saved)
    assert second.names() == ("s0", "y0")
    first.perform((Fill(target="s0", a=0.0),))
    assert second.vector("s0").any()  # a copy
    assert np.isnan(second.vector("y0")).all()


@pytest.mark.parametrize("wrong", [np.zeros(63), np.zeros(64, np.float32)])
def test_a_saved_vector_that_does_not_fit_is_refused(wrong: NDArray[np.float64]) -> None:
    layout = Layout.of([TensorSpec(name="w", shape=(5,))], n_shards=1, dtype="float64")
    algebra = VectorStore(layout, 0)
    algebra.vector("x")
    with pytest.raises(StorageError, match="vector 's0' is"):
        algebra.restore({"s0": wrong})
    assert algebra.names() == ("x",)


def test_the_cost_counts_passes_over_memory() -> None:
    layout = Layout.of([TensorSpec(name="w", shape=(100,))], n_shards=1)
    algebra = VectorStore(layout, 0)
    assert algebra.cost((Copy(target="t", x="x"),)).n_bytes == 2 * 128 * 4
    gram = Gram(rows=("s", "y"), columns=("s", "y", "g"))
    assert algebra.cost((gram,)).n_bytes == 3 * 128 * 4
