"""Data sets, and which samples each replica reads in which order.

A data set has a length and returns for `dataset[index]`, as in torch, a pair (input, target), or a
dictionary. The input is a tensor, a tuple of positional arguments or a dictionary of keyword
arguments of the model's forward; the target is a tensor, tuple or dictionary. Of an item that is a
dictionary, forward gets the entries that it names, and the loss gets all of them.

With torch's `__getitems__`, a data set is asked for a whole batch at once. It may return a list of
samples, or the finished batch as a tuple (inputs, targets) or a dictionary, which avoids splitting
an array into samples and joining them again. Streams and loaders: `task.sources`.

    n = 10, R = 3     replica 0: 9 0 3    replica 1: 2 8 1    replica 2: 6 7 5 4
    batches of 2      pass 0: (5 7) (6 4)   pass 1: (7 4) (6 5)   ... of replica 2

Replica r of R reads positions [n r / R, n (r + 1) / R) of one seeded shuffle of the data set, in a
new order for each pass (subsets as in Dean et al. 2012, section 4.1). Seed, r and pass alone decide
it, so a restarted replica continues from one number: the samples consumed. Where data are dealt,
any replica reads any positions, in another shuffle for each epoch (`dealt_samples`).
"""

import ctypes
import dataclasses
import inspect
import math
import random  # noqa: TID251 -- it is given seeds, and draws nothing
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from typing import Final, NamedTuple, Protocol, cast, final, runtime_checkable

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator
from numpy.typing import NDArray
from torch import nn
from torch.utils.data import default_collate
from typing_extensions import override

from distbelief.core.errors import JobError
from distbelief.core.pieces import Pieces, Placed


# --- tensors in tuples, dictionaries and objects with fields ---

Path = tuple[str | int, ...]
"""Where a tensor stands: ("inputs", "mask"), ("logits",), ()."""


def tensors_of(value: object, path: Path = ()) -> dict[Path, torch.Tensor]:
    """Return the tensors in a value by their paths; everything else is left out."""
    leaves = _leaves(value, path, lists=True)
    return {path: leaf for path, leaf in leaves.items() if isinstance(leaf, torch.Tensor)}


def _leaves(value: object, path: Path, *, lists: bool = False) -> dict[Path, object]:
    parts: Iterable[tuple[str | int, object]]
    if isinstance(value, torch.Tensor | int):  # most are: the other questions take longer
        return {path: value}
    if isinstance(value, Mapping):
        parts = [(str(key), part) for key, part in value.items()]
    elif hasattr(value, "_fields"):  # a named tuple
        parts = [(name, getattr(value, name)) for name in value._fields]
    elif dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        parts = [(name, getattr(value, name)) for name in names]
    elif isinstance(value, (tuple, list) if lists else tuple):
        parts = list(enumerate(value))
    elif lists and hasattr(value, "__dict__") and not isinstance(value, torch.Tensor):
        parts = [(n, part) for n, part in vars(value).items() if isinstance(part, torch.Tensor)]
    else:
        return {path: value}
    return {
        p: leaf
        for key, part in parts
        for p, leaf in _leaves(part, (*path, key), lists=lists).items()
    }


@final
class Fields(dict[str | int, object]):
    """Entries by key, attribute or position, as an object with fields has them."""

    def __getattr__(self, name: str) -> object:
        if name in self:
            return self[name]
        raise AttributeError(f"there is no {name!r}, only {', '.join(map(str, self))}")

    @override
    def __getitem__(self, key: str | int, /) -> object:
        return list(self.values())[key] if isinstance(key, int) else super().__getitem__(key)


def rebuilt(tensors: Mapping[Path, torch.Tensor]) -> object:
    """Return the value that has these tensors: a tensor, tuples, and `Fields` for the rest."""
    if () in tensors:
        return tensors[()]
    parts: dict[str | int, dict[Path, torch.Tensor]] = {}
    for (key, *rest), tensor in tensors.items():
        parts.setdefault(key, {})[tuple(rest)] = tensor
    found = {key: rebuilt(part) for key, part in parts.items()}
    if parts and all(isinstance(key, int) for key in parts):
        return tuple(found.get(index) for index in range(max(map(int, parts)) + 1))
    return Fields(found)


def shown_path(path: Path) -> str:
    return ".".join(map(str, path))


# --- data sets ---


class Batch(NamedTuple):
    """The tensors of a batch, samples first."""

    inputs: object  # a tensor, a tuple of positional or a dictionary of keyword arguments
    targets: object  # a tensor, tuple or dictionary; of items that are dictionaries, the inputs

    @property
    def is_dictionary(self) -> bool:
        """Whether items are dictionaries, which forward and loss both read."""
        return self.inputs is self.targets

    def tensors(self) -> dict[Path, torch.Tensor]:
        """Return all tensors, by paths that begin with "batch", or "inputs" and "targets"."""
        if self.is_dictionary:
            return tensors_of(self.inputs, ("batch",))
        return tensors_of(self.inputs, ("inputs",)) | tensors_of(self.targets, ("targets",))

    @classmethod
    def of(cls, tensors: Mapping[Path, torch.Tensor]) -> "Batch":
        found = rebuilt(tensors)
        assert isinstance(found, Fields), found
        both = found.get("batch")
        return cls(found.get("inputs", both), found.get("targets", both))

    def arguments(self, module: nn.Module) -> tuple[tuple[object, ...], dict[str, object]]:
        """Return the arguments of a model's forward.

        Of an item that is a dictionary these are the entries that forward names; all of them if it
        names none and takes any.
        """
        match self.inputs:
            case dict() if self.is_dictionary:
                parameters = inspect.signature(module.forward).parameters
                named = {key: value for key, value in self.inputs.items() if key in parameters}
                takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
                return (), named if named or not takes_any else dict(self.inputs)
            case dict():
                return (), dict(self.inputs)
            case tuple():
                return self.inputs, {}
            case _:
                return (self.inputs,), {}

    def to(self, device: torch.device) -> "Batch":
        """Return the batch with its tensors on this device."""
        inputs = _moved(self.inputs, device)
        return Batch(inputs, inputs if self.is_dictionary else _moved(self.targets, device))

    def run(self, module: nn.Module) -> object:
        arguments, keywords = self.arguments(module)
        result: object = module(*arguments, **keywords)
        return result


def _moved(value: object, device: torch.device) -> object:
    match value:
        case torch.Tensor():
            return value.to(device, non_blocking=True)
        case dict():
            return {key: _moved(part, device) for key, part in value.items()}
        case tuple() if hasattr(value, "_make"):
            return value._make(_moved(part, device) for part in value)
        case tuple() | list():
            return type(value)(_moved(part, device) for part in value)
        case _ if callable(move := getattr(value, "to", None)):  # an object of some library
            found: object = move(device)
            return found
        case _:
            return value


def n_samples_of(value: object) -> int:
    return len(next(iter(tensors_of(value).values())))


@runtime_checkable
class Dataset(Protocol):
    """A map-style data set of pairs (input, target), or of dictionaries."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> object: ...


class _BatchedDataset(Protocol):
    def __getitems__(self, indices: list[int], /) -> object: ...


@runtime_checkable
class Sequential(Protocol):
    """A data set whose samples are read one after the other."""

    def read_in_order(
        self, indices: Sequence[int], before: Callable[[int], object] | None
    ) -> list[object]:
        """Return these samples, and call `before` with each index that it passes."""
        ...


Collate = Callable[[list[object]], object]
"""Joins samples to a batch: a pair (inputs, targets) or a dictionary."""

SampleOrder = Callable[[int, "Indices", int], "Indices"]
"""Returns the samples at these positions of this epoch, by the job's seed."""

ENDLESS: Final = 1 << 40  # the length of what has none


@final
class DataSource:
    """A data set, and what is known beside its samples; made by `sources.source_of`.

    Attributes:
        dataset: With `__getitem__`, or a `Sequential`.
        collate: Joins its samples; None: `read_batch` does.
        order: Of the samples in an epoch; None: shuffled.
        of_order: The order in words.
        num_workers: Processes that the loader asks for.
        batch_size: That of the loader; None: it is not known.
        in_pieces: The data set, if it is in pieces.
    """

    def __init__(
        self,
        dataset: "Dataset | Sequential",
        n_samples: int,
        *,
        collate: Collate | None = None,
        order: SampleOrder | None = None,
        of_order: str = "shuffled",
        num_workers: int = 0,
        batch_size: int | None = None,
        in_pieces: Placed | None = None,
    ) -> None:
        self.dataset, self.in_pieces = dataset, in_pieces
        self.collate = collate
        self.order = order
        self.of_order = of_order
        self.num_workers = num_workers
        self.batch_size = batch_size
        self._n_samples = n_samples

    @classmethod
    def of(cls, dataset: "Dataset") -> "DataSource":
        return dataset if isinstance(dataset, DataSource) else cls(dataset, len(dataset))

    @property
    def is_stream(self) -> bool:
        return isinstance(self.dataset, Sequential)

    @property
    def placed(self) -> Placed | None:
        """The data set, if each process can read some of its pieces only."""
        found = self.in_pieces
        return found if found is not None and found.pieces.is_placed else None

    def __len__(self) -> int:
        return self._n_samples

    def __getitem__(self, index: int) -> object:
        if isinstance(self.dataset, Sequential):
            return self.dataset.read_in_order([index], None)[0]
        return self.dataset[index]

    def __getattr__(self, name: str) -> object:
        return getattr(self.dataset, name)


def pieces_of(dataset: Dataset) -> Pieces | None:
    found = dataset.in_pieces if isinstance(dataset, DataSource) else None
    return None if found is None else found.pieces


class Wanted(NamedTuple):
    """Samples to read in one batch, and whence they draw random numbers."""

    seed: int
    epoch: int
    indices: bytes  # (n_samples,) of int64


class Readers(Protocol):
    """Processes that read the samples of a data set for this one."""

    @property
    def n_ahead(self) -> int:
        """How many batches they should know of beside the one that is read."""
        ...

    def read(self, wanted: Wanted, ahead: Sequence[Wanted]) -> Batch:
        """Return the samples, and let those of `ahead` be read meanwhile."""
        ...


def reseed(seed: int) -> None:
    """Seed the generators that users' code draws from."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 -- the generator of users' code, none of ours
    random.seed(seed)


def generator_states(*, with_torch: bool = True) -> object:
    """Return the states of these generators, or of those beside torch's."""
    found: list[object] = [random.getstate()]
    bits = get_bit_generator()
    if isinstance(bits, np.random.MT19937):  # as usual; `state` takes 80 µs
        found.append(ctypes.string_at(bits.ctypes.state_address, 4 * 625))
    else:
        found.append(str(bits.state))
    if with_torch:
        found.append(torch.default_generator.get_state().numpy().tobytes())
        if torch.cuda.is_initialized():
            found.append(torch.cuda.get_rng_state().numpy().tobytes())
    return found


def read_batch(
    dataset: Dataset,
    indices: Sequence[int],
    *,
    table: str = "data.train",
    before: Callable[[int], object] | None = None,
) -> Batch:
    """Return the samples of these indices, joined in this order; `table` is for messages.

    `before` is called with each index before its sample is read; of samples that are read at once,
    with the first. JobError if the data set fails, or its samples are no pairs or dictionaries or
    do not join.
    """
    wanted = [int(index) for index in indices]
    given: Dataset | Sequential = dataset
    collate, does = None, "reading"
    if isinstance(dataset, DataSource):
        given, collate = dataset.dataset, dataset.collate
    try:
        read = _samples(given, wanted, before)
        if collate is not None:
            does = "collate of"
            read = collate(cast("list[object]", read))
    except JobError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise JobError(
            f"[{table}] {does} {shown_samples(wanted)} failed: {type(error).__name__}: {error}"
        ) from error
    if collate is not None:
        if isinstance(read, list) and len(read) == 2:  # as torch's own collate has pairs
            read = tuple(read)
        if not isinstance(read, tuple | Mapping):
            raise JobError(
                f"[{table}] collate returned {_kind(read)}: it must return a pair "
                "(inputs, targets) or a dictionary of tensors, samples first"
            )
        return _whole_batch(read, wanted, table=table, by="collate")
    if isinstance(read, tuple | Mapping):
        return _whole_batch(read, wanted, table=table, by="__getitems__")
    if not isinstance(read, list) or len(read) != len(wanted):
        raise JobError(
            f"[{table}] __getitems__ of {len(wanted)} samples returned {_kind(read)}: "
            "it must return a list of as many samples, or a tuple (inputs, targets)"
        )
    return _joined(read, wanted, table=table)


def first_of(dataset: Dataset, n_samples: int) -> list[int]:
    """Return the first samples of a data set, in its own order if it has one."""
    return _at(dataset, range(min(n_samples, len(dataset))))


def some_of(dataset: Dataset, n_samples: int) -> list[int]:
    """Return a few samples of a data set from everywhere; of a stream the first ones."""
    if isinstance(dataset, DataSource) and dataset.is_stream:
        return first_of(dataset, n_samples)
    last, steps = len(dataset) - 1, range(n_samples)
    return _at(dataset, [*dict.fromkeys(last * k // max(n_samples - 1, 1) for k in steps)])


def _at(dataset: Dataset, positions: Sequence[int]) -> list[int]:
    placed, order = DataSource.of(dataset).placed, DataSource.of(dataset).order
    if placed is not None:
        return [*map(int, placed.readable(len(positions)))]
    return [*positions] if order is None else order(0, np.array(positions), 0).tolist()


def _samples(
    dataset: Dataset | Sequential, wanted: list[int], before: Callable[[int], object] | None
) -> object:
    # By names: to ask for a protocol takes ten times as long, for every batch. Of the class: what a
    # wrapper looks up in the data set within would leave out the wrapper.
    if getattr(type(dataset), "read_in_order", None) is not None:
        return cast("Sequential", dataset).read_in_order(wanted, before)
    if getattr(type(dataset), "__getitems__", None) is not None:
        if before is not None:
            before(wanted[0])
        return cast("_BatchedDataset", dataset).__getitems__(wanted)
    by_index = cast("Dataset", dataset)
    if before is None:
        return [by_index[index] for index in wanted]
    return [(before(index), by_index[index])[1] for index in wanted]


N_MARKED: Final = 8  # samples
MARK_TOLERANCE: Final = 1e-3  # relative: the same features, computed on another processor


def marks_of(dataset: Dataset) -> tuple[float, ...] | None:
    """Return weighted means of some samples; None if they differ each time, or lie elsewhere."""
    if DataSource.of(dataset).placed is not None:
        return None
    indices = some_of(dataset, N_MARKED)
    first, second = (_marks(read_batch(dataset, indices)) for _ in range(2))
    return first if are_alike(first, second) else None


def _marks(batch: Batch) -> tuple[float, ...]:
    marks: list[float] = []
    for tensor in batch.tensors().values():
        values = tensor.detach().cpu().double().reshape(len(tensor), -1)
        values = values.nan_to_num(nan=-1.0, posinf=1e30, neginf=-1e30)
        weights = torch.linspace(1.0, 2.0, values.shape[1], dtype=torch.float64)
        marks += [*(values * weights).mean(1).tolist(), *values.abs().mean(1).tolist()]
    return tuple(marks)


def are_alike(marks: Sequence[float] | None, others: Sequence[float] | None) -> bool:
    """Return whether two data sets may be the same; unknown marks fit all."""
    if marks is None or others is None:
        return True
    # A weighted mean may be near 0 where the values are not.
    least = 1e-6 * max(map(abs, marks), default=0.0)
    return len(marks) == len(others) and all(
        math.isclose(one, two, rel_tol=MARK_TOLERANCE, abs_tol=least)
        for one, two in zip(marks, others, strict=True)
    )


def _whole_batch(
    read: tuple[object, ...] | Mapping[object, object],
    wanted: Sequence[int],
    *,
    table: str,
    by: str,
) -> Batch:
    if isinstance(read, tuple) and len(read) != 2:
        raise JobError(
            f"[{table}] {by} returned {_kind(read)}: a batch is a tuple (inputs, targets)"
        )
    inputs, targets = read if isinstance(read, tuple) else (None, None)
    if isinstance(inputs, torch.Tensor) and isinstance(targets, torch.Tensor):
        _check_rows(inputs, "inputs", table)
        _check_rows(targets, "targets", table)
        batch = Batch(inputs, targets)  # as nearly all are
    else:
        batch = _batch_of(_entries(read), table=table)
    for path, tensor in batch.tensors().items():
        if tensor.ndim == 0 or len(tensor) != len(wanted):
            raise JobError(
                f"[{table}] {by} of {len(wanted)} samples returned {shown_path(path)} of "
                f"shape {tuple(tensor.shape)}: the first size must be {len(wanted)}"
            )
    return batch


def _joined(samples: list[object], wanted: Sequence[int], *, table: str) -> Batch:
    has_entries = isinstance(samples[0], Mapping)
    for index, sample in zip(wanted, samples, strict=True):
        is_pair = isinstance(sample, tuple | list) and len(sample) == 2
        if not (isinstance(sample, Mapping) if has_entries else is_pair):
            raise JobError(
                f"[{table}] sample {index} is {_kind(sample)}: it must be a pair (input, target)"
                + (" or, as all others, a dictionary" if has_entries else " or a dictionary")
            )
    entries = [
        {path: _readable(leaf, path, index, table) for path, leaf in _entries(sample).items()}
        for index, sample in zip(wanted, samples, strict=True)
    ]
    first = entries[0]
    if any(each.keys() != first.keys() for each in entries):
        raise JobError(f"[{table}] {_misfit(entries, wanted)}")
    try:
        columns = {path: default_collate([each[path] for each in entries]) for path in first}
    except (RuntimeError, TypeError, ValueError) as error:
        raise JobError(
            f"[{table}] {_misfit(entries, wanted) or f'cannot join samples: {error}'}"
        ) from error
    return _batch_of(columns, table=table)


def _entries(read: object) -> dict[Path, object]:
    if isinstance(read, Mapping):
        return _leaves(read, ("batch",))
    inputs, targets = cast("tuple[object, object]", read)
    return _leaves(inputs, ("inputs",)) | _leaves(targets, ("targets",))


def _readable(value: object, path: Path, index: int, table: str) -> object:
    # A list is a tensor: joined as it is, its elements would become entries.
    if isinstance(value, torch.Tensor | np.ndarray | np.generic | int | float):
        return value
    with suppress(RuntimeError, TypeError, ValueError):
        if isinstance(value, list):
            return torch.as_tensor(value)
    raise JobError(
        f"[{table}] {shown_path(path)} of sample {index} is {_kind(value)}: it must be a tensor, "
        "an array or a number; leave out what neither forward nor loss reads"
    )


def _batch_of(columns: Mapping[Path, object], *, table: str) -> Batch:
    # Sorted, so that all processes have the entries in one order.
    paths = sorted(columns, key=shown_path)
    return Batch.of({path: _tensor(columns[path], shown_path(path), table) for path in paths})


# Names the first two samples with different shapes, which torch's own error does not.
def _misfit(samples: Sequence[Mapping[Path, object]], wanted: Sequence[int]) -> str | None:
    first = samples[0]
    for index, sample in zip(wanted, samples, strict=True):
        if sample.keys() != first.keys():
            names = [", ".join(map(shown_path, each)) for each in (first, sample)]
            return (
                f"samples {wanted[0]} and {index} have entries {names[0]} and {names[1]}: all "
                "samples must have the same"
            )
        for path, value in sample.items():
            shape, expected = (tuple(getattr(x, "shape", ())) for x in (value, first[path]))
            if shape != expected:
                return (
                    f"the {shown_path(path)} of samples {wanted[0]} and {index}"
                    f" have shapes {expected} and {shape}: all samples must have one "
                    "shape (pad or crop them in the data set, or by collate)"
                )
    return None


def _check_rows(tensor: torch.Tensor, name: str, table: str) -> None:
    if tensor.is_nested:
        raise JobError(
            f"[{table}] {name} are a nested tensor, which has no rows of one shape: give "
            "to_padded_tensor(0.0) of it and beside that the lengths, and let forward join them"
        )


def _tensor(value: object, name: str, table: str) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        _check_rows(value, name, table)
        return value
    try:
        return torch.as_tensor(value)
    except (RuntimeError, TypeError, ValueError) as error:
        raise JobError(
            f"[{table}] {name} are {_kind(value)}, which torch cannot turn into a tensor: {error}"
        ) from error


def _kind(value: object) -> str:
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return f"of type {type(value).__name__}"


def shown_samples(indices: Sequence[int]) -> str:
    """Return "samples 3 to 9", or the first few of them."""
    n, first = len(indices), indices[0]
    if n > 1 and list(indices) == list(range(first, first + n)):
        return f"samples {first} to {indices[-1]}"
    few = ", ".join(map(str, indices[: 4 if n <= 4 else 3]))
    return f"samples {few}" if n <= 4 else f"samples {few}, ... ({n} in all)"


# --- data shards ---

# Data sets are often sorted by class. Without the shuffle, a replica that never sees most classes
# would make the model forget them.

Indices = NDArray[np.int64]  # (n_samples,)

_N_ROUNDS: Final = 6
_N_AHEAD: Final = 4096  # samples computed at once; a whole pass at once would stall the replica


@dataclass(frozen=True, slots=True)
class DataShard:
    n_samples: int  # of the whole data set
    _: KW_ONLY
    replica_index: int
    n_replicas: int
    seed: int  # of the orders
    order_of_data: SampleOrder | None = None  # that of the data set itself, in each pass
    placed: Placed | None = None  # the data set, if it is in pieces that lie on some hosts

    @property
    def start(self) -> int:
        return self.n_samples * self.replica_index // self.n_replicas

    @property
    def stop(self) -> int:
        return self.n_samples * (self.replica_index + 1) // self.n_replicas

    def __len__(self) -> int:
        return self.stop - self.start

    def order(self, epoch: int) -> Indices:
        """Return this shard's samples, (len(self),), in the order of pass `epoch`."""
        return self.samples(np.asarray(self.positions(epoch), np.int64), epoch)

    def positions(self, epoch: int) -> Indices | range:
        """Return the shuffled positions of these samples, in the order of pass `epoch`."""
        if self.order_of_data is not None:
            return range(self.start, self.stop)
        generator = np.random.default_rng((self.seed, self.replica_index, epoch))
        return self.start + generator.permutation(len(self)).astype(np.int64)

    def samples(self, positions: Indices, epoch: int) -> Indices:
        if self.order_of_data is not None:
            return self.order_of_data(epoch, positions, self.seed)
        if self.n_replicas == 1:
            return positions  # one replica reads everything anyway
        return shuffled(positions, n_samples=self.n_samples, seed=self.seed)


def dealt_samples(
    start: int, stop: int, *, n_samples: int, seed: int, order: SampleOrder | None = None
) -> Indices:
    """Return the samples at these positions of an endless sequence of epochs; they are of one."""
    epoch, offset = divmod(start, n_samples)
    positions = np.arange(offset, offset + stop - start, dtype=np.int64)
    if order is not None:
        return order(epoch, positions, seed)
    return shuffled(positions, n_samples=n_samples, seed=(seed, epoch))


def shuffled(positions: Indices, *, n_samples: int, seed: int | tuple[int, ...]) -> Indices:
    """Return the samples at these positions of the shuffle, each in [0, n_samples).

    The shuffle is a keyed permutation that nobody stores. A Feistel network permutes [0, 4^k) for
    the smallest sufficient k; results outside the data set are permuted again until they lie
    inside (Black & Rogaway 2002, "cycle walking").
    """
    n_bits = max(1, ((n_samples - 1).bit_length() + 1) // 2)
    keys = _keys((*(seed if isinstance(seed, tuple) else (seed,)), n_samples))
    found = _permuted(np.asarray(positions, np.uint64), n_bits=n_bits, keys=keys)
    while (outside := found >= n_samples).any():
        found[outside] = _permuted(found[outside], n_bits=n_bits, keys=keys)
    return found.astype(np.int64)


@lru_cache(maxsize=64)  # asked for again with each batch
def _keys(seeds: tuple[int, ...]) -> tuple[np.uint64, ...]:
    return tuple(np.random.default_rng(seeds).integers(0, 1 << 64, _N_ROUNDS, dtype=np.uint64))


def _permuted(
    values: NDArray[np.uint64], *, n_bits: int, keys: Sequence[np.uint64]
) -> NDArray[np.uint64]:
    shift, mask = np.uint64(n_bits), np.uint64((1 << n_bits) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        # The last step of splitmix64, without its first xor, because the halves are short.
        mixed = right + key
        mixed *= _FACTORS[0]
        mixed ^= mixed >> _SHIFTS[0]
        mixed *= _FACTORS[1]
        mixed ^= mixed >> _SHIFTS[1]
        mixed &= mask
        mixed ^= left
        left, right = right, mixed
    return (left << shift) | right


_FACTORS: Final = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFTS: Final = np.uint64(27), np.uint64(31)


def start_positions(n_consumed: int, *, n_samples: int, n_replicas: int) -> tuple[int, ...]:
    """Return where each replica starts if others consumed so many samples before.

    Every replica starts after the same share of its part. So the counts add up, and a run that
    stopped between two passes continues exactly; within a pass, some samples are read twice and
    some not at all.
    `n_consumed` is of all replicas together; the result has the same sum.
    """
    parts = [
        DataShard(n_samples, replica_index=r, n_replicas=n_replicas, seed=0)
        for r in range(n_replicas)
    ]
    # Differences of one rounded line, so that the sum is exact.
    return tuple(
        n_consumed * part.stop // n_samples - n_consumed * part.start // n_samples for part in parts
    )


@final
class BatchCursor:
    """Batches of one data shard, by position: the samples consumed before.

    The last batch of a pass may be short, so that each pass reads every sample exactly once. A
    single sample left over joins the batch before it, because batch normalisation cannot train on
    one sample.
    """

    def __init__(self, data_shard: DataShard) -> None:
        self._data_shard = data_shard
        self._epoch = -1
        self._positions: Indices | range = np.empty(0, np.int64)
        self._samples: Indices = np.empty(0, np.int64)  # from `_begin` on
        self._begin = 0

    def batch(self, position: int, batch_size: int) -> Indices:
        epoch, offset = divmod(position, len(self._data_shard))
        if epoch != self._epoch:
            self._epoch, self._positions = epoch, self._data_shard.positions(epoch)
            self._samples = self._samples[:0]
        left = len(self._positions) - offset
        is_short = left <= batch_size or (left == batch_size + 1 and batch_size > 1)
        return self._window(offset, left if is_short else batch_size)

    def _window(self, offset: int, n: int) -> Indices:
        begin = offset - self._begin
        if begin < 0 or begin + n > len(self._samples):
            positions = np.asarray(self._positions[offset : offset + max(n, _N_AHEAD)], np.int64)
            samples = self._data_shard.samples(positions, self._epoch)
            self._samples, self._begin = samples, offset
            begin = 0
        return self._samples[begin : begin + n]


@final
class Samples:
    """The samples of a data set by position, endless: position p is sample `order[p mod n]`.

    The order is drawn from the seed; without one it is that of the data set.
    """

    def __init__(self, n_samples: int, *, seed: int | None = None) -> None:
        if n_samples < 1:
            raise JobError(f"the training data has {n_samples} samples: a batch needs at least one")
        self.n_samples = n_samples
        order = np.arange(n_samples, dtype=np.int64)
        if seed is not None:
            order = np.random.default_rng(seed).permutation(order)
        self._order = order

    def at(self, start: int, stop: int) -> Indices:
        return self._order[np.arange(start, stop) % self.n_samples]
