"""Plan files: unchanged when loaded, and rejected for other jobs."""

import hashlib
import re
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from distbelief.core.errors import StorageError
from distbelief.graph.append_loss import append_loss
from distbelief.graph.capture import InputSpec, capture
from distbelief.graph.graph import INPUT, GraphError, LayerGraph
from distbelief.plans.cluster import Cluster, Machine, uniform
from distbelief.plans.placement import Placement, grid
from distbelief.plans.plan import (
    N_BYTES_MAX,
    Plan,
    Prediction,
    decode,
    encode,
    load,
    packed,
    plan_for,
)
from tests.distbelief.plans.plans import captured


MACHINE = Machine(flops=1e11, memory_rate=3e10, bandwidth=1.25e8)
CLUSTER = uniform("lab", MACHINE, 4, latency=1e-4)
PREDICTION = Prediction(
    step_seconds=0.5,
    p10_seconds=0.4,
    p90_seconds=0.7,
    bound_seconds=0.45,
    gap=0.03,
    solver="elimination",
    exact=True,
    costs="assumed",
)


def graph_of(*, channels: int = 4, size: int = 6, loss: str = "mse") -> LayerGraph:
    with torch.device("meta"):
        module = nn.Sequential(
            nn.Conv2d(2, channels, 3, padding=1), nn.Flatten(), nn.Linear(channels * size**2, 8)
        )
    return append_loss(capture(module, [InputSpec(shape=(2, size, size))]), loss)


GRAPH = graph_of()
PLACEMENTS = {
    "0": Placement(cuts=((), (3,), (2,)), machines=(0, 1, 2, 3)),
    "1": Placement(cuts=((),), machines=(0,)),
    "2": Placement(
        cuts=((72,),), machines=(1, 2), combine=Placement(cuts=((4,),), machines=(2, 3))
    ),
    "loss": Placement(cuts=(), machines=(3,)),
}


def plan_of(**changes: object) -> Plan:
    plan = plan_for(GRAPH, PLACEMENTS, batch=32, loss="mse", cluster=CLUSTER, predicted=PREDICTION)
    changed: Plan = msgspec.structs.replace(plan, **changes)
    return changed


def with_hash(body: bytes) -> bytes:
    """A file with the right hash: only its content can be wrong."""
    digest = hashlib.sha256(body).hexdigest().encode()
    return b'{"sha256": "%s", "plan": %s}' % (digest, body)


def forged(old: bytes, new: bytes) -> bytes:
    """The plan's file with a change, and a hash that fits."""
    document = encode(plan_of())
    body = document[document.index(b'"plan": ') + len(b'"plan": ') : -2]
    assert old in body
    return with_hash(body.replace(old, new))


def test_a_plan_comes_back_as_it_was(tmp_path: Path) -> None:
    plan = plan_of(model="experiments.images.model:paper_net", micro_batches=4)
    plan.save(tmp_path / "plan.json")
    assert load(tmp_path / "plan.json") == plan
    assert list(tmp_path.iterdir()) == [tmp_path / "plan.json"]
    plan.save(str(tmp_path / "plan.json"))
    assert load(str(tmp_path / "plan.json")) == plan
    assert decode(encode(plan_of(predicted=None))).predicted is None


@pytest.mark.parametrize("name", ["encoder", "inception", "lstm"])
def test_the_graph_comes_back_from_the_plan(name: str) -> None:
    graph = captured(name)[1]
    computed = [layer for layer in graph.layers if layer.kind != INPUT]
    alone = {layer.name: Placement.whole(len(layer.shape), 0) for layer in computed}
    plan = plan_for(graph, alone, batch=4, loss="mse", cluster=CLUSTER)
    assert decode(encode(plan)).captured_graph() == graph
    with pytest.raises(GraphError, match=f"{graph.fingerprint}, but holds {GRAPH.fingerprint}"):
        msgspec.structs.replace(plan, captured=packed(GRAPH)).captured_graph()


@pytest.mark.parametrize("content", [b"", b"{}", packed(GRAPH)[:-20]])
def test_a_plan_without_its_graph_says_so(content: bytes) -> None:
    with pytest.raises(GraphError, match=r"has no layer graph .*plan again"):
        plan_of(captured=content).captured_graph()


def test_each_layer_has_a_line_of_its_own_in_the_graphs_order() -> None:
    backwards = dict(reversed(PLACEMENTS.items()))
    plan = plan_for(GRAPH, backwards, batch=32, loss="mse", cluster=CLUSTER)
    lines = encode(plan).decode().splitlines()
    layers = [line for line in lines if '"machines":' in line]
    assert [line.split('"')[1] for line in layers] == list(PLACEMENTS)


def test_a_plan_knows_which_machines_work() -> None:
    everything = {name: Placement.whole(len(GRAPH[name].shape), 1) for name in PLACEMENTS}
    plan = plan_for(GRAPH, everything, batch=32, loss="mse", cluster=CLUSTER)
    assert plan.machines == [1]
    assert plan_of().machines == [0, 1, 2, 3]


def test_a_plan_for_144_machines_is_small_and_quick() -> None:
    with torch.device("meta"):
        module = nn.Sequential(*(nn.Conv2d(4, 4, 3, padding=1) for _ in range(12)))
    graph = capture(module, [InputSpec(shape=(4, 240, 240))])
    spread = grid((4, 240, 240), [[1.0], [1.0] * 12, [1.0] * 12], range(144))
    plan = plan_for(
        graph,
        {str(index): spread for index in range(12)},
        batch=64,
        loss="",
        cluster=uniform("large", MACHINE, 144),
    )
    document = encode(plan)
    assert len(document) < 100_000
    assert decode(document) == plan


def test_saving_replaces_whole_files_only(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan_of().save(path)
    with pytest.raises(StorageError, match="cannot write"):
        plan_of().save(tmp_path / "nowhere" / "plan.json")
    plan_of(batch=64).save(path)
    assert load(path).batch == 64


@pytest.mark.parametrize(
    ("batch", "loss", "graph", "cluster", "message"),
    [
        (64, "mse", GRAPH, CLUSTER, "the batch is 32 in the plan and 64 here"),
        (32, "l1", GRAPH, CLUSTER, "the loss is 'mse' in the plan and 'l1' here"),
        (
            32,
            "mse",
            graph_of(size=5),
            CLUSTER,
            "input 'input' is [2, 6, 6] in the plan and [2, 5, 5] here",
        ),
        (
            32,
            "mse",
            graph_of(channels=5),
            CLUSTER,
            f"the layer graph's fingerprint is '{GRAPH.fingerprint}' in the plan and '",
        ),
        (32, "mse", GRAPH, CLUSTER.first(3), "the number of machines is 4 in the plan and 3 here"),
        (
            32,
            "mse",
            GRAPH,
            uniform("attic", MACHINE, 4),
            f"the cluster is 'lab ({CLUSTER.fingerprint})' in the plan and 'attic (",
        ),
    ],
)
def test_a_plan_is_rejected_for_another_job(
    batch: int, loss: str, graph: LayerGraph, cluster: Cluster, message: str
) -> None:
    with pytest.raises(GraphError, match=re.escape(message)):
        plan_of().check(graph, batch=batch, loss=loss, cluster=cluster)


def test_all_differences_are_reported_at_once() -> None:
    graph = graph_of(loss="one_vs_all")
    with pytest.raises(GraphError) as caught:
        plan_of().check(graph, batch=64, loss="one_vs_all", cluster=CLUSTER)
    text = str(caught.value)
    assert "the loss is 'mse' in the plan and 'one_vs_all' here; the batch" in text
    assert "input 'targets' is [8] in the plan and [] here" in text
    assert "Plan again" in text


def test_an_input_more_or_less_is_named() -> None:
    plan = plan_of(inputs={"input": (2, 6, 6), "mask": (3,)})
    with pytest.raises(GraphError) as caught:
        plan.check(GRAPH, batch=32, loss="mse", cluster=None)
    assert "input 'mask' is [3] in the plan and absent here" in str(caught.value)
    assert "input 'targets' is absent in the plan and [8] here" in str(caught.value)


def test_a_plan_fits_a_larger_cluster_that_begins_alike() -> None:
    larger = uniform("whole lab", MACHINE, 9, latency=1e-4)
    plan_of().check(GRAPH, batch=32, loss="mse", cluster=larger)


def test_without_a_cluster_none_is_compared() -> None:
    plan_of().check(GRAPH, batch=32, loss="mse", cluster=None)


def test_statistics_of_the_batch_are_not_cut_into_micro_batches() -> None:
    """The planner makes no such plan; one was once accepted and computed other numbers."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    graph = append_loss(capture(model, [InputSpec(shape=(4,))]), "mse")
    placements = {
        layer.name: Placement.whole(len(layer.shape), 0)
        for layer in graph.layers
        if layer.kind != INPUT
    }
    plan = plan_for(graph, placements, batch=8, loss="mse", cluster=CLUSTER)
    cut = msgspec.structs.replace(plan, micro_batches=2)
    with pytest.raises(GraphError, match=r"micro_batches is 2 .*statistics of"):
        cut.check(graph, batch=8, loss="mse", cluster=CLUSTER)


def test_missing_and_unknown_layers_are_named() -> None:
    placements = {**PLACEMENTS, "conv9": PLACEMENTS["loss"]}
    del placements["2"]
    text = "layer 'conv9' is 'placed' in the plan and absent here; layer '2' is absent in the plan"
    with pytest.raises(GraphError, match=text):
        plan_for(GRAPH, placements, batch=32, loss="mse", cluster=CLUSTER)
    with pytest.raises(GraphError, match="layer 'loss' is absent in the plan and 'placed' here"):
        plan_for(GRAPH, {}, batch=32, loss="mse", cluster=CLUSTER)
    inputs = {**PLACEMENTS, "input": Placement.whole(3, 0)}
    with pytest.raises(GraphError, match="layer 'input' is 'placed' in the plan and absent here"):
        plan_for(GRAPH, inputs, batch=32, loss="mse", cluster=CLUSTER)


def test_some_of_many_missing_layers_are_named() -> None:
    unknown = {f"x{index}": Placement.whole(0, 0) for index in range(9)}
    with pytest.raises(
        GraphError, match="layer 'x5' is 'placed' in the plan and absent here; 3 more differences"
    ):
        plan_for(GRAPH, PLACEMENTS | unknown, batch=32, loss="mse", cluster=CLUSTER)


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        (Placement(cuts=((), (3,)), machines=(0, 1)), "has 3 dimensions, but"),
        (Placement(cuts=((), (3,), ()), machines=(0,)), "cut into 2 cells"),
        (Placement(cuts=((), (9,), ()), machines=(0, 1)), "cuts must ascend"),
        (Placement(cuts=((), (-1,), ()), machines=(0, 1)), "cuts must ascend"),
        (
            Placement(cuts=((), (), ()), machines=(0,), combine=Placement.whole(3, 0)),
            "layers of kind 'convolution' have none",
        ),
    ],
)
def test_an_impossible_placement_names_the_layer(placement: Placement, message: str) -> None:
    placements = {**PLACEMENTS, "0": placement}
    with pytest.raises(GraphError, match=f"'0' .*{message}"):
        plan_for(GRAPH, placements, batch=32, loss="mse", cluster=CLUSTER)


def test_recursive_combining_is_rejected() -> None:
    endless = Placement(cuts=(), machines=(0,))
    msgspec.structs.force_setattr(endless, "combine", endless)
    with pytest.raises(GraphError, match="'loss' combines partial sums twice"):
        plan_of(placements={**PLACEMENTS, "loss": endless})


@pytest.mark.parametrize("depth", [2, 100, 100_000])
def test_combining_within_combining_is_rejected(depth: int) -> None:
    nested = b'{"cuts":[],"machines":[3]'
    nested = b',"combine":'.join([nested] * depth) + b"}" * depth
    new = b'{"cuts":[],"machines":[3],"combine":' + nested + b"}"
    with pytest.raises(GraphError, match=r"combines partial sums twice|is not a plan"):
        decode(forged(b'{"cuts":[],"machines":[3]}', new))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"batch": 32', b'"batch": 33'),
        (b'"batch": 32', b'"batch":  32'),
        (b'"machines":[3]', b'"machines":[2]'),
        (b'"version": 1', b'"version": 2'),
    ],
)
def test_an_edited_file_is_rejected(old: bytes, new: bytes) -> None:
    content = encode(plan_of())
    assert old in content
    with pytest.raises(GraphError, match="was edited: its hash"):
        decode(content.replace(old, new))


def test_a_file_cut_off_anywhere_is_rejected() -> None:
    content = encode(plan_of())
    for length in range(len(content) - 2):
        with pytest.raises(GraphError, match="is not a plan, or cut off"):
            decode(content[:length])


@given(st.data())
def test_no_byte_of_the_plan_can_be_changed(data: st.DataObject) -> None:
    content = encode(plan_of())
    place = data.draw(st.integers(content.index(b'"plan": ') + 8, len(content) - 3))
    byte = data.draw(st.integers(0, 255).filter(lambda byte: byte != content[place]))
    with pytest.raises(GraphError):
        decode(content[:place] + bytes([byte]) + content[place + 1 :])


def test_a_plan_of_another_version_says_which() -> None:
    content = with_hash(b'{"version": 2, "something": ["else"]}')
    with pytest.raises(GraphError, match="is a plan of version 2, this program reads"):
        decode(content)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b'"batch": 32', b'"batch": "32"', "Expected `int`, got `str`"),
        (b'"batch": 32', b'"batch": 1e999', "is not a plan"),
        (b'"batch": 32', b'"batch": -1', r"` >= 1 - at `\$\.batch"),
        (b'"micro_batches": 1', b'"micro_batches": 0', r"` >= 1 - at `\$\.micro_batches"),
        (b'"micro_batches": 1', b'"micro_batches": 33', "is 33 in the plan: use at most the bat"),
        (b'"machines":[3]', b'"machines":[4]', "'loss' is placed on machine 4: use 0 to 3"),
        (b'"machines":[3]', b'"machines":[-1]', "'loss' is placed on machine -1: use 0 to 3"),
        (b'"machines":[2,3]', b'"machines":[2,999]', "'2' is placed on machine 999"),
        (b'"batch": 32,', b"", "missing required field `batch`"),
        (b'"batch": 32', b'"batch": 32, "badge": 1', "unknown field `badge`"),
        (b'"machines":[3]', b'"machines":[true]', "Expected `int`, got `bool`"),
        (b'"machines":[3]', b'"machines":[3.5]', "Expected `int`, got `float`"),
        (b'"machines":[3]', b'"machines":null', "Expected `array`, got `null`"),
        (b'"machines":[3]', b'"machines":[%d]' % 10**30, "is no plan|placed on machine"),
        (b'"cuts":[[72]]', b'"cuts":[72]', "Expected `array`, got `int`"),
        (b'"n_machines":4', b'"n_machines":0', r"` >= 1 - at `\$\.cluster\.n_machines"),
        (b'"step_seconds":0.5', b'"step_seconds":null', "Expected `float`"),
        (
            b'"step_seconds":0.5',
            b'"step_seconds":-1',
            r"` >= 0.0 - at `\$\.predicted\.step_seconds",
        ),
        (b'"version": 1', b'"version": "1"', "Expected `int`, got `str`"),
        (b'"placements": {', b'"placements": {"a": 3,', "Expected `object`, got `int`"),
    ],
)
def test_forged_plans_are_rejected_with_a_message(old: bytes, new: bytes, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        decode(forged(old, new))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b'{"sha256": "", "plan": }',
        b'{"sha256": 3, "plan": {}}',
        b'{"plan": {}}',
        b'{"sha256": "x", "plan": {}, "more": 1}',
        b"\xff\xfe\x00",
        b'{"sha256": "\xff", "plan": {}}',
        b"[" * 1_000_000,
        b'{"sha256": "", "plan": ' + b"[" * 1_000_000,
        b'{"sha256": "", "plan": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
        with_hash(b"null"),
        with_hash(b"{}"),
        with_hash(b"[" * 10_000 + b"]" * 10_000),
        with_hash(b'{"version": 1}'),
        encode(plan_of()) + b"{}",
    ],
)
def test_an_invalid_plan_is_rejected(content: bytes) -> None:
    with pytest.raises(GraphError):
        decode(content)


@given(st.binary(max_size=100))
def test_any_bytes_are_rejected(content: bytes) -> None:
    with pytest.raises(GraphError):
        decode(content)
    with pytest.raises(GraphError):
        decode(with_hash(content))


def test_a_huge_file_is_rejected_unread(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    with path.open("wb") as file:
        file.truncate(N_BYTES_MAX + 1)
    with pytest.raises(GraphError, match=f"is larger than {N_BYTES_MAX} bytes"):
        load(path)


def test_an_error_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(b"{}")
    with pytest.raises(GraphError, match=re.escape(f"{path}: is not a plan")):
        load(path)
    with pytest.raises(StorageError, match="cannot read the plan in"):
        load(tmp_path / "other.json")
