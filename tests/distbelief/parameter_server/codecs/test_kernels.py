"""Compiled kernels give the bits of numpy's; here they also run as plain Python."""

import sys
from collections.abc import Callable, Iterator
from itertools import count
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
from hypothesis import given, strategies as st

from distbelief.core.errors import LocalProtocolError
from distbelief.parameter_server.codecs import Codec, Residual, accumulate, kernels
from distbelief.parameter_server.codecs.dense import Bfloat16, Int4, Int8
from distbelief.parameter_server.codecs.exactness import PIECE, History
from distbelief.parameter_server.codecs.top_k import TopK
from tests.distbelief.parameter_server.codecs.residuals import (
    CODECS,
    LARGEST,
    Pushed,
    name_of,
    push,
    residual,
    tuned,
)


Kernel = Callable[..., object]
Find = Callable[[Kernel], object]  # as `kernels.compiled`

SEEDS = st.integers(0, 1 << 60)
KINDS = ["python", pytest.param("numba", marks=pytest.mark.slow)]
KERNELS: dict[str, Kernel] = {
    "accumulate": kernels.accumulate,
    "encode_halves": kernels.encode_halves,
    "add_halves": kernels.add_halves,
    "encode_blocks": kernels.encode_blocks,
    "add_blocks": kernels.add_blocks,
    "select": kernels.select,
    "add_some": kernels.add_some,
}


@pytest.fixture
def _cold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_COMPILED", {})


def none(_: Kernel) -> object:
    return None


@pytest.fixture(params=KINDS, scope="module")
def find(request: pytest.FixtureRequest) -> Iterator[Find]:
    if request.param == "python":
        yield lambda kernel: kernel
        return
    pytest.importorskip("numba")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_COMPILED", {})
        kernels.warm_up()
        found = {kernel: kernels.compiled(kernel) for kernel in KERNELS.values()}
    assert all(found.values())
    yield found.__getitem__


def by(find: Find, work: Callable[[], Pushed]) -> Pushed:
    with pytest.MonkeyPatch.context() as patch, np.errstate(over="ignore"):
        patch.setattr(kernels, "compiled", find)
        return work()


def assert_same(find: Find, codec: Codec, numbers: Residual, n_pushes: int) -> None:
    plain, other = (
        by(one, lambda: push(codec, numbers, History(n_pushes=n_pushes))) for one in (none, find)
    )
    assert other.encoded == plain.encoded
    assert other.words.tobytes() == plain.words.tobytes()
    assert other.rest.tobytes() == plain.rest.tobytes()
    assert other.sent.tobytes() == plain.sent.tobytes()


@pytest.mark.parametrize("codec", CODECS, ids=name_of)
@given(seed=SEEDS, n_elements=st.integers(0, 300), n_pushes=st.integers(0, 6))
def test_they_give_the_bits_of_numpy(
    find: Find, codec: Codec, seed: int, n_elements: int, n_pushes: int
) -> None:
    numbers = residual(seed, n_elements)
    assert_same(find, tuned(codec, numbers, seed), numbers, n_pushes)


@pytest.mark.soak
@pytest.mark.usefixtures("_cold")
@pytest.mark.parametrize("codec", CODECS, ids=name_of)
def test_they_give_the_bits_of_numpy_for_a_million_blocks(codec: Codec) -> None:
    """Of numba only; Python would take hours."""
    pytest.importorskip("numba")
    kernels.warm_up()
    n_blocks = 0
    for seed in count():
        numbers = residual(seed, 64 * (seed % 4000) + seed % 130)
        assert_same(kernels.compiled, tuned(codec, numbers, seed), numbers, seed % 7)
        n_blocks += seed % 4000
        if n_blocks > 1_000_000:
            break


@pytest.mark.parametrize("codec", CODECS, ids=name_of)
def test_they_do_so_over_several_pieces(find: Find, codec: Codec) -> None:
    numbers = residual(0, 2 * PIECE + 131)
    assert_same(find, tuned(codec, numbers, 0), numbers, 1)


@given(seed=SEEDS)
def test_they_send_equal_sizes_in_turn(find: Find, seed: int) -> None:
    bits = np.random.default_rng(seed).integers(0, 2, 1000)
    numbers = np.where(bits, -1.0, 1.0).astype(np.float32)
    for n_pushes in range(4):
        assert_same(find, TopK(share=0.05), numbers, n_pushes)


@pytest.mark.parametrize("codec", [Bfloat16(), Int8(), Int4()], ids=name_of)
def test_they_keep_the_largest_numbers_finite(find: Find, codec: Codec) -> None:
    numbers = np.full(192, LARGEST, np.float32)
    numbers[1::2] *= -1
    numbers[2::3] = 0.0
    numbers[3::5] = -0.0
    assert_same(find, codec, numbers, 0)


@pytest.mark.parametrize("codec", CODECS, ids=name_of)
@pytest.mark.parametrize("place", [0, 100, 191])
def test_they_find_a_number_that_is_not_finite(find: Find, codec: Codec, place: int) -> None:
    for bad in (np.nan, np.inf, -np.inf):
        numbers = np.ones(192, np.float32)
        cut = codec.choose([numbers], History())
        out = np.zeros(codec.n_words_max(192), np.uint32)
        numbers[place] = bad
        with pytest.MonkeyPatch.context() as patch, np.errstate(over="ignore", invalid="ignore"):
            patch.setattr(kernels, "compiled", find)
            with pytest.raises(LocalProtocolError, match="residual is not finite"):
                codec.encode(numbers, cut, out)


@pytest.mark.parametrize("codec", CODECS, ids=name_of)
def test_they_read_words_that_are_read_only_or_not_aligned(find: Find, codec: Codec) -> None:
    numbers = residual(7, 300)
    pushed = push(tuned(codec, numbers, 7), numbers)
    shifted = np.frombuffer(b"\0" + pushed.words.tobytes(), np.uint8)[1:].view(np.uint32)
    assert not shifted.flags.aligned
    assert not shifted.flags.writeable
    out = np.zeros(300, np.float32)
    with pytest.MonkeyPatch.context() as patch, np.errstate(over="ignore"):
        patch.setattr(kernels, "compiled", find)
        codec.decoder(shifted, 300)(0, 300, out)
    assert out.tobytes() == pushed.sent.tobytes()


# --- sums ---


@given(seed=SEEDS, other=SEEDS, n_elements=st.integers(0, 300))
def test_their_sums_have_the_bits_of_numpy(
    find: Find, seed: int, other: int, n_elements: int
) -> None:
    former, numbers = residual(seed, n_elements), residual(other, n_elements)
    found = []
    for one in (none, find):
        total = numbers.copy()
        with pytest.MonkeyPatch.context() as patch, np.errstate(over="ignore"):
            patch.setattr(kernels, "compiled", one)
            found.append((accumulate(former, total), total.tobytes()))
    assert found[0] == found[1]


@pytest.mark.parametrize("place", [0, 7, 63, 64, 130])
@pytest.mark.parametrize(
    ("kept", "pushed"),
    [
        (0.0, np.nan),
        (np.inf, 1.0),
        (np.inf, -np.inf),
        (0.0, -np.inf),
        (LARGEST, LARGEST),
        (-LARGEST, -LARGEST),
    ],
)
def test_they_find_a_sum_that_is_not_finite(
    find: Find, place: int, kept: float, pushed: float
) -> None:
    former, numbers = np.ones(131, np.float32), np.ones(131, np.float32)
    former[place], numbers[place] = kept, pushed
    before = former.tobytes()
    with pytest.MonkeyPatch.context() as patch, np.errstate(over="ignore", invalid="ignore"):
        patch.setattr(kernels, "compiled", find)
        assert not accumulate(former, numbers)
    assert former.tobytes() == before


# --- memory ---


def test_they_refuse_arrays_that_do_not_fit(find: Find) -> None:
    """They would read and write beyond the end of them."""
    numbers, words = np.zeros(64, np.float32), np.zeros(3, np.uint32)
    octets, halves = np.zeros(33, np.uint8), np.zeros(63, np.uint16)
    for name, arguments in (
        ("accumulate", (numbers[:-1], numbers)),
        ("encode_halves", (numbers, halves)),
        ("add_halves", (numbers, halves)),
        ("encode_blocks", (numbers, halves[:1], octets, np.float32(1), 7, np.uint32(0))),
        ("encode_blocks", (numbers, halves[:2], octets[:32], np.float32(1), 7, np.uint32(0))),
        ("add_blocks", (numbers, numbers[:1], octets, 7)),
        ("add_blocks", (numbers, numbers[:2], octets[:32], 7)),
        ("select", (words, np.uint32(1), 0, 64, np.zeros(2, np.intp))),
        ("add_some", (numbers, words, numbers[:2], 0)),
        ("add_some", (numbers, words + np.uint32(64), numbers[:3], 0)),
        ("add_some", (numbers, words, numbers[:3], 1)),
    ):
        kernel = find(KERNELS[name])
        assert callable(kernel)
        with pytest.raises(AssertionError):
            kernel(*arguments)


# --- where there is numba, and where there is none ---


def fake_numba(*, disabled: bool) -> SimpleNamespace:
    def njit(_: object, **options: object) -> Callable[[object], object]:
        if "cache" in options:
            raise RuntimeError("cannot cache function: no locator available")
        return lambda function: function

    config = SimpleNamespace(DISABLE_JIT=disabled)
    return SimpleNamespace(njit=njit, types=MagicMock(), config=config)


@pytest.mark.usefixtures("_cold")
def test_they_need_no_folder_for_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", fake_numba(disabled=False))
    assert kernels.compiled(kernels.select) is None
    kernels.warm_up()
    assert all(kernels.compiled(kernel) is kernel for kernel in KERNELS.values())


@pytest.mark.usefixtures("_cold")
def test_they_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    numba = fake_numba(disabled=False)
    monkeypatch.setitem(sys.modules, "numba", numba)
    kernels.warm_up()
    numba.njit = None
    kernels.warm_up()


@pytest.mark.usefixtures("_cold")
def test_numpy_does_the_work_without_numba_or_where_it_would_not_compile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for numba in (None, fake_numba(disabled=True)):
        monkeypatch.setitem(sys.modules, "numba", numba)
        kernels.warm_up()
        assert not any(map(kernels.compiled, KERNELS.values()))
