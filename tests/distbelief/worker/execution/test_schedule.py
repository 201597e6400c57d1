"""Chains: what runs in one piece, and what waits for the next."""

from distbelief.plans.compiler import compile_plan
from distbelief.plans.placement import Placement
from distbelief.worker.execution.dataflow import dataflow
from distbelief.worker.execution.operations import Dataflow, ForwardOp, InputOp
from distbelief.worker.execution.schedule import MicroBatchSchedule, ReadyQueue
from tests.distbelief.plans.plans import chain


def machine_of_two_senders() -> tuple[Dataflow, ReadyQueue]:
    """Return rank 1, to which ranks 0 and 2 send a half of fc1's input each."""
    places = {
        "fc0": Placement(cuts=((2,),), machines=(0, 2)),
        "fc1": Placement(cuts=((),), machines=(1,)),
    }
    compiled = compile_plan(chain([6, 5, 4]), places, batch=3, n_machines=3)
    flow = dataflow(compiled, 1, loss="fc1")
    return flow, ReadyQueue(MicroBatchSchedule.of(flow, 1), [3])


def test_an_input_that_enables_nothing_joins_the_next_chain() -> None:
    """Regression: each input was a chain of its own, two thread switches for one view.

    With 16 ranks that exchange small pieces, that was most of a step.
    """
    flow, agenda = machine_of_two_senders()
    assert agenda.chain() == ([], 0.0)  # parameters alone
    n_left = agenda.n_left
    first, second = sorted(agenda.awaited)
    agenda.arrive(first)
    assert agenda.chain() == ([], 0.0)
    assert agenda.n_left == n_left - 1
    agenda.arrive(second)
    done, _ = agenda.chain()
    assert {first, second} < set(done)
    kinds = [type(flow.operations[instance]) for instance in done]
    assert kinds[: kinds.index(ForwardOp)] == [InputOp] * kinds.index(ForwardOp)
    assert agenda.n_left == 0


def test_the_last_input_is_not_left_behind() -> None:
    """No operation reads it; it is an output of the step."""
    places = {
        "fc0": Placement(cuts=((),), machines=(0,)),
        "fc1": Placement(cuts=((),), machines=(1,)),
    }
    compiled = compile_plan(chain([6, 5, 4]), places, batch=3, n_machines=2)
    flow = dataflow(compiled, 1, training=False, outputs=frozenset({"fc1"}))
    agenda = ReadyQueue(MicroBatchSchedule.of(flow, 1), [3])
    done: list[int] = []
    for instance in sorted(agenda.awaited):
        agenda.arrive(instance)
        done += agenda.chain()[0]
    assert sorted(done) == list(range(len(flow.operations)))
