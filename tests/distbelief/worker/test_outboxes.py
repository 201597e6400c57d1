"""Messages in shared memory give the same bits as messages sent in blocks."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import msgspec
import numpy as np
import pytest
import torch
from typing_extensions import override

from distbelief.core.errors import PeerLostError, RemoteProtocolError, StorageError
from distbelief.core.memory import Memory, PrivateMemory, Region
from distbelief.graph.region import Region as BoxRegion
from distbelief.plans.compiler import Compiled, compile_plan
from distbelief.plans.placement import Placement
from distbelief.protocol import TransferAck, TransferBlock
from distbelief.protocol.role import Action, Address, Compute, Report, Send
from distbelief.task.data import DataShard
from distbelief.worker.batches import BatchIndices, BatchSlice, TrainingPlan
from distbelief.worker.execution.dataflow import dataflow
from distbelief.worker.execution.executor import PartitionExecutor, StepResult
from distbelief.worker.group import AHEAD
from distbelief.worker.steps import AGAIN_SECONDS, StepOutcome, StepRunner, links_of
from tests.distbelief.graph.zoo.catalogue import ZOO
from tests.distbelief.graph.zoo.comparison import tensors_of, whole_modules
from tests.distbelief.plans.plans import captured, chain, random_plan
from tests.distbelief.worker.execution.test_execution import BATCH, inputs_of, slope


N_STEPS: Final = 5
GENERATION: Final = 1 << 32
Found = list[tuple[int, str, object, bytes]]  # step, what, item or region, its bits


class SameBatch:
    def start(self, position: int) -> None:
        """Do nothing."""

    def batch(self, step: int) -> BatchIndices:
        return BatchIndices(position=step, indices=np.arange(BATCH))


@dataclass(eq=False)
class Rank:
    index: int
    runner: StepRunner
    parameters: list[torch.Tensor]
    inputs: Callable[[int], Mapping[str, list[torch.Tensor]]]
    found: Found = field(default_factory=list)
    held: list[tuple[torch.Tensor, bytes]] = field(default_factory=list)  # and what was in it
    work: Compute | None = None
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)  # of the step before, too

    @property
    def n_done(self) -> int:
        return self.runner.step

    def open(self) -> list[Action]:
        step = self.runner.step
        self.gradients = {}
        begun = self.runner.open(
            BatchSlice(generation=GENERATION, step=step, inputs=self.inputs(step)),
            self.parameters,
            put=self.gradients.__setitem__,
            close=lambda result: self.keep(step, self.gradients, result),
        )
        return [*begun]

    def keep(self, step: int, gradients: dict[int, torch.Tensor], result: StepResult) -> None:
        self.found += [(step, "gradient", i, bits(gradients[i])) for i in sorted(gradients)]
        self.held += [
            (each, bits(each)) for each in (*gradients.values(), *result.averages.values())
        ]
        self.found += [
            (step, name, str(region), bits(value)) for name, region, value in result.outputs
        ]
        self.found += [(step, "average", i, bits(v)) for i, v in sorted(result.averages.items())]


def parts(
    inputs: Mapping[str, torch.Tensor], reads: Mapping[str, Sequence[BoxRegion]], step: int
) -> dict[str, list[torch.Tensor]]:
    """Return what a rank reads; floating-point numbers are others in each step."""
    found: dict[str, list[torch.Tensor]] = {}
    for name, regions in reads.items():
        whole = inputs[name] + step if inputs[name].is_floating_point() else inputs[name]
        found[name] = [whole[(slice(None), *region.slices)] for region in regions]
    return found


def bits(value: torch.Tensor) -> bytes:
    return value.contiguous().numpy().tobytes()


class Ranks:
    """All ranks of a plan, driven in random order; as by a leader, none is `AHEAD` of another."""

    def __init__(
        self,
        compiled: Compiled,
        memories: list[Memory],
        *,
        modules: Mapping[str, torch.nn.Module],
        tensors: Mapping[str, torch.Tensor],
        n_values: int = 2,
        micro_batches: int = 1,
        seed: int = 0,
    ) -> None:
        graph, n = compiled.graph, compiled.n_machines
        self.names = [Address(f"replica-0.{rank}") for rank in range(n)]
        self.generator = np.random.default_rng(seed)
        self.queues = {
            (a, b): deque[TransferBlock | TransferAck]() for a in range(n) for b in range(n)
        }
        self.texts: list[str] = []
        inputs = inputs_of(graph, n_values=n_values)
        self.ranks: list[Rank] = []
        for rank in range(n):
            flow = dataflow(
                compiled, rank, outputs=frozenset(graph.outputs), seeds=frozenset(graph.outputs)
            )

            execution = PartitionExecutor(
                flow,
                dtype=torch.float64,
                modules=modules,
                seed_gradient=lambda _layer, output, _n: slope(output),
            )
            runner = StepRunner(
                execution,
                links=links_of(
                    execution,
                    self.names,
                    rank,
                    memory=memories[rank],
                    batch=BATCH,
                    micro_batches=micro_batches,
                ),
                batch_plan=SameBatch(),
                micro_batches=micro_batches,
                training=True,
                seed=(3,),
            )
            parameters = [
                tensors[name][region.slices].detach().clone() for name, region in flow.items
            ]
            self.ranks.append(Rank(rank, runner, parameters, partial(parts, inputs, flow.reads)))
        for each in self.ranks:
            for peer, link in each.runner.links.items():
                self.perform(each, link.join(memories[peer].host, 1, 0.0))
            each.runner.begin(GENERATION)
            self.perform(each, each.runner.place(0.0))

    def perform(self, rank: Rank, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Compute):
                assert rank.work is None
                rank.work = action
            elif isinstance(action, Send):
                receiver = self.names.index(action.receiver)
                assert isinstance(action.message, TransferBlock | TransferAck)
                self.queues[rank.index, receiver].append(action.message)
            elif isinstance(action, Report):
                self.texts.append(action.text)

    def run(self, n_steps: int = N_STEPS) -> Found:
        now = 0.0
        while any(rank.n_done < n_steps for rank in self.ranks):
            can = list(self.possible(n_steps))
            if not can:
                now += AGAIN_SECONDS
                for rank in self.ranks:
                    for link in rank.runner.links.values():
                        self.perform(rank, link.remind(now))
                assert now < 20 * AGAIN_SECONDS, "nothing can be done"
                continue
            can[int(self.generator.integers(len(can)))](now)
        return sorted((found for rank in self.ranks for found in rank.found), key=repr)

    def possible(self, n_steps: int) -> Iterator[Callable[[float], None]]:
        granted = min(n_steps, AHEAD + min(rank.n_done for rank in self.ranks))
        for rank in self.ranks:
            if rank.work is not None:
                yield partial(self.compute, rank)
            elif not rank.runner.is_open and rank.n_done < granted:
                yield partial(self.open, rank)
        for (sender, receiver), queue in self.queues.items():
            if queue:
                yield partial(self.deliver, sender, receiver)

    def open(self, rank: Rank, now: float) -> None:
        del now
        self.perform(rank, rank.open())

    def compute(self, rank: Rank, now: float) -> None:
        assert rank.work is not None
        work, rank.work = rank.work, None
        result = work.work()
        assert isinstance(result, StepOutcome)
        self.perform(rank, rank.runner.ran(result, now))
        self.go_on(rank)

    def deliver(self, sender: int, receiver: int, now: float) -> None:
        rank, message = self.ranks[receiver], self.queues[sender, receiver].popleft()
        self.perform(rank, rank.runner.receive(sender, 1, message, now))
        self.go_on(rank)

    def go_on(self, rank: Rank) -> None:
        if rank.work is None:
            self.perform(rank, [*rank.runner.chain()])

    @property
    def n_shared(self) -> int:
        return sum(link.n_shared for rank in self.ranks for link in rank.runner.links.values())

    @property
    def n_bytes(self) -> int:
        return sum(link.n_bytes for rank in self.ranks for link in rank.runner.links.values())


def ranks_of(
    name: str, seed: int, memories: Callable[[int], list[Memory]], *, micro_batches: int = 1
) -> Ranks:
    model, graph = captured(name)
    generator, n_machines = np.random.default_rng([seed, *name.encode()]), 2 + seed % 3
    plan = random_plan(graph, generator, n_machines=n_machines)
    return Ranks(
        compile_plan(graph, plan, batch=-(-BATCH // micro_batches), n_machines=n_machines),
        memories(n_machines),
        modules=whole_modules(graph, model),
        tensors=tensors_of(model),
        n_values=ZOO[name].n_values or 2,
        micro_batches=micro_batches,
        seed=seed,
    )


def apart(n: int) -> list[Memory]:
    return [PrivateMemory(host="") for _ in range(n)]


def together(n: int) -> list[Memory]:
    return [PrivateMemory(poison=True)] * n


CASES = [
    ("mobilenet", 0, 1),  # convolutions
    ("local", 1, 2),
    pytest.param("dictation", 0, 2, marks=pytest.mark.soak),  # recurrent, and so large
    ("encoder", 1, 1),
]


@pytest.mark.untraced
@pytest.mark.parametrize(("name", "seed", "micro_batches"), CASES)
def test_results_have_the_bits_of_blocks(name: str, seed: int, micro_batches: int) -> None:
    by_blocks = ranks_of(name, seed, apart, micro_batches=micro_batches)
    shared = ranks_of(name, seed, together, micro_batches=micro_batches)
    assert shared.run() == by_blocks.run()
    assert by_blocks.n_shared == 0 < shared.n_shared
    assert shared.n_bytes == by_blocks.n_bytes
    # A sum of gradients keeps them: no later step may overwrite them.
    held = [each for rank in shared.ranks for each in rank.held]
    assert all(bits(value) == before for value, before in held)


class Full(PrivateMemory):
    @override
    def create(self, name: str, *, n_bytes: int) -> Region:
        raise StorageError("no room for shared memory")


@pytest.mark.untraced
def test_where_memory_cannot_be_made_blocks_are_sent() -> None:
    full = Full()
    ranks = ranks_of("local", 1, lambda n: [full] * n)
    assert ranks.run() == ranks_of("local", 1, apart).run()
    assert ranks.n_shared == 0
    assert ranks.texts
    assert all("in blocks, not in shared memory: no room" in text for text in ranks.texts)


@pytest.mark.untraced
def test_what_a_peer_cannot_attach_is_sent_again_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distbelief.worker.steps.FRAME_BYTES_MAX", 256)  # several each
    ranks = ranks_of("local", 1, lambda n: [PrivateMemory() for _ in range(n)])
    assert ranks.run() == ranks_of("local", 1, apart).run()
    assert not any(
        link.shared.is_used
        for rank in ranks.ranks
        for link in rank.runner.links.values()
        if link.n_out
    )


# ------------------------------------------------------------------------- one link


def two(*, batch: int = 3, memory: Memory | None = None) -> tuple[StepRunner, StepRunner]:
    """Return both ranks of a model of two layers; nothing is sent yet."""
    places = {f"fc{rank}": Placement.whole(1, rank) for rank in range(2)}
    compiled = compile_plan(chain([6, 5, 4]), places, batch=3, n_machines=2)
    names, memory = [Address(f"replica-0.{rank}") for rank in range(2)], memory or PrivateMemory()
    runners = []
    for rank in range(2):
        flow = dataflow(compiled, rank, loss="fc1")
        plan = TrainingPlan(DataShard(30, replica_index=0, n_replicas=1, seed=0), batch_size=3)
        plan.start(0)
        execution = PartitionExecutor(flow)
        links = links_of(execution, names, rank, memory=memory, batch=batch, micro_batches=1)
        runner = StepRunner(
            execution, links=links, batch_plan=plan, micro_batches=1, training=True, seed=(0,)
        )
        links[1 - rank].join(memory.host, 1, 0.0)
        runner.begin(GENERATION)
        runner.place(0.0)
        runners.append(runner)
    return runners[0], runners[1]


def begin(runner: StepRunner, generation: int = GENERATION) -> list[Compute]:
    inputs = {name: [torch.ones(3, 6)] for name in runner._flow.reads}
    return runner.open(
        BatchSlice(generation=generation, step=runner.step, inputs=inputs),
        [torch.ones(region.shape) for _, region in runner._flow.items],
        put=lambda _item, _gradient: None,
        close=lambda found: found.loss,
    )


def sent(runner: StepRunner, work: list[Compute]) -> TransferBlock:
    (each,) = work
    outcome = each.work()
    assert isinstance(outcome, StepOutcome)
    (send,) = runner.ran(outcome, 0.0)
    assert isinstance(send, Send)
    assert isinstance(send.message, TransferBlock)
    return send.message


def loss_of(runner: StepRunner, work: list[Compute]) -> object:
    """Do the rest of a step."""
    while True:
        (each,) = work
        outcome = each.work()
        assert isinstance(outcome, StepOutcome)
        runner.ran(outcome, 0.0)
        if outcome.found is not None:
            return outcome.closed
        work = runner.chain()


def test_a_message_is_computed_on_where_its_sender_has_put_it() -> None:
    memory = PrivateMemory()
    first, last = two(memory=memory)
    message = sent(first, begin(first))
    assert message.values is None
    last.receive(0, 1, message, 0.0)
    work = begin(last)
    there = memory.attach("replica-0.0.1.to-replica-0.1")[64:].view(np.float32)
    assert set(there[:15]) == {7.0}  # six ones, and a bias of one
    there[:15] = 2.0
    assert loss_of(last, work) == 3 * 4 * (5 * 2 + 1)


def test_a_rank_that_was_replaced_fails_instead_of_reading_what_came_later() -> None:
    first, last = two(memory=PrivateMemory(poison=True))
    last.receive(0, 1, sent(first, begin(first)), 0.0)
    work = begin(last)
    first.begin(GENERATION + 1)  # another process has reported ready in its place
    first.place(0.0)
    begin(first, GENERATION + 1)
    with pytest.raises(PeerLostError, match=r"replica-0\.1 was replaced"):
        loss_of(last, work)


def test_memory_that_is_not_there_is_answered_with_a_wish_for_blocks() -> None:
    first, last = two(memory=PrivateMemory())
    message = sent(first, begin(first))
    (answer,) = last.receive(0, 2, message, 0.0)  # as if from another life of its sender
    assert isinstance(answer, Send)
    assert isinstance(answer.message, TransferAck)
    assert (answer.message.taken, answer.message.by_blocks) == (0, True)
    assert first.receive(1, 1, answer.message, 0.0) == []  # one block: it is sent again
    (again,) = first.links[1].remind(AGAIN_SECONDS)
    assert isinstance(again, Send)
    assert isinstance(again.message, TransferBlock)
    assert again.message.values is not None
    assert len(again.message.values) == 15
    assert first.receive(1, 1, answer.message, 0.0) == []


def test_memory_of_another_size_is_refused() -> None:
    memory = PrivateMemory()
    first, last = two(memory=memory)
    message = sent(first, begin(first))
    memory.create("replica-0.0.7.to-replica-0.1", n_bytes=64)  # of a plan of its own
    with pytest.raises(RemoteProtocolError, match="has 64 bytes, not"):
        last.receive(0, 7, message, 0.0)


def test_a_message_larger_than_its_place_goes_in_blocks_and_is_refused_otherwise() -> None:
    first, last = two(batch=2)  # and a step has three samples
    message = sent(first, begin(first))
    assert message.values is not None
    with pytest.raises(RemoteProtocolError, match="15 numbers of float32, more than"):
        last.receive(0, 1, msgspec.structs.replace(message, values=None), 0.0)
    with pytest.raises(RemoteProtocolError, match="no such message"):
        last.receive(0, 1, msgspec.structs.replace(message, values=None, way=99), 0.0)


def test_a_peer_that_restarts_on_another_host_is_sent_blocks() -> None:
    first, _ = two()
    link = first.links[1]
    assert sent(first, begin(first)).values is None
    assert link.join("elsewhere", 1, 0.0) == []
    (again,) = link.remind(AGAIN_SECONDS)
    assert isinstance(again, Send)
    assert isinstance(again.message, TransferBlock)
    assert again.message.values is not None
    link.join("here", 1, 0.0)  # and back again
    assert link.shared.is_used
