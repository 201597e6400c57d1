"""Machines that know several plans: steps of each, and layers in between."""

from pathlib import Path

import pytest

from experiments.benchmarks.measuring.workload import Workload
from experiments.benchmarks.plans.company import Company
from experiments.benchmarks.plans.machines import plan_of
from experiments.benchmarks.plans.turn import rounds
from experiments.benchmarks.plans.ways import ways
from tests.experiments.benchmarks.bare.test_machine import order_of


@pytest.mark.processes
@pytest.mark.soak
@pytest.mark.timeout(300)
def test_plans_take_turns_in_the_same_processes(tmp_path: Path) -> None:
    workload = Workload(net="image", batch_size=4, small=True)
    order = order_of(workload)
    found = ways(order)
    plans = {
        name: plan_of(found[name], order, loss=workload.loss)
        for name in ("one", "rows", "layers, 4 parts")
    }
    with Company(workload, plans, tmp_path) as company:
        assert company.n_machines("one") == 1
        one, two = company.paces(1), company.paces(2)
        turns = list(rounds(company, list(plans), n_rounds=2, n_steps=2, seconds_max=60.0))
        first = list(rounds(company, list(plans), n_rounds=2, n_steps=2, seconds_max=0.0))
    assert one.alone is one.together
    assert two.alone.keys() == two.together.keys() == one.alone.keys()
    assert len(two.alone) >= 4
    names = list(plans)
    assert [turn.plan for turn in turns] == [*names, *reversed(names)]
    assert all(turn.seconds > 0 and turn.cpu_seconds > 0 for turn in turns)
    assert len(first) == 3  # one round there is
