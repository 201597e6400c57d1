"""Pushes of dealt positions: a shard applies each position once."""

import msgspec
import numpy as np
import pytest

from distbelief.core.memory import PrivateMemory
from distbelief.core.spans import NOTHING, Span, Spans
from distbelief.core.vectors import Vector
from distbelief.parameter_server.checkpoint import ShardState, restore, take
from distbelief.parameter_server.layout import Layout, TensorSpec
from distbelief.parameter_server.policy import ExchangePolicy, Round
from distbelief.parameter_server.rules import Momentum, initial_state
from distbelief.parameter_server.shard_config import ShardConfig
from distbelief.parameter_server.step_counts import StepCounts
from distbelief.parameter_server.store import ShardStore
from distbelief.parameter_server.tensor_copies import Pushed
from distbelief.protocol.replication import WHOLE, Share


N = 64
LAYOUT = Layout.of([TensorSpec(name="w", shape=(N,))], n_shards=1)
RULE = Momentum(learning_rate=1.0, momentum=0.5)


def config_of(policy: ExchangePolicy | None = None) -> ShardConfig:
    return ShardConfig(index=0, layout=LAYOUT, rule=RULE, policy=policy or ExchangePolicy())


def state_of(applied: Spans = NOTHING) -> ShardState:
    return ShardState(
        incarnation=1,
        clock=0,
        values=np.zeros(N, np.float32),
        state=initial_state(RULE, LAYOUT, 0),
        clients=(),
        steps=StepCounts(),
        applied=applied,
    )


def store_of(policy: ExchangePolicy | None = None) -> ShardStore:
    store = ShardStore(config_of(policy), memory=PrivateMemory())
    store.publish("values")
    store.vector[:] = 0.0
    store.initialised(state_of())
    return store


def push(
    store: ShardStore, dealt: Span | None, share: Share = WHOLE, *, value: float = 1.0
) -> Vector:
    work, _ = store.begin_push(
        Pushed.of(np.full(N, value, np.float32), store.slice_table.whole),
        n_clients=1,
        share=share,
        dealt=msgspec.UNSET if dealt is None else dealt,
    )
    work()
    store.end_push()
    return store.vector.copy()


@pytest.mark.parametrize("again", [(0, 8), (4, 8), (4, 12), (7, 20)])
def test_a_push_of_positions_that_are_applied_changes_nothing_but_the_clock(again: Span) -> None:
    store = store_of()
    before = push(store, (0, 8))
    velocity = {name: vector.copy() for name, vector in store.state.items()}
    assert (push(store, again) == before).all()
    assert all((store.state[name] == vector).all() for name, vector in velocity.items())
    assert store.clock == 2
    assert store.steps.n_pushes == 1
    assert store.applied == Spans([(0, 8)])
    assert (push(store, (8, 16)) != before).all()
    assert store.applied == Spans([(0, 16)])


def test_pushes_that_name_no_positions_are_applied_as_ever() -> None:
    store = store_of()
    assert (push(store, None) != push(store, None)).all()
    assert store.applied == NOTHING


ROUNDS = ExchangePolicy(staleness=0, round=Round(), weight="mean")
FIRST, LAST = Share(weight=1.0, n_to_follow=1), Share(weight=1.0)


@pytest.mark.parametrize("known", ["first", "last", "both"])
def test_a_round_leaves_out_what_is_applied(known: str) -> None:
    store, other = store_of(ROUNDS), store_of(ROUNDS)
    push(store, (0, 8), LAST)
    push(other, (0, 8), LAST)
    push(store, (0, 8) if known in {"first", "both"} else (8, 16), FIRST)
    found = push(store, (0, 8) if known in {"last", "both"} else (16, 24), LAST)
    if known != "both":
        push(other, (8, 16), LAST)
    assert (found == other.vector).all()
    assert store.applied.n_positions == 8 + 8 * (known != "both")


def test_two_pushes_of_one_round_are_never_of_one_position() -> None:
    store, other = store_of(ROUNDS), store_of(ROUNDS)
    push(store, (0, 8), FIRST)
    found = push(store, (0, 8), LAST, value=3.0)  # no equal value: it would not change the mean
    assert (found == push(other, (0, 8), LAST)).all()


def test_a_round_that_is_dropped_leaves_no_position() -> None:
    store = store_of(ROUNDS)
    push(store, (0, 8), FIRST)
    store.drop_round()
    assert store.applied == NOTHING
    assert push(store, (0, 8), LAST).any()


def test_a_checkpoint_has_the_positions() -> None:
    applied = Spans([(0, 8), (50, 64)])
    snapshot = take("00001", state_of(applied), config=config_of())
    assert restore(snapshot, config=config_of(), incarnation=2).applied == applied
    usual = take("00001", state_of(), config=config_of())
    assert "applied" not in usual.facts  # as before
    assert restore(usual, config=config_of(), incarnation=2).applied == NOTHING
