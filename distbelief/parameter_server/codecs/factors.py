"""Gradients of dense layers as two factors (Chilimbi et al. 2014, Zhang et al. 2017): lossless.

    A       (K, N)      what the layer got, one row for each sample
    E       (K, M)      the gradient of what it gave
    E^T A   (M, N)      the gradient of its weight: M N numbers by K (M + N)

    | n_layers | of each: first, n, offset, K, rows, N | E and A of each | all other elements |

A shard that holds elements [first, first + n) of a weight gets A, and the columns of E for the
blocks of rows that these elements are in; `offset` elements of the first block come before them. A
block is 128 rows of the whole tensor, the last one up to 255. In which order a library sums depends
on shapes, on addresses and on the number of threads. So blocks are rebuilt by the same call
everywhere: of copies at addresses of one alignment, in one thread. Where that has not the bits of
the gradient, the client sends numbers (`client.factored`).
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, final

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from distbelief.core.arguments import require
from distbelief.parameter_server.codecs import exactness
from distbelief.parameter_server.codecs.exactness import (
    Adder,
    Cut,
    Encoded,
    Form,
    History,
    Residual,
    Words,
)


Matrix = NDArray[np.float32]

ROWS: Final = 128  # of a block
_N_FIELDS: Final = 6  # words of a layer before its factors
_SMALL: Final = 1 << 20  # elements that may be rebuilt for any few


def blocks(n_rows: int) -> list[tuple[int, int]]:
    """Return the rows of each block: of a tensor, or of what a shard gets of one."""
    n_blocks = max(n_rows // ROWS, 1)
    return list(pairwise([*range(0, n_blocks * ROWS, ROWS), n_rows]))


def pays(k: int, rows: int, width: int, n: int) -> bool:
    """Return whether factors of so many rows are less than the `n` elements that are wanted.

    Nor may far more than these be rebuilt: words of any sender cost no more.
    """
    return _N_FIELDS + k * (rows + width) < n and rows * width <= max(2 * n, _SMALL)


@contextmanager
def _one_thread() -> Iterator[None]:
    n_threads = torch.get_num_threads()
    if n_threads == 1:  # as in shards
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(n_threads)


def copy_of(matrix: Matrix) -> torch.Tensor:
    """Return a copy at an address of the alignment that `rebuilt` needs."""
    copy = torch.empty(matrix.shape, dtype=torch.float32)  # whatever the user's default is
    np.copyto(copy.numpy(), matrix)
    return copy


def rebuilt(errors: Matrix, inputs: torch.Tensor) -> Residual:
    """Return the elements of one block, (rows * N,): of its columns of E, and of `copy_of` A."""
    own = copy_of(errors)
    with _one_thread():
        elements: Residual = own.t().mm(inputs).view(-1).numpy()
    return elements


# --- words ---


@final
@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """What a shard gets of one weight."""

    first: int  # of its elements in the shard's vector
    n: int
    offset: int  # elements of the first block before them
    errors: Matrix  # (K, rows)
    inputs: Matrix  # (K, N)


def write(numbers: Residual, layers: Sequence[Layer], out: Words) -> int:
    """Write a vector, of which these layers go as factors; return the number of words.

    The layers are in the order of their elements, and each pays.
    """
    out[0], at = len(layers), 1
    for one in layers:
        (k, rows), (_, width) = one.errors.shape, one.inputs.shape
        out[at : at + _N_FIELDS] = one.first, one.n, one.offset, k, rows, width
        at += _N_FIELDS
    bits = numbers.view(np.uint32)
    factors = [part.view(np.uint32) for one in layers for part in (one.errors, one.inputs)]
    ends = [0, *(end for one in layers for end in (one.first, one.first + one.n)), len(bits)]
    others = [bits[start:stop] for start, stop in zip(ends[::2], ends[1::2], strict=True)]
    for part in (*factors, *others):
        out[at : at + part.size].reshape(part.shape)[...] = part
        at += part.size
    return at


def _read(words: Words, n_elements: int) -> tuple[list[Layer], Residual]:
    """Return layers, and all other elements; RemoteProtocolError if the words are invalid."""
    valid = exactness.require_valid
    n_layers = int(words[0]) if len(words) else 0
    at, end = 1 + _N_FIELDS * n_layers, 0
    valid(len(words) >= at, f"{len(words)} of {n_layers} layers")
    layers: list[Layer] = []
    for first, n, offset, k, rows, width in words[1:at].reshape(-1, _N_FIELDS).tolist():
        valid(end <= first and first + n <= n_elements, "layers overlap, or end too late")
        is_valid = k and offset + n <= rows * width and pays(k, rows, width, n)
        valid(is_valid, f"factors of {k} x {rows} and {k} x {width} for {n} elements")
        end, middle, stop = first + n, at + k * rows, at + k * (rows + width)
        valid(stop <= len(words), "some factors are missing")
        errors = words[at:middle].view(np.float32).reshape(k, rows)
        inputs = words[middle:stop].view(np.float32).reshape(k, width)
        layers.append(Layer(first, n, offset, errors, inputs))
        at = stop
    others = words[at:]
    n_others = n_elements - sum(one.n for one in layers)
    valid(len(others) == n_others, f"{len(others)} of {n_others} other elements")
    exactness.require_finite(words[1 + _N_FIELDS * n_layers :])
    return layers, others.view(np.float32)


def flops_of(words: Words, n_elements: int) -> float:
    """Return the operations that rebuilding takes; RemoteProtocolError if words are invalid."""
    layers, _ = _read(words, n_elements)
    return sum((2.0 * one.inputs.size * one.errors.shape[1] for one in layers), 0.0)


@final
class _Rebuilds:
    """Adds elements of a push; keeps the block of the last ones, as elements are read in order."""

    def __init__(self, layers: Sequence[Layer], others: Residual) -> None:
        # Parts of the vector: start, stop, and the layer, or the place of its other elements.
        self._parts: list[tuple[int, int, int | Layer]] = []
        end = n_others = 0
        for one in layers:
            self._parts += [(end, one.first, n_others), (one.first, one.first + one.n, one)]
            n_others += one.first - end
            end = one.first + one.n
        self._parts.append((end, end + len(others) - n_others, n_others))
        self._starts = [start for start, *_ in self._parts]
        self._others = others
        self._inputs: tuple[Layer, torch.Tensor] | None = None
        self._block: tuple[Layer, int, Residual] | None = None

    @np.errstate(over="ignore", invalid="ignore")
    def __call__(self, start: int, stop: int, out: Residual) -> None:
        for first, last, what in self._parts[bisect_right(self._starts, start) - 1 :]:
            if first >= stop:
                break
            begin, end = max(first, start), min(last, stop)
            target = out[begin - start : max(end, begin) - start]
            if isinstance(what, Layer):
                self._add_rebuilt(what, begin - first + what.offset, target)
            else:
                target += self._others[what + begin - first :][: len(target)]

    def _add_rebuilt(self, layer: Layer, at: int, out: Residual) -> None:
        (_, rows), (_, width) = layer.errors.shape, layer.inputs.shape
        for top, bottom in blocks(rows):
            start, stop = max(top * width, at), min(bottom * width, at + len(out))
            if start < stop:
                elements = self._rebuilt(layer, top, bottom)
                out[start - at : stop - at] += elements[start - top * width : stop - top * width]

    def _rebuilt(self, layer: Layer, top: int, bottom: int) -> Residual:
        if self._block is not None and self._block[:2] == (layer, top):
            return self._block[2]
        if self._inputs is None or self._inputs[0] is not layer:
            self._inputs = layer, copy_of(layer.inputs)
        elements = rebuilt(layer.errors[:, top:bottom], self._inputs[1])
        self._block = layer, top, elements
        return elements


# --- tables ---


class _Exact(exactness.CodecTable, frozen=True, kw_only=True):
    """Sends all numbers; without layers to rebuild (`write`) as they are."""

    @property
    @override
    def form(self) -> Form:
        return "factors"

    @override
    def choose(self, parts: Sequence[Residual], history: History) -> Cut:
        return Cut()

    @override
    def n_words_max(self, n_elements: int) -> int:
        return 1 + n_elements

    @override
    def encode(self, residual: Residual, cut: Cut, out: Words) -> Encoded:
        exactness.check_residual(residual)
        exactness.check_finite(np.isfinite(residual).all())
        n_words = write(residual, [], out)
        residual[:] = 0
        return Encoded(n_words=n_words, n_sent=len(residual))

    @override
    def decoder(self, words: Words, n_elements: int) -> Adder:
        return _Rebuilds(*_read(words, n_elements))

    def takes(self, k: int, m: int, n: int, *, workers: int, shards: int) -> bool:
        """Return whether a layer of m x n goes as factors, of k samples."""
        raise NotImplementedError


@final
class Factors(_Exact, frozen=True, kw_only=True, tag="factors"):
    """Dense layers as factors, wherever these are fewer numbers."""

    @override
    def takes(self, k: int, m: int, n: int, *, workers: int, shards: int) -> bool:
        return k * (m + n) < m * n  # AD-6


@final
class Auto(_Exact, frozen=True, kw_only=True, tag="auto"):
    """Those dense layers as factors for which that takes less time, or fewer bytes (PO-5).

    With more samples or more workers, only fewer layers go as factors.
    """

    gbits: float | None = None  # Gbit/s of each host; None: bytes alone decide
    gflops: float = 80.0  # GFLOP/s of one core, in a large matrix product

    def __post_init__(self) -> None:
        require(self, "codec 'auto'", "gbits gflops", lambda x: x > 0.0, "a number above 0")

    @override
    def takes(self, k: int, m: int, n: int, *, workers: int, shards: int) -> bool:
        dense, factors = 4.0 * m * n, 4.0 * k * (m + shards * n)  # bytes; each shard gets A
        if self.gbits is None:
            return factors < dense
        # Bytes through the busiest card, a push and a fetch; products at the shards, and those that
        # workers compare. Those grow as the bytes: a constant would weigh less with more workers.
        load = max(1.0, workers / shards)
        seconds = load / (self.gbits * 125e6)
        rebuilding = (load + workers / shards) * 2.0 * k * m * n / (self.gflops * 1e9)
        return seconds * (factors + dense) + rebuilding < seconds * 2.0 * dense
