"""The named vectors of one shard, and the vector commands on them.

Each vector has the shard's range of the parameters: (n_gradient,) elements of the layout's type,
without buffers. A batch of commands is all or nothing: it is checked before anything changes.

The same batch on the same vectors gives the same bits with the same build of torch and number of
threads. Another number of shards rounds sums differently.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import assert_never, cast, final

import numpy as np
import torch
from numpy.typing import NDArray

from distbelief.core.errors import RemoteProtocolError, StorageError
from distbelief.core.vectors import Vector
from distbelief.parameter_server.layout import Layout
from distbelief.protocol import vector_commands as vc
from distbelief.protocol.role import Cost
from distbelief.protocol.vector_commands import Command, Scalars, Term, VectorName


Doubles = NDArray[np.float64]
Reals = NDArray[np.float32] | NDArray[np.float64]

_PIECE = 1 << 14
"""Elements per step: 128 KiB of float64 per vector, so that a step stays in the cache."""

_FEW = 3
"""Up to so many terms are added one by one; more become a matrix-vector product."""

_PIECE_OF_FEW = 1 << 16
"""Elements per step with few vectors, where the cost of calls dominates."""


@final
class VectorStore:
    """Holds vectors by name and executes batches of commands on them.

    `Copy` moves nothing: names share an array until one of them is written. An array that another
    name or a savepoint has is never changed; a new value goes to one that nobody uses any more.

    Sums run in float64: dot products of float32 vectors would overflow at 1e19 and cost L-BFGS
    four digits of its direction. Results are computed in float64 and rounded once.
    """

    def __init__(
        self,
        layout: Layout,
        k: int,
        *,
        n_vectors_max: int = 64,
        constants: Mapping[VectorName, Vector] = MappingProxyType({}),  # always there
    ) -> None:
        self._n = layout.n_gradient(k)
        self._dtype = layout.dtype
        self._n_vectors_max = n_vectors_max
        self._spans = [
            slice(segment.offset, segment.offset + segment.n_elements)
            for segment in layout.segments(k)
            if segment.offset < self._n
        ]
        self._constants = constants
        self._vectors: dict[VectorName, Vector] = {**constants}
        self._arrays: list[Vector] = []  # all that were made here, in use or not
        self.held: Callable[[], Iterable[Vector]] = tuple  # arrays of savepoints
        # The parameters after earlier commands, from which tasks still take rows.
        self.versions: dict[int, Vector] = {}
        self._room = torch.empty(0, dtype=torch.float64)  # used again: it stays in the cache

    def names(self) -> tuple[VectorName, ...]:
        return tuple(sorted(self._vectors))

    def vector(self, name: VectorName) -> Reals:
        """Return the vector of this name for writing; zeros if it is new."""
        before = self._vectors.get(name)
        after = self.overwrite(name)
        if before is not after:
            after[:] = 0.0 if before is None else before
        return after

    def overwrite(self, name: VectorName) -> Reals:
        """Return the vector of this name, to be filled; its present values may be lost."""
        if name not in self._vectors:
            self._check_count(1 + len(self._vectors))
        others = (vector for other, vector in self._vectors.items() if other != name)
        used = {id(vector) for vector in (*others, *self.held(), *self.versions.values())}
        known = [self._vectors[name]] if name in self._vectors else []
        free = next((array for array in (*known, *self._arrays) if id(array) not in used), None)
        if free is None:
            free = np.zeros(self._n, self._dtype)
            self._arrays.append(free)
        self._vectors[name] = free
        return self._real(name)

    def export(self, names: Sequence[VectorName] | None = None) -> dict[str, Vector]:
        """Return the vectors of these names that exist, or all, sharing their memory."""
        return {
            name: vector
            for name, vector in sorted(self._vectors.items())
            if names is None or name in names
        }

    def restore(self, vectors: Mapping[str, Vector]) -> None:
        """Replace all vectors by copies of these; StorageError if one does not fit."""
        for name, vector in vectors.items():
            if vector.shape != (self._n,) or vector.dtype != self._dtype:
                raise StorageError(
                    f"vector {name!r} is {vector.shape} of {vector.dtype}, not ({self._n},) of "
                    f"{self._dtype}: resume with the model and number of shards of its run"
                )
        copies = {name: vector.copy() for name, vector in vectors.items()}
        self._vectors, self._arrays = {**copies, **self._constants}, [*copies.values()]

    def adopt(self, vectors: Mapping[str, Vector]) -> None:
        """Replace all vectors by these arrays of the other copy of the shard."""
        self._vectors = {**vectors, **self._constants}
        arrays = (*vectors.values(), *self.held(), *self.versions.values())
        self._arrays = list({id(array): array for array in arrays}.values())

    def checksum(self, names: Iterable[VectorName]) -> int:
        """Return a checksum of all bits of these vectors."""
        total = 0
        for vector in {id(self._vectors[name]): self._vectors[name] for name in names}.values():
            total = zlib.crc32(vector.view(np.uint8).data, total)
        return total

    def return_to(self, held: Mapping[str, Vector]) -> None:
        """Replace all vectors by these, which a savepoint holds."""
        self._vectors = {**held, **self._constants}

    def check(self, batch: Sequence[Command]) -> None:
        """Raise RemoteProtocolError if the batch cannot be executed now; change nothing."""
        held = set(self._vectors)
        for index, command in enumerate(batch):
            missing = [name for name in vc.reads(command) if name not in held]
            if missing:
                raise RemoteProtocolError(
                    f"command {index} of {len(batch)}, {type(command).__name__}, needs vector "
                    f"{missing[0]!r}, and this shard has {sorted(held)}"
                )
            held.update(vc.writes(command))
            self._check_count(len(held))
        n_scalars = vc.n_scalars(batch)
        if n_scalars > vc.SCALARS_MAX:
            raise RemoteProtocolError(
                f"the batch returns {n_scalars} numbers; the most is {vc.SCALARS_MAX}"
            )

    def perform(self, batch: Sequence[Command]) -> Scalars:
        """Execute the commands in order; return the numbers that they measure, flat."""
        self.check(batch)
        measured: list[float] = []
        with np.errstate(all="ignore"):  # NaN and infinity are valid results
            for command in batch:
                measured += self._perform(command)
        return tuple(measured)

    def cost(self, batch: Sequence[Command]) -> Cost:
        n_passes = sum(len(set(vc.reads(one))) + len(vc.writes(one)) for one in batch)
        n_sums = vc.n_scalars(batch) + sum(len(vc.reads(one)) for one in batch)
        return Cost(
            flops=2.0 * n_sums * self._n, n_bytes=float(n_passes * self._n * self._dtype.itemsize)
        )

    def _check_count(self, n_vectors: int) -> None:
        if n_vectors > self._n_vectors_max:
            raise RemoteProtocolError(
                f"{n_vectors} vectors; the most is {self._n_vectors_max}: keep a shorter history"
            )

    def _perform(self, command: Command) -> Sequence[float]:
        match command:
            case vc.Copy(target=target, x=x):
                self._vectors[target] = self._vectors[x]
            case vc.Fill(target=target, a=a):
                self._fill(self.overwrite(target), a)
            case vc.Axpy(target=target, a=a, x=x):
                self._combine(target, (Term(1.0, target), Term(a, x)))
            case vc.LinearCombination(target=target, terms=terms):
                self._combine(target, terms)
            case vc.Pointwise():
                self._pointwise(command)
            case vc.Dot(x=x, y=y):
                return [self._dot(x, y)]
            case vc.Gram(rows=rows, columns=columns, without=without):
                return self._gram(rows, columns, without)
            case vc.Norm(x=x, order="2"):
                # The coordinator adds the squares of all shards, then takes the root.
                return [self._dot(x, x)]
            case vc.Norm(x=x, order=order):
                return [self._norm(self._real(x), order)]
            case _:
                assert_never(command)
        return ()

    def _fill(self, target: Reals, a: float) -> None:
        # Padding stays zero, so that it counts in no norm.
        target.fill(0.0)
        for span in self._spans:
            target[span] = a

    def _combine(self, target: VectorName, terms: Sequence[Term]) -> None:
        xs = [self._real(term.x) for term in terms]
        out = self.overwrite(target)
        weights = [term.a for term in terms]
        if weights == [1.0, -1.0]:
            np.subtract(xs[0], xs[1], out=out)  # the same bits as in float64, rounded
        elif len(terms) > _FEW:
            factors = torch.tensor([weights], dtype=torch.float64)
            for piece in _pieces(self._n):
                matrix = self._stacked(xs, piece)
                out[piece] = torch.mm(factors, matrix)[0].numpy()
        else:
            for piece in _pieces(self._n, _PIECE_OF_FEW):
                matrix = self._stacked(xs, piece)
                for row, a in zip(matrix, weights, strict=True):
                    if a != 1.0:
                        row.mul_(a)  # not fused, so that every element rounds alike
                for row in matrix[1:]:
                    matrix[0].add_(row)
                out[piece] = matrix[0].numpy()

    def _pointwise(self, command: vc.Pointwise) -> None:
        function = _FUNCTIONS[command.function]
        x = self._real(command.x)
        y = self._real(command.y)
        out = self.overwrite(command.target)
        for piece in _pieces(self._n):
            pair = x[piece].astype(np.float64), y[piece].astype(np.float64)
            out[piece] = function(*pair, command.a)

    def _dot(self, x: VectorName, y: VectorName) -> float:
        vectors = [self._real(x)] if x == y else [self._real(x), self._real(y)]
        total = 0.0
        for piece in _pieces(self._n, _PIECE_OF_FEW):
            matrix = self._stacked(vectors, piece)
            total += torch.dot(matrix[0], matrix[-1]).item()
        return total

    def _gram(
        self, rows: Sequence[VectorName], columns: Sequence[VectorName], without: VectorName | None
    ) -> list[float]:
        names = list(dict.fromkeys((*rows, *columns)))
        vectors = [self._real(name) for name in names]
        if without is not None:
            vectors.append(self._real(without))
        n_rows = len(set(rows))  # the first of the names
        sums = torch.zeros(n_rows, len(names), dtype=torch.float64)
        for piece in _pieces(self._n):
            matrix = self._stacked(vectors, piece)
            left = matrix[:n_rows] if without is None else matrix[:n_rows] * (matrix[-1] == 0.0)
            sums.addmm_(left, matrix[: len(names)].T)
        totals = dict(zip(names, sums.tolist(), strict=False))
        column_indices = [names.index(column) for column in columns]
        return [totals[row][index] for row in rows for index in column_indices]

    def _norm(self, x: Reals, order: vc.Order) -> float:
        if order == "inf":
            if not self._n:
                return 0.0
            least, most = torch.aminmax(torch.from_numpy(x))
            return float(torch.maximum(-least, most)) + 0.0  # -0 becomes 0
        return float(sum(np.sum(np.abs(x[p]), dtype=np.float64) for p in _pieces(self._n)))

    def _stacked(self, vectors: Sequence[Reals], piece: "slice[int, int, None]") -> torch.Tensor:
        """Return a piece of each vector, (n_vectors, piece size), valid until the next call."""
        n, size = len(vectors), piece.stop - piece.start
        if n * size > self._room.numel():
            # Torch aligns the memory, so that its kernels round alike in every call.
            self._room = torch.empty(n * size, dtype=torch.float64)
        tensor = self._room[: n * size].view(n, size)
        rows: Doubles = tensor.numpy()
        for row, vector in zip(rows, vectors, strict=True):
            row[:] = vector[piece]
        return tensor

    def _real(self, name: VectorName) -> Reals:
        # The layout has real types only, and dtypes do not narrow an array's type.
        return cast("Reals", self._vectors[name])


def _pieces(n_elements: int, size: int = _PIECE) -> Iterator["slice[int, int, None]"]:
    for start in range(0, n_elements, size):
        yield slice(start, min(start + size, n_elements))


def _align(x: Doubles, y: Doubles) -> Doubles:
    # Signs, because the product x y may underflow.
    return np.where(np.sign(x) * np.sign(y) > 0.0, x, 0.0)


def _orthant(x: Doubles, y: Doubles) -> Doubles:
    # The orthant of x, or at 0 that of a step along -y (Andrew & Gao 2007).
    return np.where(x != 0.0, np.sign(x), -np.sign(y))


def _pseudo_gradient(w: Doubles, g: Doubles, a: float) -> Doubles:
    """Return the smallest element of the subdifferential of f + a |w|_1.

    Andrew & Gao 2007, equation 4: at w = 0 it is the one-sided derivative that is negative in
    its direction, or 0 if neither is.
    """
    shrunk = np.sign(g) * np.maximum(np.abs(g) - a, 0.0)
    return np.where(w != 0.0, g + a * np.sign(w), shrunk)


_FUNCTIONS: Mapping[vc.Function, Callable[[Doubles, Doubles, float], Doubles]] = {
    "align": lambda x, y, _a: _align(x, y),
    "oppose": lambda x, y, _a: _align(x, -y),
    "orthant": lambda x, y, _a: _orthant(x, y),
    "pseudo_gradient": _pseudo_gradient,
    "max": lambda x, y, _a: np.maximum(x, y),
    "min": lambda x, y, _a: np.minimum(x, y),
    "share": lambda x, y, _a: np.where(np.sign(x) * np.sign(y) > 0.0, x / y, 0.0),
    "only": lambda x, y, _a: np.where((x == 0.0) & (y != 0.0), 1.0, 0.0),
    "unless": lambda x, y, _a: np.where(y == 0.0, x, 0.0),
}
