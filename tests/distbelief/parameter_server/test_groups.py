"""Groups of a rule: tensors whose names match a pattern have another rule on the shards.

tensor      shape       rule
a.bias      (33,)       "*.bias": momentum
a.weight    (70, 50)    Adagrad
b.bias      (5,)        "b.*": SGD, which comes first
b.weight    (5, 70)     "b.*": SGD
mean        (3,)        a buffer
"""

from collections.abc import Sequence

import msgspec
import pytest
import torch
from torch import nn

import distbelief
from distbelief.core.errors import JobError, StorageError
from distbelief.core.memory import PrivateMemory
from distbelief.graph.region import Region
from distbelief.parameter_server.checkpoint import restore
from distbelief.parameter_server.layout import Layout, PartialView, TensorSpec
from distbelief.parameter_server.policy import ExchangePolicy
from distbelief.parameter_server.rules import (
    SGD,
    Adagrad,
    Adam,
    Momentum,
    UpdateRule,
    check_groups,
    rule_of,
)
from distbelief.parameter_server.shard import Shard
from distbelief.parameter_server.shard_config import ShardConfig
from distbelief.protocol import SaveCheckpoint
from distbelief.protocol.role import Address, PeerJoined, Snapshot
from distbelief.serve.address import by_position
from distbelief.worker.downpour_settings import DownpourSettings
from tests.distbelief.parameter_server.pair import CLIENT, OTHER, TEST, Bench, scatter
from tests.distbelief.parameter_server.test_partial_copies import Pair
from tests.distbelief.serve.loops import Server


SPECS = (
    TensorSpec(name="a.bias", shape=(33,)),
    TensorSpec(name="a.weight", shape=(70, 50)),
    TensorSpec(name="b.bias", shape=(5,)),
    TensorSpec(name="b.weight", shape=(5, 70)),
    TensorSpec(name="mean", shape=(3,), kind="buffer"),
)
FAST = SGD(learning_rate=1.0, weight_decay=0.1)
RULE = Adagrad(
    learning_rate=0.1,
    initial_accumulator=0.5,
    groups={"b.*": FAST, "*.bias": Momentum(learning_rate=0.2)},
)


class Trained:
    """Shards, and two clients that push in turns; the second one holds the weights only."""

    def __init__(self, rule: UpdateRule, *, n_shards: int, shared: bool = True) -> None:
        self.layout = Layout.of(SPECS, n_shards=n_shards)
        self.rule = rule
        memory = PrivateMemory(host="here" if shared else "", poison=True)
        self.bench = Bench(layout=self.layout, memory=memory)
        self.names = [Address(f"shard-{k}") for k in range(n_shards)]
        for name in self.names:
            self.bench.add_shard(name, rule=rule)
        self.bench.add_client(CLIENT)
        weights = [(s.name, Region.of(*s.shape)) for s in SPECS if s.name.endswith("weight")]
        self.bench.add_client(OTHER, view=PartialView(self.layout, weights))
        self.bench.settle()

    def push(self, seed: int, name: Address = CLIENT) -> None:
        stream = torch.Generator().manual_seed(seed)
        pushed = [torch.randn(spec.n_elements, generator=stream) for spec in SPECS]
        if name == OTHER:
            pushed = [pushed[1], pushed[3]]
        self.bench.push_tensors(pushed, pushed, name)
        self.bench.settle()
        assert self.bench.client(name).unacknowledged == 0

    def values(self) -> dict[str, bytes]:
        tensors = [torch.full((spec.n_elements,), torch.nan) for spec in SPECS]
        for k, name in enumerate(self.names):
            scatter(self.layout, k, self.shard(name).values.vector, tensors)
        return {spec.name: one.numpy().tobytes() for spec, one in zip(SPECS, tensors, strict=True)}

    def shard(self, name: Address) -> Shard:
        shard = self.bench.roles[name]
        assert isinstance(shard, Shard)
        return shard

    def saved(self) -> list[Snapshot]:
        for name in self.names:
            self.bench.send(TEST, name, SaveCheckpoint(label="00001"))
            self.bench.settle()
        return self.bench.snapshots


def pushes(trained: Trained, seeds: Sequence[int] = range(6)) -> Trained:
    for seed in seeds:
        trained.push(seed, OTHER if seed % 3 == 1 else CLIENT)
    return trained


@pytest.mark.each_value
@pytest.mark.parametrize("n_shards", [1, 2, 5])
@pytest.mark.parametrize("shared", [True, False])
def test_each_tensor_has_the_bits_of_its_own_rule_alone_on_any_number_of_shards(
    n_shards: int, *, shared: bool
) -> None:
    """E11, DB-13. Names are matched whole, in the order of the groups."""
    own = {"a.bias": 2, "a.weight": 0, "b.bias": 1, "b.weight": 1, "mean": 0}
    alone = [
        pushes(Trained(rule, n_shards=1)).values()
        for rule in (msgspec.structs.replace(RULE, groups={}), *RULE.groups.values())
    ]
    values = pushes(Trained(RULE, n_shards=n_shards, shared=shared)).values()
    assert values == {name: alone[index][name] for name, index in own.items()}


@pytest.mark.parametrize("n_shards", [1, 3])
def test_a_restored_shard_goes_on_with_the_state_of_all_its_rules(n_shards: int) -> None:
    trained = pushes(Trained(RULE, n_shards=n_shards))
    for name, snapshot in zip(trained.names, trained.saved(), strict=True):
        trained.bench.add_shard(name, rule=RULE, restored=snapshot)
        for client in (CLIENT, OTHER):
            trained.bench.deliver(client, PeerJoined(peer=name, incarnation=2))
    trained.bench.settle()
    pushes(trained, range(6, 12))
    assert trained.values() == pushes(Trained(RULE, n_shards=1), range(12)).values()


def test_a_snapshot_of_other_rules_is_refused() -> None:
    """The state of a rule that was another's before would be wrong."""
    trained = pushes(Trained(RULE, n_shards=1))
    [snapshot] = trained.saved()
    swapped = {"b.*": Momentum(learning_rate=0.2), "*.bias": FAST}
    config = ShardConfig(
        index=0, layout=trained.layout, rule=msgspec.structs.replace(RULE, groups=swapped)
    )
    with pytest.raises(StorageError, match=r"rule is 'adagrad; b\.\*=sgd; \*\.bias=momentum', not"):
        restore(snapshot, config=config, incarnation=2)


@pytest.mark.parametrize("shared", [True, False])
def test_two_copies_have_equal_bits(*, shared: bool) -> None:
    """E12: a backup that syncs in blocks applies each push to the part that it has."""
    rule = Adam(learning_rate=0.1, groups={"z": Momentum(learning_rate=0.2)})
    pair = Pair(shared=shared, rule=rule)
    order = [Address(n) for n in ("left", "whole", "middle", "right")]
    for seed, name in enumerate(order):
        pair.push(name, seed)
    pair.follow()
    pair.assert_equal()
    for seed, name in enumerate(order * 2):
        pair.push(name, 10 + seed)
    pair.assert_equal()
    assert set(pair.b.shard.values.state) == {"mean", "mean_square", "velocity"}
    assert all(vector.any() for vector in pair.b.shard.values.state.values())


def test_a_pattern_that_fits_no_parameter_is_refused_with_the_nearest_name() -> None:
    names = [spec.name for spec in SPECS if spec.kind == "parameter"]
    check_groups(RULE, names)
    wrong = SGD(learning_rate=0.1, groups={"a.baas": FAST})
    with pytest.raises(ValueError, match=r"'a\.baas', and no parameter's name .* 'a\.bias'"):
        check_groups(wrong, names)


def test_groups_have_no_groups() -> None:
    with pytest.raises(ValueError, match="groups of its own: use one without"):
        SGD(learning_rate=0.1, groups={"*": RULE})


def test_a_group_with_momentum_is_refused_where_a_rule_with_momentum_is() -> None:
    rule = SGD(learning_rate=1.0, groups={"*.bias": Momentum(learning_rate=1.0)})
    policy = ExchangePolicy(send="delta")
    policy.refuse(rule, inner=True, workers=1)
    with pytest.raises(
        ValueError, match=r"'momentum', .* deltas of 2 .* n_pushes = 2 .*, or a round"
    ):
        policy.refuse(rule, inner=True, workers=2)


def test_local_steps_between_fetches_need_a_rate_where_there_are_several() -> None:
    rule = SGD(learning_rate=0.1, groups={"*": FAST})
    with pytest.raises(ValueError, match=r"n_fetch is 2 and rule 'sgd' has groups; .* give local_"):
        DownpourSettings(loss="mse", batch_size=4, rule=rule, n_fetch=2)
    assert DownpourSettings(loss="mse", batch_size=4, rule=rule, n_push=2).rate(0) == 0.0


# ------------------------------------------------------------------- in one's own loop


def test_a_server_matches_the_names_of_named_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Linear(3, 2)
    rule = by_position(
        SGD(learning_rate=1.0, groups={"bias": SGD(learning_rate=0.0)}),
        [name for name, _ in net.named_parameters()],
    )
    before = [one.detach().clone() for one in net.parameters()]
    server = Server(list(net.parameters()), rule=rule)
    optimizer = server.optimizer(monkeypatch, net.parameters())
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.finish()
    moved = [one - other for one, other in zip(before, net.parameters(), strict=True)]
    torch.testing.assert_close(moved, [torch.ones(2, 3), torch.zeros(2)])


def test_groups_of_parameters_without_names_are_refused() -> None:
    net = nn.Linear(3, 2)
    rule = SGD(learning_rate=1.0, groups={"bias": SGD(learning_rate=0.0)})
    with pytest.raises(JobError, match=r"'bias', and the parameters have no names: .* net\.named_"):
        distbelief.ParameterServer(net.parameters(), rule=rule)
    with pytest.raises(JobError, match="'bias', and no parameter's name is like that"):
        distbelief.ParameterServer(list(net.named_parameters())[:1], rule=rule)
    distbelief.ParameterServer(net.named_parameters(), rule=rule)


def test_every_parameter_has_one_rule() -> None:
    rules = [rule_of(RULE, spec.name) for spec in SPECS[:4]]
    assert [one.name for one in rules] == ["momentum", "adagrad", "sgd", "sgd"]
