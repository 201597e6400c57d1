"""A user's data set in pieces: an object with `pieces()` and `read(piece, rows)`.

    pieces()            all pieces, the same in each process: name -> number of rows
    read(piece, rows)   samples of one piece, as `__getitems__` returns them
    here()              optional: those that lie on this host; without it each process reads all
    fetch(piece)        optional: brings another one here

As a data set its samples have numbers: those of the first piece by name, then of the second.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Final, Protocol, cast, final, runtime_checkable

import msgspec
import numpy as np
import torch

from distbelief.core.errors import JobError
from distbelief.core.pieces import PieceOrder, Pieces
from distbelief.protocol.membership import N_SPANS_MAX
from distbelief.task.data import Indices, shuffled
from distbelief.task.dry_run import shown
from distbelief.task.imports import place


N_PIECES_MAX: Final = 20_000
# That lie on some hosts only: if half of them wait for a slow one, in two epochs, shards can still
# tell which positions they have applied in one message.
N_PLACED_MAX: Final = N_SPANS_MAX
_NAME_MAX: Final = 200  # characters


@runtime_checkable
class InPieces(Protocol):
    """What a user gives; `here` and `fetch` are optional."""

    def pieces(self) -> Mapping[str, int]: ...

    def read(self, piece: str, rows: Sequence[int], /) -> object: ...


@final
class PieceData:
    """Implements `core.pieces.Placed` and a map-style data set with `__getitems__`.

    Raises:
        JobError: pieces and rows are not as they must be, or the user's code fails.
    """

    def __init__(self, given: InPieces, *, user: str) -> None:
        self._given, self._user = given, user
        here: object = getattr(given, "here", None)
        fetch: object = getattr(given, "fetch", None)
        for name, method in (("pieces", given.pieces), ("here", here), ("fetch", fetch)):
            if method is not None and not callable(method):
                raise JobError(f"{user}: {name} is {shown(method)}: it must be a method")
        self._fetch = cast("Callable[[str], object] | None", fetch)
        rows = self._checked(self._call("pieces()", self._given.pieces))
        self.pieces = Pieces.of(rows, is_placed=callable(here), can_fetch=callable(fetch))
        self._starts = np.cumsum([0, *self.pieces.rows])
        self._near = {*self.pieces.names}
        if callable(here):
            found = self._call("here()", here)
            if isinstance(found, str) or not isinstance(found, Iterable):
                raise JobError(f"{user}: here() returned {shown(found)}: it must be names")
            known, names = self._near, found
            # A generator may fail only now.
            self._near = cast("set[str]", self._call("here()", lambda: set(names)))
            if unknown := sorted(map(repr, self._near - known)):
                raise JobError(f"{user}: here() has {unknown[0]}, which pieces() does not have")
        # Where those that are here begin and end.
        is_here = [False, *(name in self._near for name in self.pieces.names), False]
        self.here = tuple(k for k, (was, now) in enumerate(pairwise(is_here)) if was != now)
        self._orders: dict[int, PieceOrder] = {}

    def _checked(self, rows: object) -> dict[str, int]:
        user = self._user
        if not isinstance(rows, Mapping):
            raise JobError(
                f"{user}: pieces() returned {shown(rows)}: it must be a dictionary, name -> rows"
            )
        for name, n in rows.items():
            is_name = isinstance(name, str) and 0 < len(name) <= _NAME_MAX
            is_number = isinstance(n, int | np.integer) and not isinstance(n, bool) and n >= 0
            if not (is_name and is_number):
                raise JobError(
                    f"{user}: pieces() has {name!r}: {n!r}: it must be a name of 1 to {_NAME_MAX} "
                    "letters, and a number of rows from 0 on"
                )
        n_max = N_PLACED_MAX if callable(getattr(self._given, "here", None)) else N_PIECES_MAX
        found = {name: int(n) for name, n in rows.items()}
        if not 0 < len(found) <= n_max or not sum(found.values()):
            raise JobError(
                f"{user} has {len(found):,} pieces of {sum(found.values()):,} rows: it must have 1 "
                f"to {n_max:,} pieces, and some rows"
            )
        return found

    @property
    def fingerprint(self) -> str:
        own: object = getattr(self._given, "fingerprint", None)
        own = own() if callable(own) else own
        text = msgspec.json.encode((self.pieces.names, self.pieces.rows, str(own)))
        return hashlib.sha256(text).hexdigest()[:16]

    def order(self, epoch: int, positions: Indices, seed: int) -> Indices:
        """Return the samples at these positions of an epoch (`data.SampleOrder`)."""
        if seed not in self._orders:
            self._orders = {seed: PieceOrder(self.pieces, seed=seed)}
        order = self._orders[seed]
        pieces, stops = order.at(epoch)
        at = np.searchsorted(stops, positions, side="right")
        found = np.empty(len(positions), np.int64)
        # A single piece has the order of a data set without pieces.
        is_alone = np.count_nonzero(order.rows) == 1
        for mine in _groups(at):
            k = at[mine[0]]
            piece, n = int(pieces[k]), int(order.rows[pieces[k]])
            found[mine] = self._starts[piece] + shuffled(
                positions[mine] - (stops[k] - n),
                n_samples=n,
                seed=(seed, epoch, *([] if is_alone else [piece])),
            )
        return found

    def readable(self, n: int) -> Indices:
        """Return the first samples that this process can read, so many at most."""
        rows = np.array(self.pieces.rows)
        is_read = rows * [name in self._near for name in self.pieces.names]
        if not is_read.any():
            if self._fetch is None:
                raise JobError(
                    f"{self._user}: no piece with rows lies here, where some samples are tried "
                    "before the start: start the job where one is, or give the object fetch(piece)"
                )
            smallest = np.where(rows, rows, rows.max() + 1).argmin()
            is_read[smallest] = rows[smallest]
        stops = np.cumsum(is_read)
        chosen = np.arange(min(n, int(stops[-1])))
        of = np.searchsorted(stops, chosen, side="right")
        found: Indices = self._starts[of] + chosen - (stops - is_read)[of]
        return found

    # --- as a data set

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> object:
        read = self.__getitems__([index])
        if not isinstance(read, list):
            raise JobError(f"{self._user}: read() returned {shown(read)}, and no list of samples")
        return read[0]

    def __getitems__(self, indices: Sequence[int]) -> object:
        wanted = np.asarray(indices, np.int64)
        of = np.searchsorted(self._starts, wanted, side="right") - 1
        places = _groups(of)
        parts = [self._read(int(of[at[0]]), wanted[at] - self._starts[of[at[0]]]) for at in places]
        if len(parts) == 1:
            return parts[0]
        back = torch.from_numpy(np.argsort(np.concatenate(places)))
        if all(isinstance(part, list) for part in parts):
            every = [sample for part in cast("list[list[object]]", parts) for sample in part]
            return [every[k] for k in back.tolist()]
        return self._joined(parts, [len(at) for at in places], back)

    def _read(self, piece: int, rows: Indices) -> object:
        name = self.pieces.names[piece]
        if name not in self._near:
            if self._fetch is None:
                raise JobError(
                    f"{self._user}: piece {name!r} does not lie on this host, and the object has "
                    "no fetch(piece)"
                )
            fetch = self._fetch
            self._call(f"fetch({name!r})", lambda: fetch(name))
            self._near.add(name)
        what, some = f"read({name!r}, {len(rows):,} rows)", rows.tolist()
        read = self._call(what, lambda: self._given.read(name, some))
        if not isinstance(read, tuple | Mapping) and not (
            isinstance(read, list) and len(read) == len(some)
        ):
            raise JobError(
                f"{self._user}: {what} returned {shown(read)}: it must be a list of as many "
                "samples, a pair (inputs, targets) or a dictionary"
            )
        return read

    def _joined(self, parts: Sequence[object], rows: list[int], back: torch.Tensor) -> object:
        """Join finished batches of several pieces, in the order of their samples."""
        first = parts[0]
        if any(type(part) is not type(first) for part in parts):
            raise JobError(f"{self._user}: read() returned {shown(first)} of one piece only")
        if isinstance(first, Mapping):
            of = cast("Sequence[Mapping[str, object]]", parts)
            if any(part.keys() != first.keys() for part in of):
                raise JobError(f"{self._user}: read() returned other keys of some pieces")
            return {key: self._joined([part[key] for part in of], rows, back) for key in first}
        if isinstance(first, tuple):
            columns = zip(*cast("Sequence[tuple[object, ...]]", parts), strict=True)
            return tuple(self._joined(column, rows, back) for column in columns)
        tensors = [torch.as_tensor(part) for part in parts]
        # Only their sum is known to the job: samples would be those of other rows.
        if [*map(len, tensors)] != rows:
            raise JobError(
                f"{self._user}: read() returned {[*map(len, tensors)]} samples of pieces of which "
                f"it was to read {rows} rows"
            )
        return torch.cat(tensors)[back]

    def _call(self, what: str, code: Callable[[], object]) -> object:
        try:
            return code()
        except Exception as error:  # the user's code may raise anything
            raise JobError(
                f"{self._user}: {what} failed: {type(error).__name__}: {error}{place(error)}"
            ) from error


def _groups(numbers: Indices) -> list[Indices]:
    """Return where each of these numbers stands, for one after the other."""
    ranks = np.argsort(numbers, kind="stable")
    return np.split(ranks, np.flatnonzero(np.diff(numbers[ranks])) + 1)
