"""Which samples a step takes, how they are read ahead, and the seeds of random numbers.

Each rank of a group has a `BatchPlan`, equal on all ranks, and a reader of what it needs of a
batch: a `SliceReader` of the input regions of its partition, or the executor of a whole model.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from typing import ClassVar, Final, Protocol, TypeVar, final

import msgspec
import numpy as np
import torch
from torch.utils.data import TensorDataset

from distbelief.core.errors import JobError
from distbelief.core.spans import NOTHING, Epochs, Span, Spans, of_part
from distbelief.graph.graph import INPUT, LayerGraph
from distbelief.graph.ops.call import ALONE
from distbelief.graph.region import Region
from distbelief.protocol import DealtRanges
from distbelief.protocol.role import Action, Compute, Cost, Executor
from distbelief.task.data import (
    Batch,
    BatchCursor,
    Dataset,
    DataShard,
    DataSource,
    Indices,
    Readers,
    SampleOrder,
    Wanted,
    dealt_samples,
    generator_states,
    read_batch,
    reseed,
    shown_path,
)
from distbelief.task.dry_run import check_labels, class_counts
from distbelief.task.tensor_pairs import TensorPairs


T = TypeVar("T")

OF_SAMPLES: Final = 1  # what tells streams of samples from those of steps
N_RANGES_SENT: Final = 64  # to other ranks at once
N_LOOKED_UP: Final = 1024  # dealt positions whose samples are looked up at once
N_KEPT: Final = 4  # steps: the current one, those after it, and one before


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DealtBatch:
    """Where a batch of dealt samples belongs."""

    push: Span  # positions of its push
    stop: int  # position after the batch
    ends_push: bool  # with this batch
    ends_range: bool


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BatchIndices:
    position: int  # number of samples before them
    indices: Indices  # (n_samples,) in the data set
    epoch: int = 0  # in which they are read
    dealt: DealtBatch | None = None
    stop: int = field(init=False)  # position after them

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", self.position + len(self.indices))


class BatchPlan(Protocol):
    """The samples of all steps of a generation."""

    def start(self, position: int) -> None:
        """A generation begins at this position."""
        ...

    def batch(self, step: int) -> BatchIndices:
        """Return the samples of a step; steps are asked for in order, or shortly again."""
        ...


@final
class TrainingPlan:
    """One batch after the other, pass after pass."""

    def __init__(self, data_shard: DataShard, *, batch_size: int) -> None:
        self._cursor = BatchCursor(data_shard)
        self._n_samples = len(data_shard)
        self._batch_size = batch_size
        self._batches: dict[int, BatchIndices] = {}
        self._next = 0
        self._position = 0

    def start(self, position: int) -> None:
        self._batches.clear()
        self._next, self._position = 0, position

    def batch(self, step: int) -> BatchIndices:
        self._batches.pop(step - N_KEPT, None)
        return self.peek(step)

    def peek(self, step: int) -> BatchIndices:
        """Return what `batch` will return for a step that is not asked for yet."""
        while self._next <= step:
            indices = self._cursor.batch(self._position, self._batch_size)
            self._batches[self._next] = BatchIndices(
                position=self._position, indices=indices, epoch=self._position // self._n_samples
            )
            self._position += len(indices)
            self._next += 1
        return self._batches[step]

    def position_of(self, step: int) -> int:
        """Return the position after so many steps."""
        n_passes, rest = divmod(step, self._n_within(self._n_samples, self._n_samples))
        return n_passes * self._n_samples + rest * self._batch_size

    def n_steps(self, start: int, stop: int) -> int:
        """Return how many steps there are from one position to another."""
        left = self._n_samples - start % self._n_samples
        if stop - start <= left:
            return self._n_within(left, stop - start)
        n_passes, rest = divmod(stop - start - left, self._n_samples)
        n_whole = self._n_within(self._n_samples, self._n_samples)
        return (
            self._n_within(left, left) + n_passes * n_whole + self._n_within(self._n_samples, rest)
        )

    def _n_within(self, left: int, n_samples: int) -> int:
        size = self._batch_size
        is_long = left % size == 1 and left > size > 1  # the last batch takes one more
        n_left = left // size if is_long else -(-left // size)
        return min(-(-max(n_samples, 0) // size), n_left)


@final
class DealtPlan:
    """The ranges that the supervisor has dealt, one after the other.

    `position` counts the samples of this replica, as elsewhere: it is no place in the data. A
    generation of a group of ranks begins where all of them have pushed what comes before.
    """

    def __init__(self, epochs: Epochs, *, seed: int, order: SampleOrder | None = None) -> None:
        self._epochs = epochs
        self._seed = seed
        self._order = order  # that of the data set itself
        self._ranges: list[Span] = []  # of this generation, the first perhaps without its beginning
        self._steps: list[int] = []  # up to the end of each
        self.n_gone = 0  # ranges before these
        self._n_in_ranges = 0  # samples
        self._n_asked = 0  # steps
        self._n_read = 0  # ranges, whole, by these steps
        self._n_cut = 0  # ranges, whole
        self._n_samples = 0  # cut of the next one
        self._block: tuple[int, Indices] = (0, np.empty(0, np.int64))  # from a position on
        self._batches: dict[int, BatchIndices] = {}
        self._next = 0
        self._position = self._began = 0

    @property
    def n_ranges(self) -> int:
        """Ranges dealt so far."""
        return self.n_gone + len(self._ranges)

    @property
    def n_dealt(self) -> int:
        """Steps of all ranges of this generation."""
        return self._steps[-1] if self._steps else 0

    def n_left(self, position: int) -> int:
        """Return the samples that were dealt, and come from this position on."""
        return self._n_in_ranges - (position - self._began)

    def take(self, ranges: Sequence[Span], *, n_before: int) -> None:
        """Take the ranges that are new; after a lost message, wait for its repetition."""
        if n_before <= self.n_ranges:
            for one in ranges[self.n_ranges - n_before :]:
                self._ranges.append(one)
                self._n_in_ranges += one[1] - one[0]
                self._steps.append(self.n_dealt + self._epochs.n_batches(*one))

    def from_step(self, step: int) -> DealtRanges:
        """Return the ranges that other ranks need for a step and those after it."""
        first = bisect_right(self._steps, step)
        ranges = tuple(self._ranges[first : first + N_RANGES_SENT])
        return DealtRanges(n_before=self.n_gone + first, ranges=ranges)

    def restart(self, n_samples: int) -> None:
        """Let the next generation begin after so many samples of this one."""
        left: list[Span] = []
        for start, stop in self._ranges:
            n_done = min(n_samples, stop - start)
            n_samples -= n_done
            left += [(start + n_done, stop)] if n_done < stop - start else []
        self.follow(DealtRanges(n_before=self.n_ranges - len(left), ranges=tuple(left)))

    def follow(self, dealt: DealtRanges) -> None:
        """Forget everything but these ranges."""
        self._ranges, self._steps, self._n_in_ranges = [], [], 0
        self.n_gone = dealt.n_before
        self.take(dealt.ranges, n_before=dealt.n_before)

    @property
    def is_read(self) -> bool:
        """Whether the last of the steps that were dealt is at least being read."""
        return self._n_read == len(self._ranges)

    def start(self, position: int) -> None:
        self._position = self._began = position
        self._batches.clear()
        self._next = self._n_asked = self._n_read = self._n_cut = self._n_samples = 0

    def batch(self, step: int) -> BatchIndices:
        self._batches.pop(step - N_KEPT, None)
        found = self.peek(step)
        while self._n_asked < min(step + 1, self._next):
            dealt = self._batches[self._n_asked].dealt
            self._n_read += dealt is not None and dealt.ends_range
            self._n_asked += 1
        return found

    def peek(self, step: int) -> BatchIndices:
        """Return what `batch` will return for a step that is not asked for yet, if it is dealt."""
        while self._next <= step and self._n_cut < len(self._ranges):
            self._batches[self._next] = batch = self._cut()
            self._position += len(batch.indices)
            self._next += 1
        nothing = BatchIndices(position=self._position, indices=np.empty(0, np.int64))
        return self._batches.get(step, nothing)

    def _cut(self) -> BatchIndices:
        epochs, (begin, end) = self._epochs, self._ranges[self._n_cut]
        start = begin + self._n_samples
        push = max(epochs.start(start), begin), min(epochs.stop(start), end)
        stop = start + epochs.batch(push[1] - start)
        self._n_samples += stop - start
        if stop == end:
            self._n_cut += 1
            self._n_samples = 0
        return BatchIndices(
            position=self._position,
            indices=self._samples(start, stop, end),
            epoch=start // epochs.n_samples,
            dealt=DealtBatch(
                push=push, stop=stop, ends_push=stop == push[1], ends_range=stop == end
            ),
        )

    def _samples(self, start: int, stop: int, end: int) -> Indices:
        """Return the samples of a batch of a range that ends at `end`.

        They are looked up in blocks: a small one takes as long as one of some hundred.
        """
        first, found = self._block
        if not first <= start <= stop <= first + len(found):
            n = self._epochs.n_samples
            last = max(stop, min(start + N_LOOKED_UP, end, (start // n + 1) * n))
            found = dealt_samples(start, last, n_samples=n, seed=self._seed, order=self._order)
            first, self._block = start, (start, found)
        return found[start - first : stop - first]

    def n_steps(self, start: int, stop: int) -> int:
        """Return about how many steps there are from one position to another."""
        return -(-(stop - start) // self._epochs.batch_size)


@final
class DealtPushes:
    """Which positions of the data each push is of, where samples are dealt."""

    def __init__(self, plan: DealtPlan, *, part: int) -> None:
        self.plan = plan
        self.skipped = NOTHING  # positions of pushes without any gradient
        self.is_whole = False  # whether no later sample may join the push that is due
        self._part = part  # of the replica that this rank pushes
        self._due: Span | None = None  # positions of the push that is due
        self._start: int | None = None  # the first position since the last push
        self._stop = 0  # the position after the last batch
        self._last_skipped: Span | None = None
        # Pushes up to the end of each range that is taken and not known to be applied.
        self._range_ends: deque[int] = deque()
        self._n_ranges_done = 0

    @property
    def span(self) -> Span | msgspec.UnsetType:
        """The positions of the push that is due, for the shards."""
        return msgspec.UNSET if self._due is None else of_part(self._due, self._part)

    def begin(self) -> None:
        self._range_ends.clear()
        self._n_ranges_done = self.plan.n_gone

    def drop(self) -> None:
        self._start = None

    def add(self, dealt: DealtBatch, *, is_auto: bool, is_full: bool) -> bool:
        """Add a batch; return whether a push ends with it.

        It ends where that of any other replica would, or if it `is_auto` when it is full.
        """
        start, stop = dealt.push
        self._stop = dealt.stop
        if self._start is None:
            self._start = start
        self.is_whole = dealt.ends_range or not is_auto
        if not ((is_auto and is_full) or dealt.ends_range or (dealt.ends_push and not is_auto)):
            return False
        self.end((self._start, stop))
        return True

    def end_early(self) -> bool:
        """Let a push end with the last batch; return whether it has any."""
        if self._start is None:
            return False
        self.end((self._start, self._stop))
        return True

    def end(self, push: Span) -> None:
        """These are the positions of the push that is due."""
        start, stop = push
        last = self._last_skipped
        if last is not None and last[1] == start:
            start = last[0]  # this push is also for the samples just skipped
        self._due = start, stop

    def end_nothing(self) -> None:
        """The push that is due has no samples of its own."""
        self._due = None

    def skip(self) -> None:
        """The push that is due has no gradient."""
        self._last_skipped = self._due
        self.skipped |= NOTHING if self._due is None else Spans([self._due])

    def end_range(self, n_pushes: int) -> None:
        """A range ends with the last of so many pushes."""
        self._range_ends.append(n_pushes)

    def figures(self, n_applied: int, *, position: int) -> dict[str, float]:
        while self._range_ends and self._range_ends[0] <= n_applied:
            self._range_ends.popleft()
            self._n_ranges_done += 1
        return {
            "ranges": float(self.plan.n_ranges),
            "ranges_done": float(self._n_ranges_done),
            "samples_ahead": float(max(self.plan.n_left(position), 0)),
        }


@final
@dataclass(slots=True, kw_only=True)
class Limits:
    """Bounds of the steps of a replica; those that are None bound nothing."""

    steps_max: int | None = None  # of all generations, repeated ones counted once
    samples_max: int | None = None  # data position at which the last step has begun
    n_steps: Callable[[int, int], int] | None = None  # from one data position to another
    first: int | None = None  # of the first generation
    generation: int | None = None  # of the current one
    samples_allowed: int | None = None  # pause after so many
    last_step: int | None = None  # of this generation, after a Stop

    def bounds(self, position: int, *, n_before: int = 0) -> list[int]:
        """Return what bounds the steps of a generation that began at a position."""
        found = (
            self.generation,
            self.last_step,
            self.steps_left(n_before),
            self.steps_to(self.samples_max, position),
            self.steps_to(self.samples_allowed, position),
        )
        return [bound for bound in found if bound is not None]

    def is_last(self, n_granted: int, position: int, *, n_before: int = 0) -> bool:
        """Return whether none comes after so many steps."""
        ends = self.steps_left(n_before), self.steps_to(self.samples_max, position)
        return any(end is not None and n_granted >= end for end in ends)

    def steps_left(self, n_before: int) -> int | None:
        return None if self.steps_max is None else max(self.steps_max - n_before, 0)

    def steps_to(self, stop: int | None, position: int) -> int | None:
        return None if stop is None or self.n_steps is None else self.n_steps(position, stop)


@final
class EvaluationPlan:
    """The held-out samples in chunks: a subset (position 0), or all (position 1)."""

    def __init__(self, kinds: Sequence[Indices], *, chunk: int) -> None:
        self._kinds = kinds
        self._chunk = chunk
        self._indices = kinds[0]

    def start(self, position: int) -> None:
        # The position selects what is measured.
        self._indices = self._kinds[min(position, len(self._kinds) - 1)]

    def n_steps(self, position: int) -> int:
        return -(-len(self._kinds[position]) // self._chunk)

    def batch(self, step: int) -> BatchIndices:
        first = step * self._chunk
        return BatchIndices(position=first, indices=self._indices[first : first + self._chunk])


@lru_cache(maxsize=1024)  # of an epoch asked for at every sample
def step_seed(seed: tuple[int, ...], position: int) -> int:
    """Return the seed of a step's random numbers, equal on all ranks."""
    sequence = np.random.SeedSequence((*seed, position))
    return int(sequence.generate_state(1, np.uint64)[0])


_WORD: Final = (1 << 64) - 1


def mixed(seed: int, index: int) -> int:
    """Return a seed for each index: splitmix64 (Steele, Lea & Flood 2014), ten times as fast."""
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) & _WORD
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _WORD
    return z ^ (z >> 31)


# --- random numbers of the user's code ---

# torch, numpy and Python's `random` have one generator each, for all threads, and samples are read
# in one thread while another takes a step. So code that draws runs alone, and from a seed of its
# own that says what it computes: no thread disturbs another, and any process draws the same.


@final
class Draws:
    """Whether some code draws, as far as was seen, and how it runs.

    That is looked at when it runs for the first time, the second, the fourth, the eighth, ..., or
    `always`. Code that does not draw waits for nobody between these times.
    """

    n_alone: ClassVar[int] = 0  # begins and ends of code that ran alone: odd meanwhile

    def __init__(self, *, always: bool = False) -> None:
        self.are_seen = False
        self.looks_next = False
        self._always = always
        self._n_runs = 0

    def run(self, code: Callable[[], T], *, seed: Callable[[], int]) -> T:
        """Let code draw from this seed, alone; what draws nothing runs as it is."""
        is_time = self._always or self.looks_next or self._n_runs & (self._n_runs + 1) == 0
        looks = self.are_seen or is_time
        # The first run counts once it has ended: others that begin meanwhile are looked at, too.
        is_first = not self._n_runs
        self._n_runs += not is_first
        if not looks:
            return code()
        with ALONE:
            Draws.n_alone += 1
            try:
                reseed(seed())
                before = None if self.are_seen else generator_states()
                result = code()
                self.are_seen = before is None or generator_states() != before
            finally:
                Draws.n_alone += 1
            self._n_runs += is_first
            self.looks_next = False
        return result


@final
class BatchReader:
    """Reads batches of a data set: samples that draw random numbers, each from its own stream.

    The seed, the epoch and the sample give the stream, so it is the same in any process and order.
    Samples that `__getitems__` reads at once have one stream, of the first of them. So other
    processes may read for this one: `readers`.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        seed: int = 0,
        table: str = "data.train",
        readers: Readers | None = None,
    ) -> None:
        self._dataset = dataset
        self._seed = seed
        self._table = table
        # A stream that draws for the first time in its second pass must not do so unseen: each
        # replica would have an order of its own, and train some samples twice and others never.
        self._draws = Draws(always=isinstance(dataset, DataSource) and dataset.is_stream)
        self._draws_beside_torch = False  # of numpy or Python's random, once that was seen
        # Tensors draw nothing: to look takes longer than to read them.
        self._draws_nothing = type(dataset) in {TensorPairs, TensorDataset}
        self._readers = readers
        self.n_ahead = 0 if readers is None else readers.n_ahead

    def read(self, samples: BatchIndices, ahead: Sequence[BatchIndices] = ()) -> Batch:
        """Return the samples of a batch; JobError if the data fail.

        The next ones, `ahead`, are read meanwhile if other processes do.
        """
        if self._readers is not None:
            return self._readers.read(self._wanted(samples), [self._wanted(one) for one in ahead])
        indices: list[int] = samples.indices.tolist()
        if self._draws_nothing:
            return read_batch(self._dataset, indices, table=self._table)

        def seed(index: int) -> int:
            return mixed(step_seed((self._seed, samples.epoch), OF_SAMPLES), index)

        were_seen = self._draws.are_seen, self._draws_beside_torch
        n_alone = Draws.n_alone
        has_drawn = False

        def read() -> Batch:
            nonlocal has_drawn
            generator = torch.default_generator
            before: Callable[[int], object] | None = None
            if all(were_seen):
                before = lambda index: reseed(seed(index))  # noqa: E731 -- read at once
            elif any(were_seen):
                before = lambda index: generator.manual_seed(seed(index))  # noqa: E731
            # To seed the others takes as long as many transforms of a sample: look once a batch.
            looks = before is not None and not self._draws_beside_torch
            states = None if all(were_seen) else generator_states(with_torch=before is None)
            batch = read_batch(self._dataset, indices, table=self._table, before=before)
            if states is not None and generator_states(with_torch=before is None) != states:
                has_drawn = True
                self._draws_beside_torch |= looks
            return batch

        batch = self._draws.run(read, seed=lambda: seed(indices[0]))
        # Each process looks at other times, and what a sample draws must not depend on that. So
        # look now, unless the numbers may be those of other code, which ran alone meanwhile.
        if has_drawn and not any(were_seen) and n_alone % 2 == 0 and Draws.n_alone == n_alone:
            self._draws.looks_next = True
            return self.read(samples)
        # What was drawn when that was seen for the first time was of one stream.
        is_same = were_seen == (self._draws.are_seen, self._draws_beside_torch)
        return batch if is_same else self.read(samples)

    def _wanted(self, samples: BatchIndices) -> Wanted:
        indices = np.asarray(samples.indices, np.int64).tobytes()
        return Wanted(seed=self._seed, epoch=samples.epoch, indices=indices)


@final
class WholeBatches:
    """Reads the batches of a whole model for its replica."""

    def __init__(self, reader: BatchReader) -> None:
        self._reader = reader
        self._bytes_per_sample = 0.0  # once a batch has been read
        self.n_ahead = reader.n_ahead

    def read(
        self, generation: int, step: int, samples: BatchIndices, ahead: Sequence[BatchIndices] = ()
    ) -> "BatchSlice":
        batch = self._reader.read(samples, ahead)
        n_bytes = sum(tensor.nbytes for tensor in batch.tensors().values())
        self._bytes_per_sample = n_bytes / len(samples.indices)
        return BatchSlice(generation=generation, step=step, samples=samples, batch=batch)

    def read_bytes(self, n_samples: int) -> float:
        return 2.0 * self._bytes_per_sample * n_samples


def micro_sizes(n_samples: int, micro_batches: int) -> list[int]:
    """Return the number of samples of each micro-batch; none is empty."""
    n = min(micro_batches, n_samples)
    ends = [n_samples * (index + 1) // n for index in range(n)]
    return [stop - start for start, stop in pairwise([0, *ends])]


READ: Final = "replica:read"
N_AHEAD: Final = 2  # slices read or held: of the current step and the next


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSlice:
    generation: int  # generation of the group in which it was read
    step: int
    samples: BatchIndices = BatchIndices(position=0, indices=np.empty(0, dtype=np.int64))
    # Per input layer, one tensor per region: (n_samples, *shape).
    inputs: Mapping[str, Sequence[torch.Tensor]] = field(default_factory=dict)
    batch: Batch | None = None  # of a whole model; of the rank that evaluates, only the targets


def bad_sample(batch_slice: BatchSlice) -> int | None:
    """Return the index in the data set of the first sample with NaN or infinity."""
    parts = [part for regions in batch_slice.inputs.values() for part in regions]
    if batch_slice.batch is not None:
        parts += batch_slice.batch.tensors().values()
    for part in parts:
        bad = ~part.isfinite()
        if bool(bad.any()):
            return int(batch_slice.samples.indices[int(bad.nonzero()[0][0])])
    return None


def blame_of(sample: int | None) -> str | None:
    if sample is None:
        return None
    return f"[data.train] sample {sample} has NaN or infinite values: fix or remove such samples"


class Reader(Protocol):
    """Reads what one rank needs of a batch, in the data executor."""

    @property
    def n_ahead(self) -> int:
        """How many of the batches that come after one it begins to read."""
        ...

    def read(
        self, generation: int, step: int, samples: BatchIndices, ahead: Sequence[BatchIndices] = ()
    ) -> BatchSlice: ...

    def read_bytes(self, n_samples: int) -> float:
        """Return roughly how many bytes reading so many samples moves."""
        ...


@final
class SliceReader:
    def __init__(
        self,
        dataset: Dataset,  # gives the inputs of the graph, in order
        *,
        graph: LayerGraph,
        reads: Mapping[str, Sequence[Region]],  # regions needed
        dtype: torch.dtype,
        keeps_targets: bool = False,  # whole targets are needed too
        table: str = "data.train",  # names the data set in messages
        readers: Readers | None = None,
        sums: bool = False,  # losses of batches are added up
    ) -> None:
        self._sums = sums
        self._reader = BatchReader(dataset, table=table, readers=readers)
        self.n_ahead = self._reader.n_ahead
        self._inputs = [layer for layer in graph.layers if layer.kind == INPUT]
        self._reads = reads
        self._n_classes = class_counts(graph)
        self._dtype = dtype
        self._keeps_targets = keeps_targets
        self._table = table

    @property
    def reads_nothing(self) -> bool:
        return not (self._reads or self._keeps_targets)

    def read(
        self, generation: int, step: int, samples: BatchIndices, ahead: Sequence[BatchIndices] = ()
    ) -> BatchSlice:
        """Return the slice of these samples; JobError if the data fail or do not fit the model."""
        indices = [int(index) for index in samples.indices]
        batch = self._reader.read(samples, ahead)
        found: dict[str, list[torch.Tensor]] = {}
        given = batch.tensors()
        if len(given) < len(self._inputs):
            raise JobError(
                f"[{self._table}] items have {', '.join(map(shown_path, given))}; the plan is for "
                f"{', '.join(layer.name for layer in self._inputs)}"
            )
        for layer, (path, value) in zip(self._inputs, given.items(), strict=False):
            if layer.name in self._n_classes:
                n_classes = self._n_classes[layer.name]
                check_labels(value, n_classes, indices=indices, table=self._table, sums=self._sums)
            if layer.name not in self._reads:
                continue
            if tuple(value.shape[1:]) != layer.shape:
                raise JobError(
                    f"[{self._table}] {shown_path(path)} have shape {list(value.shape[1:])}; the "
                    f"plan is for {list(layer.shape)}"
                )
            dtype = torch.int64 if layer.is_integer else self._dtype
            # Copies, so that the memory of the whole batch can be freed.
            found[layer.name] = [
                value[(slice(None), *region.slices)].to(dtype) for region in self._reads[layer.name]
            ]
        kept = Batch(None, batch.targets) if self._keeps_targets else None
        return BatchSlice(
            generation=generation, step=step, samples=samples, inputs=found, batch=kept
        )

    def read_bytes(self, n_samples: int) -> float:
        return 1e3 * n_samples


@final
class SlicePrefetch:
    """Reads the batch slices of a generation, each once, one step ahead.

    Without a reader, steps need nothing but the indices. If it `reuses`, what one generation has
    read and not taken may serve the next one.
    """

    def __init__(self, reader: Reader | None, plan: BatchPlan, *, reuses: bool = False) -> None:
        self._reader = reader
        self._plan = plan
        self._peek = plan.peek if isinstance(plan, TrainingPlan | DealtPlan) else plan.batch
        self._reuses = reuses
        self._held: dict[int, BatchSlice] = {}
        self._generation = 0
        self._next = 0
        self._reading = False

    def begin(self, generation: int, position: int) -> None:
        self._plan.start(position)
        self._generation, self._next = generation, 0
        held, self._held = self._held, {}
        for batch_slice in held.values():
            self._reuse(batch_slice)

    def has(self, step: int) -> bool:
        return self._reader is None or step in self._held

    def take(self, step: int) -> BatchSlice | None:
        if self._reader is None:
            samples = self._plan.batch(step)
            return BatchSlice(generation=self._generation, step=step, samples=samples)
        return self._held.pop(step, None)

    def put_back(self, batch_slice: BatchSlice) -> None:
        self._held[batch_slice.step] = batch_slice

    def read_ahead(self, step: int, *, stop: int) -> list[Action]:
        """Start reading one more slice, unless one is being read."""
        wanted = min(step + N_AHEAD, stop)
        if self._reading or self._reader is None or self._next >= wanted:
            return []
        generation, number, reader = self._generation, self._next, self._reader
        samples = self._plan.batch(number)
        if not len(samples.indices):
            return []  # the last step comes before this one
        self._next += 1
        self._reading = True
        last = min(number + reader.n_ahead, stop - 1)
        ahead = [one for k in range(number + 1, last + 1) if len((one := self._peek(k)).indices)]
        return [
            Compute(
                name=READ,
                work=lambda: reader.read(generation, number, samples, ahead),
                cost=Cost(n_bytes=reader.read_bytes(len(samples.indices))),
                executor=Executor.DATA,
            )
        ]

    def have_read(self, result: object) -> None:
        assert isinstance(result, BatchSlice), result
        self._reading = False
        if result.generation == self._generation:
            self._held[result.step] = result
        else:
            self._reuse(result)

    def _reuse(self, batch_slice: BatchSlice) -> None:
        """Keep a slice of an earlier generation if the next step takes the same samples."""
        if not self._reuses:
            return
        here, wanted = batch_slice.samples, self._plan.batch(self._next)
        same = (here.position, here.stop, here.dealt) == (
            wanted.position,
            wanted.stop,
            wanted.dealt,
        )
        if same:
            self._held[self._next] = replace(
                batch_slice, generation=self._generation, step=self._next
            )
            self._next += 1
