"""What a worker keeps, pushes, holds and takes back; when a replica waits."""

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from distbelief.core.errors import JobError
from distbelief.parameter_server.layout import Layout, PartialView, TensorSpec
from distbelief.worker.exchange import ExchangeState, GradientSum, LocalSteps, Pace
from distbelief.worker.inner_optimizer import InnerOptimizer
from tests.distbelief.worker.bench import Bench


DELTA: dict[str, Any] = {  # any settings
    "rule": {"name": "sgd", "learning_rate": 1.0},
    "inner": {"name": "SGD", "lr": 0.5, "momentum": 0.5},
}


def sgd(values: dict[int, torch.Tensor], **keywords: object) -> LocalSteps:
    inner = InnerOptimizer({"name": "SGD", "lr": 1.0, **keywords}, values)
    flat = [values.get(item, torch.zeros(0)) for item in range(3)]
    return LocalSteps(flat, list(values), inner)


def pushed(steps: LocalSteps, *, finite: bool = True) -> dict[int, list[float]]:
    found = {item: change.tolist() for item, change in steps.changes()}
    steps.pushed(finite=finite)
    return found


def install(steps: LocalSteps, values: dict[int, torch.Tensor], *fetched: float) -> None:
    """Install each of these values, all but the last one torn."""
    for one in fetched:
        steps.hold()
        for value in values.values():
            value.fill_(one)
    steps.merge()


def test_a_push_is_the_way_since_the_last_push_and_a_fetch_keeps_what_is_not_pushed() -> None:
    values = {0: torch.tensor([4.0, 8.0]), 2: torch.tensor([1.0])}
    steps = sgd(values)
    steps.step({0: torch.tensor([1.0, 2.0]), 2: torch.tensor([1.0])}, 0)
    assert pushed(steps) == {0: [1.0, 2.0], 2: [1.0]}
    steps.step({0: torch.tensor([1.0, 1.0])}, 1)  # item 2 is not used in this batch
    install(steps, values, 100.0)
    assert [values[0].tolist(), values[2].tolist()] == [[99.0, 99.0], [100.0]]
    steps.step({2: torch.tensor([0.5])}, 2)
    assert pushed(steps) == {0: [1.0, 1.0], 2: [0.5]}


def test_a_torn_install_is_repeated_without_losing_or_repeating_a_step() -> None:
    values = {0: torch.tensor([4.0])}
    steps = sgd(values)
    steps.step({0: torch.tensor([1.0])}, 0)
    install(steps, values, 50.0, 60.0, 70.0)
    assert values[0].item() == 69.0
    assert not steps.is_held
    assert pushed(steps) == {0: [1.0]}


def test_what_is_held_during_a_torn_install_can_be_pushed() -> None:
    values = {0: torch.tensor([4.0])}
    steps = sgd(values)
    steps.step({0: torch.tensor([1.0])}, 0)
    steps.hold()
    values[0].fill_(math.nan)  # a mixture
    assert pushed(steps) == {0: [1.0]}
    install(steps, values, 7.0)
    assert values[0].item() == 7.0


def test_without_steps_a_fetch_is_installed_to_the_bit() -> None:
    values = {0: torch.tensor([4.0])}
    steps = sgd(values)
    install(steps, values, -0.0)
    assert math.copysign(1.0, values[0].item()) == -1.0


def test_an_install_beside_the_values_gives_the_bits_of_one_in_their_place() -> None:
    given, fetched = torch.randn(64), torch.randn(64)
    moves = torch.randn(64)
    values = {0: given.clone()}, {0: given.clone()}
    here, beside = sgd(values[0]), sgd(values[1])
    for steps in (here, beside):
        steps.step({0: moves}, 0)
        pushed(steps)
        steps.step({0: moves}, 1)
    here.hold()
    values[0][0].copy_(fetched)
    here.merge()
    beside.merge_from([fetched.clone()])
    assert torch.equal(values[0][0], values[1][0])
    assert pushed(here) == pushed(beside)


def test_gradients_that_belong_to_somebody_else_are_copied() -> None:
    gradient = torch.ones(2)
    total = GradientSum(1, copies=True)
    total.add({0: gradient})
    gradient.fill_(5.0)
    total.add({0: gradient})
    ((_, change),) = total.changes()
    assert change.tolist() == [6.0, 6.0]
    assert gradient.tolist() == [5.0, 5.0]


def test_a_refused_push_goes_back_to_the_anchor_with_fresh_state() -> None:
    values = {0: torch.tensor([4.0])}
    steps = sgd(values, momentum=0.5)
    steps.step({0: torch.tensor([math.inf])}, 0)
    pushed(steps, finite=False)
    assert values[0].item() == 4.0
    steps.step({0: torch.tensor([1.0])}, 1)
    assert values[0].item() == 3.0


def test_a_restart_drops_steps_and_state() -> None:
    values = {0: torch.tensor([4.0])}
    steps = sgd(values, momentum=0.5)
    steps.step({0: torch.tensor([1.0])}, 0)
    steps.restart()
    install(steps, values, 10.0)
    assert values[0].item() == 10.0
    steps.step({0: torch.tensor([1.0])}, 0)
    assert values[0].item() == 9.0  # and not 8.5


def test_the_rate_follows_the_number_of_the_step() -> None:
    schedule = {
        "name": "SequentialLR",
        "milestones": [2],
        "schedulers": [
            {"name": "ConstantLR", "factor": 0.5, "total_iters": 2},
            {"name": "ExponentialLR", "gamma": 0.1},
        ],
    }
    values = {0: torch.tensor([0.0])}
    steps = sgd(values, schedule=schedule)
    moved = []
    for number in (0, 1, 3):  # step 2 was skipped
        before = values[0].item()
        steps.step({0: torch.tensor([1.0])}, number)
        moved.append(before - values[0].item())
    assert moved == pytest.approx([0.5, 0.5, 0.1])
    later = sgd(values, schedule=schedule)
    steps.restart()  # its optimizer is made anew, and its schedule goes on
    for one in (later, steps):
        before = values[0].item()
        one.step({0: torch.tensor([1.0])}, 3)
        assert before - values[0].item() == pytest.approx(0.1)


# --------------------------------------------------------------------------- replicas


def test_a_replica_goes_on_while_a_push_is_unacknowledged_but_not_for_ever() -> None:
    bench = Bench(**DELTA, exchange={"send": "delta", "every": 3}, max_steps=20).start()
    bench.shard.acknowledges = False
    bench.run_while_it_can()
    assert bench.counters.steps == 3 + 2 * 3  # twice `every`, since it cannot push
    assert [push.n_gradients for push, _ in bench.shard.pushed] == [3]
    bench.shard.acknowledges = True
    bench.acknowledge()
    bench.run_while_it_can()
    assert bench.has_halted()
    sizes = [push.n_gradients for push, _ in bench.shard.pushed]
    assert sizes[:2] == [3, 6]
    assert sum(sizes) == 20


def test_a_blocking_replica_takes_no_step_before_the_fetch_that_contains_its_push() -> None:
    exchange = {"send": "delta", "every": 3}
    bench = Bench(**DELTA, exchange=exchange, blocking=True, max_steps=20).start()
    bench.shard.acknowledges = False
    bench.run_while_it_can()
    assert (bench.counters.steps, bench.counters.fetches) == (3, 1)


def test_a_push_names_the_clock_of_the_values_that_its_first_step_began_from() -> None:
    exchange = {"send": "delta", "every": 3}
    bench = Bench(**DELTA, exchange=exchange, blocking=True, max_steps=9).run_to_the_end()
    assert [push.fetched_clock for push, _ in bench.shard.pushed] == [0, 1, 2]
    assert [push.samples for push, _ in bench.shard.pushed] == [12, 24, 36]


def test_a_difference_that_is_not_finite_is_refused_as_a_gradient_is() -> None:
    """A rate that lets finite gradients overflow."""
    given = DELTA | {"inner": {"name": "SGD", "lr": 1e38}}
    exchange = {"send": "delta", "every": 2}
    bench = Bench(**given, exchange=exchange, max_steps=50, non_finite_limit=3).start()
    with pytest.raises(JobError, match=r"inner.lr 1e\+38\): training has diverged. Use a lower"):
        bench.run_while_it_can()
    assert all(torch.isfinite(value).all() for value in bench.sums_pushed()[0])
    assert bench.counters.non_finite >= 3


def test_a_repeated_torn_fetch_repeats_local_steps_once() -> None:
    values = [torch.ones(3), torch.zeros(2)]
    specs = [TensorSpec(name="a", shape=(3,)), TensorSpec(name="b", shape=(2,), kind="buffer")]
    view = PartialView(Layout.of(specs, n_shards=1))
    exchange = ExchangeState(values, view, Pace(n_push=2), trained=[0])
    exchange.add({0: torch.full((3,), 4.0)}, rates=0.5)
    exchange.count((2,))

    def fetch(*fetched: float) -> None:
        """All but the last of them are torn."""
        for value in fetched:
            exchange.hold()
            for each in values:
                each.fill_(value)
        exchange.merge(contains_pushes=True, rates=0.5)

    fetch(1.0)
    assert values[0].tolist() == [-1.0] * 3
    values[1].add_(5.0)  # a running average, by a local step
    fetch(2.0, 2.0, 2.0)
    assert values[0].tolist() == [0.0] * 3
    assert values[1].tolist() == [7.0] * 2
    exchange.staged()
    fetch(3.0)
    assert [value.tolist() for value in values] == [[3.0] * 3, [3.0] * 2]


def test_what_gets_no_gradient_is_not_touched() -> None:
    """Regression: a job pushed zeros for it, by which weight decay and momentum moved it."""
    tensors = [TensorSpec(name=name, shape=(2,)) for name in "ab"]
    view = PartialView(Layout.of(tensors, n_shards=1))
    exchange = ExchangeState([torch.ones(2), torch.ones(2)], view, Pace(), trained=[0, 1])
    exchange.add({0: torch.ones(2)})
    exchange.count((3,))
    clocks, touched = exchange.push_facts((5,), trained={0, 1})
    assert clocks == (3,)
    assert touched is not None
    assert [one is not None for one in touched] == [True, False]
    exchange.add({1: torch.ones(2)})
    assert exchange.push_facts((5,), trained={0, 1}) == ((3,), None)


def test_a_parameter_may_have_no_dimension() -> None:
    """A replica with local steps and a temperature, as CLIP has one, failed at its start."""
    values = {0: torch.ones(1), 1: torch.ones(6)}
    inner = InnerOptimizer({"name": "SGD", "lr": 1.0}, values, shapes=[(), (2, 3)])
    inner.step({0: torch.tensor([0.25]), 1: torch.full((6,), 0.5)}, 0)
    assert [value.tolist() for value in values.values()] == [[0.75], 6 * [0.5]]


def test_a_rank_that_trains_nothing_takes_local_steps() -> None:
    """Of a small model one rank may hold all: the other ended with torch's errors of no tensors."""
    steps = sgd({})
    steps.step({}, 0)
    assert not pushed(steps)
    steps.hold()
    steps.merge()
    steps.merge_from([torch.ones(1)])
    steps.pushed(finite=True)


def test_a_push_of_what_a_codec_held_back_has_no_step_in_it() -> None:
    """Regression: it also pushed the local steps that a Stop had dropped, which are dealt again."""
    values, pushed_ = [torch.ones(2)], dict[int, torch.Tensor]()
    view = PartialView(Layout.of([TensorSpec(name="a", shape=(2,))], n_shards=1))
    inner = InnerOptimizer({"name": "SGD", "lr": 1.0}, {0: values[0]})
    pace = Pace(sends_delta=True, n_push=8)
    exchange = ExchangeState(values, view, pace, trained=[0], inner=inner)
    exchange.add({0: torch.ones(2)})
    exchange.count((3,))
    exchange.discard()
    assert exchange.push_facts((5,), trained={0}) == ((5,), None)

    class Draft:
        def put(self, index: int, tensor: torch.Tensor) -> None:
            pushed_[index] = tensor

        def put_each(self, tensors: Mapping[int, torch.Tensor]) -> None:
            pushed_.update(tensors)

    exchange.put_into(Draft(), is_rest=True)
    assert not pushed_
