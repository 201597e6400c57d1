"""Which gradients other ranks wait for, and so come first; where they are added up."""

from collections.abc import Mapping
from itertools import pairwise

from torch import nn

from distbelief.graph.capture import InputSpec, capture
from distbelief.graph.graph import INPUT
from distbelief.plans.compiler import Compiled, compile_plan
from distbelief.plans.placement import Placement
from distbelief.worker.execution.dataflow import dataflow, urgent
from distbelief.worker.execution.operations import BackwardOp, ForwardOp
from distbelief.worker.execution.schedule import MicroBatchSchedule, ReadyQueue
from tests.distbelief.plans.plans import captured, chain


def on(machine: int) -> Placement:
    return Placement(cuts=((),), machines=(machine,))


def compiled(places: Mapping[str, Placement], *, n_machines: int = 2) -> Compiled:
    return compile_plan(chain([6, 5, 4, 3, 2]), places, batch=3, n_machines=n_machines)


STAGES = {"fc0": on(0), "fc1": on(0), "fc2": on(1), "fc3": on(1)}


def test_all_layers_on_a_path_to_a_sent_gradient_are_urgent() -> None:
    """Regression: only fc2 was urgent, which reads the output of another rank; fc3 was not.

    Rank 1 computed gradients of fc3's tensors while rank 0 waited for that of fc1.
    """
    assert urgent(compiled(STAGES)) == {"fc2", "fc3"}
    assert urgent(compiled(dict.fromkeys(STAGES, on(0)), n_machines=1)) == set()


def test_gradients_of_tensors_come_when_nothing_urgent_is_left() -> None:
    flow = dataflow(compiled(STAGES), 1, loss="fc3")
    agenda = ReadyQueue(MicroBatchSchedule.of(flow, 1), [3])
    (instance,) = agenda.awaited
    agenda.arrive(instance)
    done = []
    while chain_of := agenda.chain()[0]:
        done += [flow.operations[i] for i in chain_of]
    gradients = [
        (task.layer.name, operation.places)
        for operation in done
        if isinstance(operation, BackwardOp)
        and isinstance(task := flow.operations[operation.forward], ForwardOp)
    ]
    assert gradients == [("fc3", (0,)), ("fc2", (0,)), ("fc3", (1, 2)), ("fc2", (1, 2))]


def test_a_rank_that_no_other_waits_for_pushes_early() -> None:
    flow = dataflow(compiled(STAGES), 0, loss="fc3")
    backs = [each for each in flow.operations if isinstance(each, BackwardOp)]
    assert [back.places for back in backs] == [(0, 1, 2), (1, 2)]
    assert not any(back.can_wait for back in backs)


def test_a_gradient_that_travels_itself_does_not_wait_for_a_path() -> None:
    """Layers 1 and 2 are cut into two bands and share one weight each."""
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 1))
    graph = capture(net, [InputSpec(shape=(1, 10, 10))])
    bands = Placement(cuts=((), (4,), ()), machines=(0, 1))
    whole = Placement(cuts=((), (), ()), machines=(0,))
    places = {"0": whole, "1": bands, "2": bands}
    assert urgent(compile_plan(graph, places, batch=3, n_machines=2)) == {"1"}


def test_steps_of_a_recurrent_layer_add_to_one_gradient_in_a_fixed_order() -> None:
    """A gradient of all weights was kept for each step until the end of the pass."""
    _, graph = captured("dictation")
    places = {
        layer.name: Placement.whole(len(layer.shape), 0)
        for layer in graph.layers
        if layer.kind != INPUT
    }
    alone = compile_plan(graph, places, batch=4, n_machines=1)
    flow = dataflow(alone, 0, seeds=frozenset(graph.outputs))
    backs = [(i, op) for i, op in enumerate(flow.operations) if isinstance(op, BackwardOp)]
    writers = [[i for i, op in backs if slot in op.writes] for slot in flow.added]
    assert max(map(len, writers)) == 3  # the GRU's weight
    schedule, n = MicroBatchSchedule.of(flow, 2), len(flow.operations)
    for each in writers:
        in_order = [micro_batch * n + i for micro_batch in range(2) for i in each]
        for one, other in pairwise(in_order):
            assert other in schedule.successors[one]
