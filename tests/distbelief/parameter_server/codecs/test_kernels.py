"""Compiled kernels give the bits of numpy's; here they also run as plain Python."""

import sys
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given, strategies as st

from distbelief.core.errors import LocalProtocolError
from distbelief.parameter_server.codecs import Codec, kernels
from distbelief.parameter_server.codecs.dense import Int4, Int8
from tests.distbelief.parameter_server.codecs.residuals import name_of, push, residual


BLOCKS = pytest.mark.parametrize("codec", [Int8(), Int4()], ids=name_of)
KINDS = ["python", pytest.param("numba", marks=pytest.mark.slow)]


@pytest.fixture(params=KINDS, scope="module")
def fast(request: pytest.FixtureRequest) -> object:
    if request.param == "python":
        return kernels.encode, kernels.add
    pytest.importorskip("numba")
    kernels.compiled.cache_clear()
    return kernels.compiled()


@pytest.fixture(autouse=True, scope="module")
def _as_before() -> Iterator[None]:
    yield
    kernels.compiled.cache_clear()


@BLOCKS
@given(seed=st.integers(0, 1 << 60), n_elements=st.integers(0, 200))
def test_they_give_the_bits_of_numpy(
    fast: object, codec: Codec, seed: int, n_elements: int
) -> None:
    numbers = residual(seed, n_elements)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "compiled", lambda: None)
        plain = push(codec, numbers)
        patch.setattr(kernels, "compiled", lambda: fast)
        with np.errstate(over="ignore"):
            other = push(codec, numbers)
    assert other.words.tobytes() == plain.words.tobytes()
    assert other.rest.tobytes() == plain.rest.tobytes()
    assert other.sent.tobytes() == plain.sent.tobytes()


def test_they_need_no_folder_for_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fake:
        @staticmethod
        def njit(**options: object) -> Callable[[object], object]:
            if "cache" in options:
                raise RuntimeError("cannot cache function: no locator available")
            return lambda function: function

    kernels.compiled.cache_clear()
    monkeypatch.setitem(sys.modules, "numba", Fake)
    assert kernels.compiled() == (kernels.encode, kernels.add)
    kernels.compiled.cache_clear()
    monkeypatch.setitem(sys.modules, "numba", None)
    assert kernels.compiled() is None


@BLOCKS
def test_they_find_a_number_that_is_not_finite(fast: object, codec: Codec) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "compiled", lambda: fast)
        for bad in (np.nan, np.inf):
            numbers = np.ones(128, np.float32)
            numbers[100] = bad
            with pytest.raises(LocalProtocolError, match="residual is not finite"):
                push(codec, numbers)
