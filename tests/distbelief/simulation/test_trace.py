"""The trace: the same in every process, short, and printed when a run fails."""

import numpy as np
import pytest
from hypothesis import given

from distbelief.protocol import Failed, Message, Peers, role as rl
from distbelief.simulation.cluster import SimulatedCluster
from distbelief.simulation.machines import ClusterOptions
from distbelief.simulation.trace import TEXT_MAX, SimulationFailed, Trace
from tests.distbelief.protocol.message_strategies import messages
from tests.distbelief.simulation import test_topology
from tests.distbelief.simulation.toys import (
    A,
    B,
    C,
    Counter,
    Echo,
    Pinger,
    Scripted,
    Summer,
    block,
    cluster_of,
    counted,
    from_tester,
    on_start,
    push,
)
from tests.elsewhere import answers
from tests.simulation.random_faults import random_faults


pytestmark = pytest.mark.untraced


D = rl.Address("d")


def busy_run(seed: int) -> SimulatedCluster:
    """Everything at once: messages, work, snapshots, faults."""
    cluster = SimulatedCluster(
        {
            A: lambda _: Pinger(B, 50),
            B: lambda _: Echo(),
            C: lambda _: Summer(seed=seed, n_wanted=50),
            D: lambda _: Pinger(C, 3),
            rl.Address("e"): lambda _: Counter(),
        },
        seed=seed,
        options=ClusterOptions(
            introduce=True, faults=random_faults(seed, (A, B, C), horizon=5.0, intensity=2.0)
        ),
    )
    cluster.run(until=20.0)
    return cluster


def digests() -> list[str]:
    return [busy_run(seed).trace.digest for seed in range(5)]


def test_the_trace_is_the_same_whatever_the_hash_seed() -> None:
    """FoundationDB's check: same seed, same digest, here and in a fresh process."""
    there = answers(
        "tests.distbelief.simulation.test_trace", "t.digests() + t.test_topology.digests()"
    )
    assert there == digests() + test_topology.digests()


def test_only_the_last_lines_of_a_role_are_kept() -> None:
    cluster = cluster_of({A: Scripted()}, options=ClusterOptions(n_lines_kept=3))
    cluster.run()
    for n in range(10):
        cluster.post(A, from_tester(push(n)))
    cluster.run()
    (lines,) = cluster.trace.last().values()
    assert len(lines) == 3
    assert "sequence=9" in lines[-1]


def test_a_failure_shows_the_seed_and_the_last_events_of_every_role() -> None:
    def answer(event: rl.Event, now: rl.Seconds) -> list[rl.Action]:
        assert not isinstance(event, rl.Computed), "the sum is wrong"
        return list(on_start(rl.Compute(name="sum", work=lambda: 3))(event, now))

    cluster = cluster_of({A: Scripted(), B: Scripted(answer)}, seed=41)
    with pytest.raises(SimulationFailed) as caught:
        cluster.run()
    text = str(caught.value)
    assert "seed 41" in text
    assert "b#1 raised AssertionError: the sum is wrong" in text
    started = "Started(incarnation=1, restored=None, unrestored=None)"
    assert [line.split(maxsplit=2) for line in text[text.index("  time") :].splitlines()] == [
        ["time", "role", "event"],
        ["0.000000", "a#1", started],
        ["0.000000", "b#1", started],
        ["0.000000", "a#1", "PeerJoined(peer='b', incarnation=1, host='')"],
        ["0.000000", "b#1", "PeerJoined(peer='a', incarnation=1, host='')"],
        ["0.000000", "b#1", caught.value.last[B][-1].removeprefix("0.0 b#1 ")],
    ]
    assert "Computed(name='sum', result=3, error=None" in caught.value.last[B][-1]


def texts_of(*events: rl.Event) -> list[str]:
    trace = Trace(n_kept=100)
    for event in events:
        trace.event(0.0, B, 1, event)
    return [line.removeprefix("0.0 b#1 ") for line in trace.last()[B]]


def test_texts_of_events_are_short_and_hold_no_addresses() -> None:
    values = np.arange(3, dtype=np.float32)
    assert texts_of(
        rl.Received(sender=A, incarnation=2, message=block(values)),
        rl.TimerFired(name="retry"),
        rl.Computed(name="step", result=(1.5, None, values, {"k": b"v"})),
        rl.Computed(name="step", result=object()),
        rl.Computed(name="step", error=ValueError("no")),
        rl.Persisted(label="00003"),
        rl.Persisted(label="00003", error="disk full"),
        rl.PeerLost(peer=A, incarnation=1, reason="killed"),
        rl.Started(incarnation=2, restored=counted(1)),
    ) == [
        (
            "ParameterBlock(request=1, term=1, block_index=0, clock=0, "
            "values='float32[3]:30c8bc70') from a#2"
        ),
        "TimerFired(name='retry')",
        (
            "Computed(name='step', result=[1.5, None, 'float32[3]:30c8bc70', {'k': b'v'}], "
            "error=None, seconds=0.0, is_note=False)"
        ),
        "Computed(name='step', result='object', error=None, seconds=0.0, is_note=False)",
        (
            "Computed(name='step', result=None, error=\"ValueError('no')\", "
            "seconds=0.0, is_note=False)"
        ),
        "Persisted(label='00003', error=None)",
        "Persisted(label='00003', error='disk full')",
        "PeerLost(peer='a', incarnation=1, reason='killed', for_good=False)",
        (
            "Started(incarnation=2, restored={'label': '00001', 'arrays': {'count': "
            "'int64[1]:a988dff7'}, 'facts': {'what': 'a count'}}, unrestored=None)"
        ),
    ]


def result_text(result: object) -> str:
    (text,) = texts_of(rl.Computed(name="work", result=result))
    return text.removeprefix("Computed(name='work', result=").removesuffix(
        ", error=None, seconds=0.0, is_note=False)"
    )


def test_arrays_of_other_content_have_other_texts() -> None:
    one, two = np.zeros(4), np.zeros(4)
    two[3] = 1e-300
    assert result_text(one) != result_text(two)
    assert result_text(np.float64(0.5)) == "0.5"
    assert result_text(np.zeros(0)) == "'float64[0]:00000000'"
    assert result_text(np.zeros(4)[::2]) == result_text(np.zeros(2))
    assert result_text({"b", "a", "c"}) == "['a', 'b', 'c']"


@given(messages)
def test_every_kind_of_message_can_be_recorded(message: Message) -> None:
    (text,) = texts_of(rl.Received(sender=A, incarnation=1, message=message))
    assert text.startswith(f"{type(message).__name__}(")


def test_the_content_of_a_message_is_part_of_the_digest() -> None:
    digests = set()
    for last in (1.0, 2.0):
        trace = Trace()
        message = block(np.array([0.0, last]))
        trace.event(0.0, B, 1, rl.Received(sender=A, incarnation=1, message=message))
        digests.add(trace.digest)
    assert len(digests) == 2


def test_looking_at_the_digest_does_not_change_it() -> None:
    one, two = Trace(order_only=True), Trace(order_only=True)
    for n in range(40):
        for trace in (one, two):
            trace.note(float(n), B, 1, "-- a note")
        assert one.digest
    assert one.digest == two.digest


def test_long_texts_are_cut_but_still_distinguished() -> None:
    long = "x" * 10_000
    messages = (
        Failed(error=long + "1", culprit_is_job=True),
        Failed(error=long + "2", culprit_is_job=True),
        Peers(entries=()),
    )
    texts = texts_of(*(rl.Received(sender=A, incarnation=1, message=m) for m in messages))
    assert len(set(texts)) == 3
    assert max(len(text) for text in texts) < TEXT_MAX + 20
