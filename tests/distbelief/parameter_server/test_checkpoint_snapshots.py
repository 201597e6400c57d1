"""A snapshot restores every bit, or the error names what is wrong with it."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from distbelief.core.errors import StorageError
from distbelief.core.vectors import Vector
from distbelief.parameter_server.checkpoint import ShardState, restore, take
from distbelief.parameter_server.rules import SGD, Adam, Momentum
from distbelief.parameter_server.shard_config import ShardConfig
from distbelief.parameter_server.step_counts import StepCounts
from distbelief.protocol import SessionRecord
from distbelief.protocol.role import Snapshot
from tests.distbelief.parameter_server.pair import CLIENT, OTHER, layout_of


LAYOUT = layout_of(n_shards=2, n_buffers=1)
CONFIG = ShardConfig(index=0, layout=LAYOUT, rule=Adam(learning_rate=0.1))
N = LAYOUT.shard_size(0)


def state_of(seed: int = 0) -> ShardState:
    stream = np.random.default_rng(seed)
    state = CONFIG.rule.state(LAYOUT.n_gradient(0), LAYOUT.dtype)
    return ShardState(
        incarnation=2,
        clock=41,
        values=stream.standard_normal(N),
        state={name: stream.standard_normal(v.size) for name, v in state.items()},
        clients=(
            SessionRecord(
                name=CLIENT,
                incarnation=3,
                watermark=(3 << 32) + 20,
                applied=20,
                samples=640,
                staleness=2,
            ),
            SessionRecord(name=OTHER, incarnation=1),
        ),
        steps=StepCounts(41),
    )


def snapshot_of(state: ShardState | None = None) -> Snapshot:
    return take("00007", state or state_of(), config=CONFIG)


def with_fact(name: str, value: str) -> Snapshot:
    snapshot = snapshot_of()
    return replace(snapshot, facts={**snapshot.facts, name: value})


def without_fact(name: str) -> Snapshot:
    snapshot = snapshot_of()
    facts = {key: value for key, value in snapshot.facts.items() if key != name}
    return replace(snapshot, facts=facts)


@given(st.integers(0, 2**32))
def test_values_rule_state_clock_and_watermarks_come_back_bit_for_bit(seed: int) -> None:
    state = state_of(seed)
    back = restore(snapshot_of(state), config=CONFIG, incarnation=3)
    assert back.values.tobytes() == state.values.tobytes()
    assert back.state.keys() == state.state.keys()
    for name, vector in state.state.items():
        assert back.state[name].tobytes() == vector.tobytes()
    assert back.clock == 41
    assert back.incarnation == 3
    first, second = back.clients
    assert (first.name, first.incarnation) == (CLIENT, 3)
    assert (first.watermark, first.applied) == ((3 << 32) + 20, 20)
    assert (first.samples, first.staleness) == (640, 2)
    assert second.name == OTHER


def test_what_was_pushed_in_parts_is_counted_on() -> None:
    steps = StepCounts.read(np.array([38, 0, 3, 1, 2, 5, 5, 1]), size=N)
    back = restore(snapshot_of(replace(state_of(), steps=steps)), config=CONFIG, incarnation=3)
    assert back.steps.to_wire().tolist() == [38, 0, 3, 1, 2, 5, 5, 1]


def test_of_older_snapshots_every_push_was_whole() -> None:
    back = restore(without_fact("steps"), config=CONFIG, incarnation=3)
    assert back.steps.to_wire().tolist() == [41, 0]


def test_what_is_restored_does_not_share_the_snapshots_memory() -> None:
    snapshot = snapshot_of()
    back = restore(snapshot, config=CONFIG, incarnation=3)
    back.values[:] = 0.0
    assert snapshot.arrays["values"].any()


@pytest.mark.parametrize(
    ("snapshot", "message"),
    [
        (with_fact("format", "other"), "format is 'other'.*another version"),
        (with_fact("layout", "abc"), "layout is 'abc'.*number of shards of its run"),
        (with_fact("index", "1"), "index is '1', not '0'.*another shard"),
        (with_fact("rule", "sgd"), "rule is 'sgd', not 'adam'.*resume with that rule"),
        (with_fact("clock", "-1"), r"facts cannot be read \(.*\$\.clock.*move its file away"),
        (with_fact("clock", "9" * 30), r"facts cannot be read \(.*\$\.clock"),
        (with_fact("incarnation", "nan"), r"facts cannot be read \(.*\$\.incarnation"),
        (with_fact("incarnation", "3"), "count on from it"),
        (with_fact("clients", "{"), "facts cannot be read.*move its file away"),
        (with_fact("clients", '{"a": {"incarnation": -1}}'), "facts cannot be read"),
        (with_fact("steps", "[1"), "facts cannot be read.*move its file away"),
        (with_fact("steps", "[1, 2]"), "facts cannot be read.*not push counts"),
        (with_fact("steps", "[-1, 0]"), "facts cannot be read"),
        (without_fact("clients"), "facts cannot be read .*missing required field `clients`"),
        (without_fact("format"), "format is None, not "),
    ],
)
def test_a_foreign_or_damaged_header_is_named_with_its_mend(
    snapshot: Snapshot, message: str
) -> None:
    with pytest.raises(StorageError, match=f"'00007' of shard 0.*{message}"):
        restore(snapshot, config=CONFIG, incarnation=3)


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("values", np.zeros(N - 1), rf"is \({N - 1},\) of float64, not {N} of"),
        ("values", np.zeros(N, np.float32), "of float32"),
        ("values", np.zeros((1, N)), r"\(1, 128\)"),
        ("values", None, "'values' is missing"),
        ("state.first_moment", None, "is missing|are unknown"),
        ("state.other", np.zeros(3), r"\['state.other'\] are unknown"),
    ],
)
def test_arrays_that_do_not_fit_are_named(name: str, array: Vector | None, message: str) -> None:
    snapshot = snapshot_of()
    state_name = next(key for key in snapshot.arrays if key.startswith("state."))
    key = state_name if name == "state.first_moment" else name
    changed = dict(snapshot.arrays)
    if array is None:
        del changed[key]
    else:
        changed[key] = array
    with pytest.raises(StorageError, match=message):
        restore(replace(snapshot, arrays=changed), config=CONFIG, incarnation=3)


def test_another_rule_does_not_take_this_rules_state() -> None:
    config = replace(CONFIG, rule=Momentum(learning_rate=0.1))
    with pytest.raises(StorageError, match="rule is 'adam', not 'momentum'"):
        restore(snapshot_of(), config=config, incarnation=3)


def test_a_rule_without_state_has_only_values() -> None:
    config = replace(CONFIG, rule=SGD(learning_rate=0.1))
    state = replace(state_of(), state={}, clients=())
    snapshot = take("1", state, config=config)
    assert snapshot.arrays.keys() == {"values"}
    back = restore(snapshot, config=config, incarnation=3)
    assert back.clients == ()


def test_clients_have_any_name() -> None:
    state = replace(state_of(), clients=(SessionRecord(name='a"b\n', incarnation=1),))
    back = restore(snapshot_of(state), config=CONFIG, incarnation=3)
    assert [client.name for client in back.clients] == ['a"b\n']
