"""Turns what a user gives as data into a data set of a job: `source_of`.

    what is given            samples                          their order
    -----------------------  -------------------------------  ---------------------------------
    a map-style data set     `dataset[index]`                 shuffled, by the job's seed
    torch's `DataLoader`     those of its data set, joined    that of its sampler: shuffled, as
                             by its `collate_fn`              they stand, or drawn
    anything with `__iter__` the items of its passes          as they come (`Stream`)
    one with `pieces`, `read`  rows of its pieces             shuffled, piece by piece (`PieceData`)

All of these can be dealt: any replica reads any positions, though of a stream only by reading what
lies before them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Final, NamedTuple, cast, final

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from distbelief.core.errors import JobError
from distbelief.graph.ops.call import ALONE
from distbelief.task.data import (
    ENDLESS,
    Collate,
    Dataset,
    DataSource,
    Indices,
    SampleOrder,
    reseed,
    shuffled,
)
from distbelief.task.dry_run import shown
from distbelief.task.imports import place
from distbelief.task.pieces import InPieces, PieceData


_END: Final = object()
_N_SHOWN: Final = 5  # names of columns in a message


# --- streams ---


@final
class Stream:
    """An iterable as `data.Sequential`: sample p is item p of its passes, one after the other.

    It reads on from where it is. For a sample that lies before, it begins again: the pass, if
    passes have a length, else the first pass. `set_epoch(pass)` is called where there is one.
    """

    def __init__(
        self,
        items: Iterable[object],
        *,
        n_samples: int | None,  # of each pass, if that is known
        is_cut: bool,  # a pass ends there, whatever is left
        again: Callable[[], object] | None,  # returns the iterable anew
        user: str,  # for messages: "[data.train] package.module:function"
    ) -> None:
        self.given = items
        self._n_samples = n_samples
        self._is_cut = is_cut
        self._again = again
        self._user = user
        self._iterator: Iterator[object] | None = None
        self._pass = 0
        self._n_read = 0  # of this pass
        self._next = 0  # number of the sample that comes next

    def read_in_order(
        self, indices: Sequence[int], before: Callable[[int], object] | None
    ) -> list[object]:
        return [self._sample(int(index), before) for index in indices]

    def _sample(self, index: int, before: Callable[[int], object] | None) -> object:
        n_samples = self._n_samples
        number = 0 if n_samples is None else index // n_samples
        is_other = n_samples is not None and number != self._pass
        if self._iterator is None or index < self._next or is_other:
            self._next = number * (n_samples or 0)
            self._begin(number, before)
        while True:
            item = self._advance(before)
            if self._next > index:
                return item

    def _begin(self, number: int, before: Callable[[int], object] | None) -> None:
        if before is not None:
            before(self._next)  # set_epoch may draw the order
        if self._iterator is not None and isinstance(self.given, Iterator):
            anew = None if self._again is None else self._again()
            if anew is None or anew is self.given:
                raise JobError(
                    f"{self._user}: an iterator can be read once: give an object whose __iter__ "
                    "begins anew"
                )
            self.given = cast("Iterable[object]", anew)
        set_epoch: object = getattr(self.given, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(number)
        self._iterator = iter(self.given)
        self._pass, self._n_read = number, 0

    def _advance(self, before: Callable[[int], object] | None) -> object:
        assert self._iterator is not None
        if before is not None:
            before(self._next)
        item, n_samples = next(self._iterator, _END), self._n_samples
        if item is _END:
            if not self._n_read:
                raise JobError(f"{self._user}: a pass of the stream has no items")
            if n_samples is not None:
                way = f"limit = {self._n_read}" if self._is_cut else "let its __len__ say so"
                raise JobError(
                    f"{self._user}: the stream ended after {self._n_read:,} of {n_samples:,} "
                    f"samples: {way}"
                )
            self._begin(self._pass + 1, before)
            return self._advance(before)
        self._next += 1
        self._n_read += 1
        is_last = self._n_read == n_samples and not self._is_cut
        if is_last and next(self._iterator, _END) is not _END:
            raise JobError(
                f"{self._user}: the stream has more than the {n_samples:,} samples that its "
                f"__len__ says: correct it, or use limit = {n_samples}"
            )
        return item

    def __getattr__(self, name: str) -> object:
        return getattr(self.given, name)


# --- orders ---


def as_it_stands(epoch: int, positions: Indices, seed: int) -> Indices:
    del epoch, seed
    return positions


@final
class DrawnOrder:
    """The order of a sampler, drawn for each epoch from the job's seed, the same in any process."""

    def __init__(self, sampler: Iterable[object], n_data: int, *, user: str) -> None:
        self._sampler = sampler
        self._n_data = n_data
        self._user = user
        self._kept: dict[tuple[int, int], Indices] = {}

    def __call__(self, epoch: int, positions: Indices, seed: int) -> Indices:
        key = epoch, seed
        if key not in self._kept:
            # Readers are ahead of steps by a few batches, which may be of the next epoch.
            self._kept = dict([*self._kept.items()][-1:]) | {key: self.draw(epoch, seed)}
        return self._kept[key][positions]

    def draw(self, epoch: int, seed: int) -> Indices:
        sampler = self._sampler
        generator: object = getattr(sampler, "generator", None)
        set_epoch: object = getattr(sampler, "set_epoch", None)
        own = int(np.random.SeedSequence((seed, epoch)).generate_state(1, np.uint64)[0])
        with ALONE:
            reseed(own)
            if isinstance(generator, torch.Generator):
                generator.manual_seed(own)
            if callable(set_epoch):
                set_epoch(epoch)
            try:
                found = np.array([int(cast("int", index)) for index in sampler], np.int64)
            except Exception as error:  # the sampler is the user's
                raise JobError(
                    f"{self._user}: its sampler failed: {type(error).__name__}: {error}"
                ) from error
        n_samples = _length(sampler)
        if len(found) != n_samples or not ((found >= 0) & (found < self._n_data)).all():
            raise JobError(
                f"{self._user}: its sampler gave {len(found):,} numbers: they must be "
                f"{n_samples:,}, as its __len__ says, each from 0 to {self._n_data - 1:,}"
            )
        return found

    def check(self, seed: int) -> None:
        """Raise JobError if other processes would draw another order."""
        # Some begin in order, and shuffle from their second epoch on.
        if not all(np.array_equal(self.draw(k, seed), self.draw(k, seed)) for k in range(2)):
            raise JobError(
                f"{self._user}: its sampler gives another order each time: let it draw from "
                "torch's generator, or from the number that set_epoch gives it"
            )


# --- what users give ---


def source_of(
    given: object,
    *,
    name: str,
    table: str = "data.train",
    limit: int | None = None,
    collate: Collate | None = None,
    again: Callable[[], object] | None = None,
) -> Dataset:
    """Return what a user gives as a data set.

    Args:
        given: A map-style data set, torch's `DataLoader`, or an iterable of samples.
        name: What messages call it: the function that returned it.
        table: That of the job file, for messages too.
        limit: Use the first so many samples only.
        collate: Joins samples to a batch: f(samples) -> (inputs, targets) or a dictionary.
        again: Returns what is given once more, for iterators, which can be read once.

    Raises:
        JobError: it is something else, or asks for what a job cannot do.
    """
    user = f"[{table}] {name}"
    table_of = _Table(user=user, limit=limit, collate=collate, again=again)
    if isinstance(given, DataLoader):
        return _of_loader(given, table_of)
    if isinstance(given, InPieces) and not isinstance(given, type):
        if limit is not None:
            raise JobError(
                f"{user} returned data in pieces: leave limit out, or return fewer pieces"
            )
        pieces = PieceData(given, user=user)
        return DataSource(
            pieces,
            len(pieces),
            collate=collate,
            order=pieces.order,
            of_order="in pieces",
            in_pieces=pieces,
        )
    if _is_stream(given):
        return _of_stream(cast("Iterable[object]", given), table_of)
    dataset, n_samples = _map_style(given, user)
    if limit is None and collate is None:
        return dataset
    return DataSource(dataset, min(limit or n_samples, n_samples), collate=collate)


class _Table(NamedTuple):
    """What a data table says beside what its function returns."""

    user: str
    limit: int | None
    collate: Collate | None
    again: Callable[[], object] | None


def _is_stream(given: object) -> bool:
    # torch's own has a __getitem__ that raises.
    is_map_style = isinstance(given, Dataset) and not isinstance(given, IterableDataset)
    return isinstance(given, Iterable) and not (is_map_style or isinstance(given, type | str))


def _map_style(given: object, user: str) -> tuple[Dataset, int]:
    columns = _columns(given)
    if columns:
        raise JobError(
            f"{user} returned {columns}, which is no data set of samples: return "
            "torch.utils.data.TensorDataset(x, y) of tensors"
        )
    if isinstance(given, type) or not isinstance(given, Dataset):
        raise JobError(
            f"{user} returned {shown(given)}, not a data set: it must have __len__ and "
            "__getitem__(index) -> (input, target) or a dictionary, or __iter__"
        )
    try:
        n_samples = len(given)
    except Exception as error:  # the data set is the user's
        raise JobError(
            f"{user}: len() of its data set failed: {type(error).__name__}: {error}{place(error)}"
        ) from error
    if n_samples == 0:
        table = user[1 : user.index("]")]
        raise JobError(f"{user} returned a data set of 0 samples: check [{table}.arguments]")
    return given, n_samples


def _columns(given: object) -> str | None:
    """Return what columns of samples are called, if these are some."""
    kind = type(given).__name__
    if kind in {"DataFrame", "Series", "Table"}:
        return f"a {kind}"
    if isinstance(given, Mapping):
        first = [str(name) for name in islice(given, _N_SHOWN)]
        return f"a {kind} of {', '.join(first + ['...'] * (len(given) > _N_SHOWN))}"
    is_array = [hasattr(part, "shape") for part in given] if isinstance(given, tuple) else []
    return f"a tuple of {len(is_array)} arrays" if is_array and all(is_array) else None


def _of_stream(
    items: Iterable[object], table: _Table, *, loader: "DataLoader[object] | None" = None
) -> DataSource:
    user, limit, collate, again = table
    length = _length(items)
    if length == 0:
        raise JobError(f"{user} returned a stream of 0 samples")
    is_cut = limit is not None and (length is None or limit < length)
    n_samples = limit if is_cut else length
    size = None if loader is None else loader.batch_size
    if loader is not None and loader.drop_last:
        if n_samples is None:
            raise JobError(
                f"{user}: its DataLoader has drop_last, and its stream no length, so that no batch "
                "is the last: leave drop_last out"
            )
        n_samples, is_cut = _whole_batches(n_samples, size, user), True
    return DataSource(
        Stream(items, n_samples=n_samples, is_cut=is_cut, again=again, user=user),
        ENDLESS if n_samples is None else n_samples,
        collate=collate,
        order=_passes(n_samples),
        of_order="stream",
        num_workers=0 if loader is None else loader.num_workers,
        batch_size=size,
    )


def _passes(n_samples: int | None) -> SampleOrder:
    def order(epoch: int, positions: Indices, seed: int) -> Indices:
        del seed
        return epoch * (n_samples or 0) + positions

    return order


def _of_loader(loader: "DataLoader[object]", table: _Table) -> DataSource:
    user, limit, collate, again = table
    batches, batch_size = loader.batch_sampler, loader.batch_size
    drop_last, sampler = loader.drop_last, loader.sampler
    if type(batches) is BatchSampler:
        batch_size, drop_last, sampler = batches.batch_size, batches.drop_last, batches.sampler
    is_own = loader.collate_fn is not default_collate
    unfit = {
        "has an __iter__ of its own": (
            type(loader).__iter__ is not DataLoader.__iter__
            and "a job reads its data set: return that, or torch's DataLoader of it"
        ),
        "chooses batches by a batch_sampler of its own": (
            batches is not None
            and type(batches) is not BatchSampler
            and "a job cuts batches of [algorithm] batch_size: give it a sampler"
        ),
        "has batch_size = None": (
            batches is None
            and not isinstance(loader.dataset, IterableDataset)
            and "let it have the batch_size of [algorithm], and its data set return samples"
        ),
        "has a worker_init_fn": (
            loader.worker_init_fn is not None
            and "processes of a job do not call it: put what it does into the data set"
        ),
        "has a DistributedSampler": (
            isinstance(sampler, DistributedSampler)
            and "a job deals samples to its replicas itself: leave the sampler out"
        ),
        "has a collate_fn, and the table has collate": (
            is_own and collate is not None and "leave one of them out"
        ),
    }
    for what, fix in unfit.items():
        if fix:
            raise JobError(f"{user} returned a DataLoader that {what}: {fix}")
    collate = cast("Collate", loader.collate_fn) if is_own else collate
    if isinstance(loader.dataset, IterableDataset):
        anew = None if again is None else lambda: cast("DataLoader[object]", again()).dataset
        items = cast("Iterable[object]", loader.dataset)
        if batch_size is None:
            raise JobError(
                f"{user} returned a DataLoader that has batch_size = None: return its data set, "
                "or give it the batch_size of [algorithm]; its items must be samples"
            )
        return _of_stream(items, _Table(user, limit, collate, anew), loader=loader)
    dataset, n_data = _map_style(loader.dataset, user)
    n_samples = min(limit or n_data, n_data)
    order, of_order = _order_of(sampler, n_data, user, limit=limit)
    if isinstance(order, DrawnOrder):
        n_samples = _length(sampler) or 0
    if drop_last:
        n_whole = _whole_batches(n_samples, batch_size, user)
        if order is None and n_whole < n_samples:
            order = _shuffle_of(n_samples)
        n_samples = n_whole
    return DataSource(
        dataset,
        n_samples,
        collate=collate,
        order=order,
        of_order=of_order,
        num_workers=loader.num_workers,
        batch_size=batch_size,
    )


def _order_of(
    sampler: object, n_data: int, user: str, *, limit: int | None
) -> tuple[SampleOrder | None, str]:
    is_whole = _length(sampler) == n_data
    # Their subclasses may choose another order.
    if is_whole and type(sampler) is SequentialSampler:
        return as_it_stands, "in the order of the data"
    if is_whole and type(sampler) is RandomSampler and not sampler.replacement:
        return None, "shuffled"
    kind = type(sampler).__name__
    if not _length(sampler):
        raise JobError(f"{user}: its {kind} has no length: give it __len__")
    if limit is not None:
        raise JobError(f"{user}: its {kind} chooses samples, and so does limit: leave limit out")
    return DrawnOrder(cast("Iterable[object]", sampler), n_data, user=user), f"by {kind}"


def _shuffle_of(n_samples: int) -> SampleOrder:
    def order(epoch: int, positions: Indices, seed: int) -> Indices:
        return shuffled(positions, n_samples=n_samples, seed=(seed, epoch))

    return order


def _whole_batches(n_samples: int, batch_size: int | None, user: str) -> int:
    n_whole = n_samples - n_samples % (batch_size or 1)
    if not n_whole:
        raise JobError(
            f"{user} returned a DataLoader with drop_last whose {n_samples} samples are no batch "
            f"of {batch_size}: use a smaller batch_size, or leave drop_last out"
        )
    return n_whole


def _length(given: object) -> int | None:
    try:
        return len(given)  # type: ignore[arg-type]  # what has none raises
    except (TypeError, NotImplementedError):
        return None
