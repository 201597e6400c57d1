"""What users give as data: loaders beside torch's own loop over them, streams, refusals."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset as TorchDataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from typing_extensions import override

from distbelief.core.errors import JobError
from distbelief.core.spans import Epochs
from distbelief.task.data import ENDLESS, Dataset, DataShard, DataSource, read_batch
from distbelief.task.sources import DrawnOrder, as_it_stands, source_of
from distbelief.worker.batches import BatchIndices, BatchReader, DealtPlan, TrainingPlan


N = 23


def source(
    given: object,
    *,
    limit: int | None = None,
    collate: Callable[..., object] | None = None,
    again: Callable[[], object] | None = None,
) -> DataSource:
    found = source_of(given, name="a:data", limit=limit, collate=collate, again=again)
    return DataSource.of(found)


def numbers(n: int = N) -> TensorDataset:
    return TensorDataset(torch.arange(n), torch.arange(n) % 3)


def batches_of(
    data: DataSource, n_epochs: int, *, batch_size: int = 4, seed: int = 0
) -> list[list[torch.Tensor]]:
    """Return the tensors that a single replica trains on, batch by batch."""
    plan = DealtPlan(
        Epochs(n_samples=len(data), batch_size=batch_size), seed=seed, order=data.order
    )
    plan.take([(k * len(data), (k + 1) * len(data)) for k in range(n_epochs)], n_before=0)
    plan.start(0)
    reader = BatchReader(data, seed=seed)
    found = [reader.read(plan.batch(step)) for step in range(plan.n_dealt)]
    return [[*batch.tensors().values()] for batch in found]


def same(ours: list[list[torch.Tensor]], loader: "DataLoader[object]", n_epochs: int) -> bool:
    theirs = [[*batch] for _ in range(n_epochs) for batch in loader]
    assert len(ours) == len(theirs)
    return all(
        torch.equal(one, two)
        for mine, other in zip(ours, theirs, strict=True)
        for one, two in zip(mine, other, strict=True)
    )


def seen(batches: list[list[torch.Tensor]]) -> list[int]:
    return [int(number) for inputs, _ in batches for number in inputs]


# --- loaders


class Words(TorchDataset[tuple[torch.Tensor, int]]):
    """Samples of different lengths."""

    def __len__(self) -> int:
        return N

    @override
    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.arange(index % 5 + 1), index % 2


def padded(samples: list[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    words, labels = zip(*samples, strict=True)
    return torch.nn.utils.rnn.pad_sequence(list(words), batch_first=True), torch.tensor(labels)


def with_lengths(samples: list[tuple[torch.Tensor, int]]) -> dict[str, object]:
    words, labels = padded(samples)
    lengths = torch.tensor([len(word) for word, _ in samples])
    return {"text": {"words": words, "lengths": lengths}, "labels": labels}


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("collate", [None, padded])
def test_a_loader_in_order_gives_the_batches_of_a_plain_loop(
    collate: Callable[..., object] | None, *, drop_last: bool
) -> None:
    dataset = numbers() if collate is None else Words()
    loader = DataLoader(dataset, 4, collate_fn=collate, drop_last=drop_last)
    assert same(batches_of(source(loader), 2), loader, 2)


def test_a_sampler_of_batches_that_torch_has_is_taken_apart() -> None:
    loader = DataLoader(
        numbers(), batch_sampler=BatchSampler(SequentialSampler(range(N)), 4, drop_last=True)
    )
    assert source(loader).batch_size == 4
    assert same(batches_of(source(loader), 2), loader, 2)


def test_a_shuffled_loader_gives_each_sample_once_and_other_orders() -> None:
    found = seen(batches_of(source(DataLoader(numbers(), 4, shuffle=True)), 2))
    assert sorted(found[:N]) == sorted(found[N:]) == list(range(N))
    assert found[:N] != found[N:]


def test_what_a_shuffled_loader_drops_is_others_each_time() -> None:
    """As torch: the last batch of a pass is dropped, not always the same samples."""
    found = seen(batches_of(source(DataLoader(numbers(), 4, shuffle=True, drop_last=True)), 20))
    passes = [found[20 * k : 20 * (k + 1)] for k in range(20)]
    assert all(len({*one}) == 20 for one in passes)
    assert {*found} == set(range(N))


@pytest.mark.parametrize(
    ("sampler", "expected"),
    [
        (SubsetRandomSampler([3, 5, 8, 13]), {3, 5, 8, 13}),
        (
            WeightedRandomSampler([1.0, 0.0, 1.0] * 7 + [0.0, 0.0], 400),
            {k for k in range(21) if k % 3 != 1},
        ),
        (RandomSampler(range(N), replacement=True, num_samples=200), set(range(N))),
        ([4, 2, 2], {2, 4}),
        (SequentialSampler(range(5)), set(range(5))),
    ],
)
@pytest.mark.parametrize("n_replicas", [1, 2, 4])
def test_a_sampler_is_followed_by_any_number_of_replicas(
    sampler: Sequence[int], expected: set[int], n_replicas: int
) -> None:
    """Each process draws the order for itself: together they read what it gives, once."""
    sources = [source(DataLoader(numbers(), 4, sampler=sampler)) for _ in range(n_replicas)]
    n = len(sampler)
    assert len(sources[0]) == n
    whole = sources[0].order
    assert whole is not None
    for epoch in (0, 1, 0):
        order = whole(epoch, np.arange(n), 7)
        assert len(order) == n
        assert {*order.tolist()} <= expected
        parts: list[int] = []
        for r, data in enumerate(sources):
            shard = DataShard(
                n, replica_index=r, n_replicas=n_replicas, seed=7, order_of_data=data.order
            )
            parts += shard.order(epoch).tolist()
        assert parts == order.tolist()
    if n > 20:
        assert {*whole(0, np.arange(n), 7).tolist()} == expected
        assert whole(0, np.arange(n), 7).tolist() != whole(1, np.arange(n), 7).tolist()


class Backwards(SequentialSampler):
    @override
    def __iter__(self) -> Iterator[int]:
        return iter(range(N - 1, -1, -1))


class LongestFirst(RandomSampler):
    @override
    def __iter__(self) -> Iterator[int]:
        return iter(range(N - 1, -1, -1))


@pytest.mark.parametrize("kind", [Backwards, LongestFirst])
def test_samplers_derived_from_those_of_torch_have_their_own_order(
    kind: type[Backwards | LongestFirst],
) -> None:
    """They were taken for their base classes: data in order, or shuffled."""
    loader = DataLoader(numbers(), 4, sampler=kind(numbers()))
    assert seen(batches_of(source(loader), 2)) == [*range(N - 1, -1, -1)] * 2


def test_a_generator_of_a_sampler_does_not_carry_state_from_pass_to_pass() -> None:
    def drawn(*epochs: int) -> list[int]:
        generator = torch.Generator().manual_seed(3)
        sampler = WeightedRandomSampler([1.0] * N, N, generator=generator)
        order = source(DataLoader(numbers(), 4, sampler=sampler)).order
        assert order is not None
        found: list[list[int]] = [order(epoch, np.arange(N), 0).tolist() for epoch in epochs]
        return found[-1]

    assert drawn(0, 1, 2, 3) == drawn(3) != drawn(2)


def test_a_collate_may_return_nested_dictionaries_of_any_length() -> None:
    data = source(Words(), collate=with_lengths)
    batch = read_batch(data, [4, 0])
    assert batch.is_dictionary
    found = {path: tuple(tensor.shape) for path, tensor in batch.tensors().items()}
    assert found == {
        ("batch", "labels"): (2,),
        ("batch", "text", "lengths"): (2,),
        ("batch", "text", "words"): (2, 5),
    }
    assert read_batch(data, [0, 1]).tensors()["batch", "text", "words"].shape == (2, 2)


def test_what_a_collate_draws_is_the_same_in_any_process() -> None:
    def noisy(samples: list[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        words, labels = padded(samples)
        return words + torch.randn(words.shape), labels

    def read(*first: int) -> torch.Tensor:
        reader = BatchReader(source(Words(), collate=noisy))
        read = [
            reader.read(BatchIndices(position=0, indices=np.arange(index, index + 3)))
            for index in (*first, 9)
        ]
        return read[-1].tensors()["inputs",]

    assert torch.equal(read(), read(0, 5, 2, 7))


# --- streams


class Items(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self, n: int = N, *, says: int | None = None) -> None:
        self.n, self.says = n, says
        self.n_begun = 0
        self.epochs: list[int] = []

    @override
    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        self.n_begun += 1
        yield from ((torch.tensor(k), torch.tensor(k % 3)) for k in range(self.n))


class Sized(Items):
    def __len__(self) -> int:
        return self.n if self.says is None else self.says


class Epochal(Sized):
    """The job gives it the epoch, and it has another order in each."""

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    @override
    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        order = np.random.default_rng(self.epochs[-1]).permutation(self.n).tolist()
        yield from ((torch.tensor(k), torch.tensor(k % 3)) for k in order)


@pytest.mark.parametrize("form", [Sized, Epochal])
def test_a_stream_gives_the_batches_of_a_plain_loop(form: type[Sized]) -> None:
    theirs = form()
    set_epoch = getattr(theirs, "set_epoch", lambda _: None)
    expected = list[tuple[torch.Tensor, ...]]()
    for epoch in range(3):
        set_epoch(epoch)
        expected += [tuple(batch) for batch in DataLoader(theirs, 4)]
    ours = form()
    found = batches_of(source(ours), 3)
    assert len(found) == len(expected)
    for one, two in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert ours.n_begun in {3, 0}  # nothing is read again


def test_a_stream_without_length_begins_anew_at_its_end() -> None:
    data = source(Items(5))
    assert len(data) == ENDLESS
    found = read_batch(data, range(12)).tensors()["inputs",]
    assert found.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]


def test_a_limit_is_an_epoch_of_a_stream() -> None:
    for form in (Items, Sized):
        assert seen(batches_of(source(form(), limit=6), 2)) == [*range(6)] * 2
    assert len(source(Sized(), limit=1000)) == N


@settings(max_examples=200, deadline=None)
@given(
    positions=st.lists(st.integers(0, 60), min_size=1, max_size=30),
    form=st.sampled_from([Items, Sized, Epochal]),
)
def test_any_position_of_a_stream_has_its_sample(positions: list[int], form: type[Items]) -> None:
    """Property: ranges dealt in any order, and again, are those of one plain reading."""
    whole = [sample for _, sample in zip(range(61), _passes(form), strict=False)]
    data = source(form())
    for position in positions:
        assert read_batch(data, [position]).tensors()["inputs",].tolist() == [whole[position]]


def _passes(form: type[Items]) -> Iterator[int]:
    items = form()
    for epoch in range(100):
        getattr(items, "set_epoch", lambda _: None)(epoch)
        yield from (int(number) for number, _ in items)


class Shuffling(Items):
    """Shuffled through a buffer, and augmented, by torch's generator."""

    @override
    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        buffer = list(range(6))
        for k in range(6, self.n + 6):
            place = int(torch.randint(len(buffer), ()))
            number = buffer[place]
            yield torch.tensor([float(number), float(torch.rand(()))]), torch.tensor(number % 3)
            if k < self.n:
                buffer[place] = k
            else:
                del buffer[place]


@settings(max_examples=50, deadline=None)
@given(stop=st.integers(0, N - 1), size=st.integers(1, 5))
def test_a_stream_that_draws_goes_on_as_if_it_had_not_been_stopped(stop: int, size: int) -> None:
    def read(data: DataSource, first: int, last: int, size: int) -> list[list[float]]:
        reader, found = BatchReader(data, seed=3), list[list[float]]()
        for begin in range(first, last, size):
            indices = np.arange(begin, min(begin + size, last))
            batch = reader.read(BatchIndices(position=begin, indices=indices))
            found += batch.tensors()["inputs",].tolist()
        return found

    whole = read(source(Shuffling()), 0, N, 4)
    assert sorted(item[0] for item in whole) == list(range(N))
    assert read(source(Shuffling()), stop, N, size) == whole[stop:]


class InOrderFirst(Items):
    """Its first pass is in order, as for speech by length (SortaGrad); the others are shuffled."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.n

    @override
    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        order = torch.randperm(self.n) if self.epoch else torch.arange(self.n)
        return iter([(number, number % 3) for number in order])


class DrawnBySetEpoch(InOrderFirst):
    """The order is drawn before __iter__ is called."""

    order = torch.arange(0)

    @override
    def set_epoch(self, epoch: int) -> None:
        self.order = torch.randperm(self.n)

    @override
    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return iter([(number, number % 3) for number in self.order])


@pytest.mark.parametrize("form", [InOrderFirst, DrawnBySetEpoch])
def test_replicas_agree_on_a_stream_that_begins_to_draw_late(form: type[InOrderFirst]) -> None:
    """Each drew an order of its own in the second pass, and an epoch had samples twice, or not."""
    torch.manual_seed(5)
    readers = [BatchReader(source(form()), seed=3) for _ in range(2)]
    passes = [list[int]() for _ in range(3)]
    for step, begin in enumerate(range(3 * N)):
        torch.rand(step % 4)  # other code draws, too
        indices = np.arange(begin, begin + 1)
        batch = readers[step % 2].read(
            BatchIndices(position=begin, indices=indices, epoch=begin // N)
        )
        passes[begin // N] += batch.tensors()["inputs",].tolist()
    assert [sorted(one) for one in passes] == [list(range(N))] * 3
    assert passes[2] != passes[1]


def test_a_generator_is_called_again() -> None:
    def stream() -> Iterator[tuple[int, int]]:
        yield from ((k, 0) for k in range(5))

    data = source(stream(), again=stream)
    assert read_batch(data, [3]).tensors()["inputs",].tolist() == [3]
    assert read_batch(data, [1, 2]).tensors()["inputs",].tolist() == [1, 2]
    begun = stream()
    for once in (source(stream()), source(begun, again=lambda: begun)):
        assert read_batch(once, [3]).tensors()["inputs",].tolist() == [3]
        with pytest.raises(JobError, match=r"read once: give an object whose __iter__ begins"):
            read_batch(once, [1])


@pytest.mark.parametrize("n_replicas", [1, 2, 4])
def test_replicas_with_parts_of_a_stream_read_each_sample_once(n_replicas: int) -> None:
    """With order "parts", where no supervisor deals."""
    found: list[int] = []
    for r in range(n_replicas):
        data = source(Sized())
        shard = DataShard(
            N, replica_index=r, n_replicas=n_replicas, seed=0, order_of_data=data.order
        )
        plan, reader = TrainingPlan(shard, batch_size=3), BatchReader(data)
        plan.start(0)
        for step in range(plan.n_steps(0, len(shard))):
            found += reader.read(plan.batch(step)).tensors()["inputs",].tolist()
    assert found == list(range(N))


def test_the_fingerprint_is_that_of_the_data() -> None:
    class Named(Sized):
        fingerprint = "abc"

    named = Named()
    assert source(named, limit=3).fingerprint == "abc"


# --- refusals


def fails(message: str, work: Callable[[], object]) -> None:
    with pytest.raises(JobError) as caught:
        work()
    assert message in str(caught.value)
    assert str(caught.value).startswith("[data.train] ")


class Doubling(DataLoader[tuple[torch.Tensor, ...]]):
    """What it does to batches was left out without a word."""

    @override
    def __iter__(self) -> Iterator[object]:  # type: ignore[override]  # torch names a private class
        return ([2 * inputs, targets] for inputs, targets in super().__iter__())


def drop(samples: list[object]) -> object:
    return samples[0]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (SimpleNamespace(), "__getitem__(index) -> (input, target) or a dictionary, or __iter__"),
        (Items, "not a data set"),
        ((torch.zeros(3), np.zeros(3)), "a tuple of 2 arrays, which is no data set of samples"),
        (dict.fromkeys(range(9)), "a dict of 0, 1, 2, 3, 4, ..., which is no data set"),
        ({"x": torch.zeros(3)}, "a dict of x, which is no data set of samples: return torch"),
        (type("DataFrame", (list,), {})(), "a DataFrame, which is no data set of samples"),
        ([], "a data set of 0 samples: check [data.train.arguments]"),
        (Sized(0), "a stream of 0 samples"),
        (
            DataLoader(numbers(), 4, sampler=DistributedSampler(numbers(), 2, 0)),
            "DistributedSampler: a job deals samples to its replicas itself: leave the sampler out",
        ),
        (
            DataLoader(numbers(), batch_sampler=[[1, 2], [0]]),
            "by a batch_sampler of its own: a job cuts batches of [algorithm] batch_size",
        ),
        (DataLoader(numbers(), None), "has batch_size = None: let it have the batch_size of"),
        (DataLoader(Items(), None), "has batch_size = None: return its data set"),
        (
            DataLoader(numbers(), 4, num_workers=1, worker_init_fn=print),
            "a worker_init_fn: processes of a job do not call it",
        ),
        (Doubling(numbers(), 4), "has an __iter__ of its own: a job reads its data set: return"),
        (DataLoader(numbers(), 50, drop_last=True), "whose 23 samples are no batch of 50"),
        (DataLoader(Items(), 4, drop_last=True), "its stream no length"),
        (DataLoader(numbers(), 4, sampler=iter([1, 2])), "has no length: give it __len__"),
    ],
)
def test_what_cannot_be_dealt_is_refused_with_the_way(given: object, message: str) -> None:
    fails(message, lambda: source(given))


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_loader_with_a_state_is_read_as_torchs(shuffle: bool) -> None:  # noqa: FBT001
    stateful = pytest.importorskip(
        "torchdata.stateful_dataloader", reason="torchdata is not installed"
    )
    found = source(stateful.StatefulDataLoader(numbers(), 4, shuffle=shuffle))
    if shuffle:
        order = found.order
        assert isinstance(order, DrawnOrder)
        order.check(3)
        assert sorted(order(0, np.arange(len(found)), 3)) == [*range(len(found))]
    else:
        assert found.order is as_it_stands


def test_options_that_contradict_a_loader_are_refused() -> None:
    own = DataLoader(numbers(), 4, collate_fn=drop)
    fails("has a collate_fn, and the table has collate", lambda: source(own, collate=drop))
    subset = DataLoader(numbers(), 4, sampler=SubsetRandomSampler([1, 2]))
    fails("SubsetRandomSampler chooses samples, and so does limit", lambda: source(subset, limit=5))


def nested(samples: list[object]) -> object:
    return torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), torch.ones(len(samples))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (source(Items(0)), "a pass of the stream has no items"),
        (source(Sized(9, says=10)), "ended after 9 of 10 samples: let its __len__ say so"),
        (source(Items(9), limit=10), "ended after 9 of 10 samples: limit = 9"),
        (source(Sized(11, says=10)), "has more than the 10 samples that its __len__ says"),
        (source(numbers(), collate=drop), "the first size must be 10"),
        (source(numbers(), collate=nested), "inputs are a nested tensor, which has no rows of one"),
        (source(numbers(), collate=len), "collate returned of type int: it must return a pair"),
        (source(numbers(), collate=lambda s: s[99]), "collate of samples 0 to 9 failed: Index"),
    ],
)
def test_what_goes_wrong_while_reading_is_named(data: Dataset, message: str) -> None:
    fails(message, lambda: read_batch(data, range(10)))


class Unsteady:
    def __init__(self) -> None:
        self.stream = np.random.default_rng(0)

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[int]:
        yield from self.stream.permutation(N).tolist()


class UnsteadyLater(Unsteady):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    @override
    def __iter__(self) -> Iterator[int]:
        return super().__iter__() if self.epoch else iter(range(N))


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        (UnsteadyLater(), "its sampler gives another order each time: let it draw from torch's"),
        (Unsteady(), "its sampler gives another order each time: let it draw from torch's"),
        ([0, N], "each from 0 to 22"),
        (["a"], "its sampler failed: ValueError"),
    ],
)
def test_samplers_that_cannot_be_followed_are_refused(sampler: Iterable[int], message: str) -> None:
    order = source(DataLoader(numbers(), 4, sampler=sampler)).order
    assert isinstance(order, DrawnOrder)
    fails(message, lambda: order.check(0))
