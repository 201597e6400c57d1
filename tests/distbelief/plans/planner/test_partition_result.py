"""`distbelief.plan`: the times it uses, and what the report says about them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from typing_extensions import override

import distbelief
from distbelief.graph.capture import InputSpec
from distbelief.graph.graph import INPUT, GraphError
from distbelief.plans.cluster import Cluster
from distbelief.plans.plan import load as load_plan
from distbelief.plans.planner.cost_model import ProfiledCosts
from distbelief.plans.planner.planner import Request, planning_request
from distbelief.plans.planner.profile import add, load, this_host
from distbelief.plans.planner.profiling import this_host as this_host_module
from distbelief.plans.planner.profiling.layer_timer import profiled
from distbelief.plans.planner.profiling.this_host import HERE, Network, here
from distbelief.plans.planner.search import PlanningRequest
from tests.distbelief.plans.planner.requests import know_host, known_figures


FIGURES = known_figures(jitter=0.0)
EXAMPLE = torch.zeros(4, 12)


@pytest.fixture(autouse=True)
def _known_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    know_host(FIGURES, tmp_path, monkeypatch)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 4))


def make_request(
    model: nn.Module | None = None,
    *,
    cluster: str | Cluster = HERE,
    shape: tuple[int, ...] = (12,),
    loss: str = "cross_entropy",
    profile: bool = False,
    told: list[str] | None = None,
) -> PlanningRequest:
    asked = Request(
        model="net",
        inputs=[InputSpec(shape=shape)],
        batch=4,
        loss=loss,
        counts=[1, 2],
        cluster=cluster,
        profile=profile,
    )
    notify = (told if told is not None else []).append
    return planning_request(model or net(), asked, notify=notify)


def test_machines_like_this_one_take_the_times_measured_here() -> None:
    made = make_request()
    assert made.cluster == here(2)
    assert isinstance(made.costs, ProfiledCosts)
    assert made.costs.is_absolute
    for layer in made.graph.layers:
        if layer.kind != INPUT:
            assert made.costs.knows(layer)
    kept = load(this_host())
    assert kept is not None
    (first,) = [x for x in made.graph.layers if x.name == "0"]
    whole = [row["whole"].forward[-1] for row in kept.layers.values()]
    assert made.costs.passes(first, first.region, 1).forward in whole


def test_the_step_of_one_machine_is_the_sum_of_its_layers() -> None:
    outlook = distbelief.plan(net(), EXAMPLE, cluster="here")
    made = outlook.request
    total = sum(
        sum(made.costs.passes(x, x.region, 0)) for x in made.graph.layers if x.kind != INPUT
    )
    done = outlook.planned[0]
    assert done.median == pytest.approx(total)
    assert done.lower_bound <= done.median * (1 + 1e-9)


def test_plans_are_rows_and_a_figure_of_steps_over_machines() -> None:
    found = distbelief.plan(net(), EXAMPLE, machines=(1, 2), cluster="rack-1g")
    rows = found.rows()
    told = found.__doc__ or ""
    assert [name for name in rows[0] if name not in told] == []
    axes = found.plot().axes[0]
    lines = {str(line.get_label()): np.asarray(line.get_xydata()) for line in axes.lines}
    steps = [dict(row["step_seconds"])["p50"] for row in rows]  # type: ignore[call-overload]
    # Two machines do not help so small a net, and their step is drawn all the same.
    assert lines["median"].tolist() == [[1.0, steps[0]], [2.0, steps[1]]]
    assert lines["one machine's, divided by their number"][1, 1] == pytest.approx(steps[0] / 2)


def test_a_second_planning_measures_nothing() -> None:
    told: list[str] = []
    make_request(told=told)
    assert told[0] == "measuring this machine"
    assert told[1].startswith(f"measuring layer 1 of {len(told) - 1}: ")
    content, again = this_host().path.read_bytes(), list[str]()
    make_request(told=again)
    assert again == told[:1]
    assert this_host().path.read_bytes() == content


def test_what_was_measured_on_a_busy_machine_is_measured_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Such a profile was once kept forever.
    kept = make_request().costs
    told: list[str] = []
    monkeypatch.setattr(this_host_module, "seconds", lambda: 2.5e-4)
    made = make_request(told=told)
    assert told[0] == "measuring this machine again: it was 4.0 times as slow before"
    assert told[2].startswith("measuring layer 1 of ")
    assert isinstance(kept, ProfiledCosts)
    assert isinstance(made.costs, ProfiledCosts)
    assert made.costs.profile.layers.keys() == kept.profile.layers.keys()
    assert made.costs.profile.layers != kept.profile.layers
    assert made.costs.profile.figures != FIGURES


def test_a_busy_machine_keeps_its_profile_and_the_report_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_request()
    content = this_host().path.read_bytes()
    monkeypatch.setattr(this_host_module, "seconds", lambda: 2e-3)
    outlook = distbelief.plan(net(), EXAMPLE, cluster="here")
    assert this_host().path.read_bytes() == content
    assert "This host is now 2.0 times as slow as then" in outlook.remarks[-1]
    assert f"delete {this_host().path}." in outlook.remarks[-1]


def test_a_little_slower_or_faster_is_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    make_request()
    content = this_host().path.read_bytes()
    for now in (0.85e-3, 1.2e-3):
        monkeypatch.setattr(this_host_module, "seconds", lambda now=now: now)
        make_request()
        assert this_host().path.read_bytes() == content


def test_other_machines_are_as_much_slower_as_layers_are_here() -> None:
    plain, profiled = (
        make_request(cluster="rack-1g"),
        make_request(cluster="rack-1g", profile=True),
    )
    same = make_request(cluster=here(2), profile=True)
    measured = make_request()
    assert isinstance(profiled.costs, ProfiledCosts)
    assert not profiled.costs.is_absolute
    layer = plain.graph["0"]
    ratios = []
    for made in (plain, profiled, same, measured):
        forward = made.costs.passes(layer, layer.region, 0).forward
        ratios.append(forward)
    arithmetic_here = 1e-5 + 4 * 4 * (12 + 8) / 1e10 + 4 * (12 * 8 + 8) / 1e10
    assert ratios[2] == pytest.approx(ratios[3])
    assert ratios[1] / ratios[0] == pytest.approx(ratios[3] / arithmetic_here, rel=0.1)


def test_the_remark_names_where_costs_are_from(tmp_path: Path) -> None:
    outlook = distbelief.plan(net(), EXAMPLE, machines=2, cluster="here")
    profile = load(this_host())
    assert profile is not None
    where = f"measured on this host on {profile.date[:10]} (3 of 3 layers), machines of cluster"
    said = (
        f"Costs: layer times {where} 'here' (measured). The network is assumed: 1 "
        "Gbit/s, latency 100 us, and 100 us of overhead per message."
    )
    assert outlook.remarks[-1] == said
    assert said in str(outlook)
    outlook.save(tmp_path / "plan.json")
    plan = load_plan(tmp_path / "plan.json")
    assert plan.predicted is not None
    assert plan.predicted.costs == said
    assert plan.cluster.name == "here"
    scaled = distbelief.plan(net(), EXAMPLE, cluster="rack-1g", profile=True)
    assert scaled.remarks[-1].startswith(f"Costs: layer efficiency {where} 'rack-1g' (assumed). ")
    plain = distbelief.plan(net(), EXAMPLE, cluster="rack-1g")
    assert plain.remarks[-1].startswith(
        "Costs: assumed figures of cluster 'rack-1g', no measured layer. "
    )


def test_a_custom_network_between_machines_like_this_one() -> None:
    network = Network(bandwidth=1.25e9, latency=1e-5, message_overhead=0.0)
    cluster = here(2, network=network)
    outlook = distbelief.plan(net(), EXAMPLE, cluster=cluster, profile=True)
    assert "network is as given: 10 Gbit/s, latency 10 us" in outlook.remarks[-1]


def test_layers_that_are_too_large_or_were_not_measured_in_time_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(12, 20_000), nn.Linear(20_000, 20_000))
    outlook = distbelief.plan(model, EXAMPLE, cluster="here")
    assert "(1 of 2 layers)" in outlook.remarks[-1]
    this_host().path.unlink()
    graph = make_request(cluster="rack-1g").graph
    few = profiled(graph, batch=4)
    key, *_ = few.layers
    this_host().path.unlink()
    add(this_host(), figures=FIGURES)
    kept = add(this_host(), layers={key: few.layers[key]})
    monkeypatch.setattr("distbelief.plans.planner.planner.profiled", lambda *_, **__: kept)
    outlook = distbelief.plan(net(), EXAMPLE, loss="cross_entropy", cluster="here")
    n_layers = sum(layer.kind != INPUT for layer in graph.layers)
    assert f"(1 of {n_layers} layers)" in outlook.remarks[-1]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 5, batch_first=True)
        self.last = nn.Linear(5, 3)

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states, _ = self.lstm(x)
        result: torch.Tensor = self.last(states)
        return result


def test_opaque_modules_are_measured_and_not_changed() -> None:
    model = Recurrent()
    model.lstm.eval()
    made = make_request(model, shape=(7, 6), loss="")
    assert isinstance(made.costs, ProfiledCosts)
    whole = [layer for layer in made.graph.layers if layer.whole]
    assert whole
    assert all(made.costs.knows(layer) for layer in whole)
    assert (model.lstm.training, model.last.training) == (False, True)
    assert all(p.grad is None for p in model.parameters())


def test_a_loss_that_is_computed_whole_is_measured_if_it_takes_its_targets() -> None:
    made = make_request(loss="multilabel_margin")
    assert isinstance(made.costs, ProfiledCosts)
    assert made.costs.knows(made.graph["loss"])


def test_mistakes_are_reported_before_anything_is_measured() -> None:
    this_host().path.unlink()
    with pytest.raises(GraphError, match="33 are requested"):
        distbelief.plan(net(), EXAMPLE, machines=33, cluster="rack-1g", profile=True)
    with pytest.raises(GraphError, match="there is no cluster 'her'"):
        distbelief.plan(net(), EXAMPLE, cluster="her", profile=True)
    assert not this_host().path.exists()


def test_whole_numbers_are_inputs_too() -> None:
    model = nn.Sequential(nn.Embedding(50, 8), nn.Flatten(), nn.Linear(48, 10))
    words = torch.full((4, 6), 49)
    outlook = distbelief.plan(model, words, loss="cross_entropy", cluster="here")
    assert outlook.fits
