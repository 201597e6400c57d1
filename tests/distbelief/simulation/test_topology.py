"""Network cards and switches that flows share."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from distbelief.protocol import PushBlock
from distbelief.protocol.role import Address, Received, Send
from distbelief.simulation.cpu import Processor
from distbelief.simulation.faults import Kill
from distbelief.simulation.machines import ClusterOptions, SimulatedMachine
from distbelief.simulation.network import Card, Ports, SwitchedNetwork, Uplink
from distbelief.simulation.trace import SimulationFailed
from tests.distbelief.simulation.toys import A, B, C, Scripted, cluster_of, heartbeat, on_start


D = Address("d")
RATE = 1e6
BLOCK = 100_000  # bytes: 0.1 s


def fabric(**rates: float) -> SwitchedNetwork:
    cards = {name: Card(bytes_per_second=RATE) for name in "abcd"}
    cards |= {name: Card(bytes_per_second=rate) for name, rate in rates.items()}
    return SwitchedNetwork(cards=cards)


def options(of: SwitchedNetwork) -> ClusterOptions:
    machines = {name: SimulatedMachine(host=name, jitter=0.0) for name in (A, B, C, D)}
    return ClusterOptions(introduce=True, machines=machines, fabric=of)


def block(sequence: int) -> PushBlock:
    return PushBlock(
        sequence=sequence, term=1, block_index=0, values=np.zeros(BLOCK // 4, np.float32)
    )


def played(
    sends: Mapping[Address, list[Send]], opts: ClusterOptions
) -> dict[Address, list[tuple[float, str]]]:
    """Return what arrived at each, and when."""
    roles = {name: Scripted(on_start(*sends.get(name, ()))) for name in (A, B, C, D)}
    cluster = cluster_of(roles, options=opts)
    cluster.run()
    return {
        name: [
            (now, event.sender)
            for now, event in role.seen
            if isinstance(event, Received) and isinstance(event.message, PushBlock)
        ]
        for name, role in roles.items()
    }


def to(receiver: Address, n: int) -> list[Send]:
    return [Send(receiver=receiver, message=block(i + 1)) for i in range(n)]


def test_a_card_alone_is_as_fast_as_its_slower_end() -> None:
    times = [t for t, _ in played({A: to(B, 10)}, options(fabric(b=RATE / 2)))[B]]
    assert times[-1] == pytest.approx(2.0, rel=0.01)


def test_flows_of_one_card_share_it() -> None:
    """What was sent to B first does not hold up what goes to C: both take about 2 s."""
    seen = played({A: [*to(B, 10), *to(C, 10)]}, options(fabric()))
    assert seen[B][-1][0] == pytest.approx(1.95, rel=0.01)
    assert seen[C][-1][0] == pytest.approx(2.0, rel=0.01)
    assert seen[C][0][0] < 0.35


@pytest.mark.parametrize("n_large", [1, 2, 4])
def test_a_flow_of_smaller_messages_has_its_share(n_large: int) -> None:
    """A flow of large messages had most of a card: what a replica's ranks send waited for pushes.

    A step was foretold to take 0.48 s, and took 0.36 s.
    """
    large = PushBlock(
        sequence=1, term=1, block_index=0, values=np.zeros(10 * BLOCK // 4, np.float32)
    )
    others = [Send(receiver=to, message=large) for to in (C, D)] * 2
    seen = played({A: [*others[:n_large], *to(B, 2)]}, options(fabric()))
    n_flows = 1 + min(n_large, 2)
    assert seen[B][-1][0] == pytest.approx(0.2 * n_flows, rel=0.3)


def test_flows_that_begin_together_end_together() -> None:
    """Also if each is one large message, as over TCP; in turns of whole messages B has it in 1 s.

    Four replicas that fetched a model of one block at once were foretold an order in which none
    waited for another: 0.26 s for a step that took 0.5.
    """
    large = PushBlock(
        sequence=1, term=1, block_index=0, values=np.zeros(10 * BLOCK // 4, np.float32)
    )
    seen = played({A: [Send(receiver=to, message=large) for to in (B, C)]}, options(fabric()))
    assert seen[B][-1][0] == pytest.approx(1.94, rel=0.01)
    assert seen[C][-1][0] == pytest.approx(2.0, rel=0.01)


def test_flows_into_one_card_share_it() -> None:
    """Three senders, one receiver: 30 blocks take 3 s, and nobody waits for the end."""
    seen = played({name: to(D, 10) for name in (A, B, C)}, options(fabric()))[D]
    assert seen[-1][0] == pytest.approx(3.0, rel=0.02)
    last = {sender: t for t, sender in seen}
    assert min(last.values()) > 2.7


def test_no_rate_is_above_that_of_any_port() -> None:
    """A and B send to C and D through an uplink of half their rate: 4 s."""
    of = fabric()
    of = replace(of, uplinks=(Uplink(hosts=frozenset("ab"), bytes_per_second=RATE / 2),))
    seen = played({A: to(C, 10), B: to(D, 10)}, options(of))
    assert seen[C][-1][0] == pytest.approx(4.0, rel=0.06)
    assert seen[D][-1][0] == pytest.approx(4.0, rel=0.06)
    within = played({A: to(B, 10)}, options(of))[B]
    assert within[-1][0] == pytest.approx(1.0, rel=0.02)  # not through the uplink


def test_a_slow_link_is_the_bottleneck_of_its_pair() -> None:
    of = replace(fabric(), links={("a", "b"): RATE / 10})
    seen = played({A: [*to(B, 2), *to(C, 2)]}, options(of))
    assert seen[B][-1][0] == pytest.approx(2.0, rel=0.02)
    assert seen[C][-1][0] < 0.5


def test_small_messages_slip_in_between_but_keep_their_order() -> None:
    beat = heartbeat("well")
    sends = [*to(B, 5), Send(receiver=C, message=beat), Send(receiver=B, message=beat)]
    roles = {name: Scripted() for name in (A, B, C, D)}
    roles[A] = Scripted(on_start(*sends))
    cluster_of(roles, options=options(fabric())).run()
    assert [now < 0.01 for now, e in roles[C].seen if isinstance(e, Received)] == [True]
    messages = [e.message for _, e in roles[B].seen if isinstance(e, Received)]
    assert [type(m).__name__ for m in messages] == ["PushBlock"] * 5 + ["Heartbeat"]


@pytest.mark.parametrize("narrow", ["card", "far card", "link"])
def test_a_narrow_link_is_full_of_small_messages_too(narrow: str) -> None:
    """At 1 kbit/s 95 kB passed in 23 s: small ones did not even wait for each other."""
    rate, n = 125.0, 20
    of = fabric(**{"card": {"a": rate}, "far card": {"b": rate}}.get(narrow, {}))
    if narrow == "link":
        of = replace(of, links={("a", "b"): rate})
    roles = {name: Scripted() for name in (A, B, C, D)}
    beats = [Send(receiver=B, message=heartbeat("well")) for _ in range(n)]
    roles[A] = Scripted(on_start(*beats))
    roles[C] = Scripted(on_start(*to(B, 1)))
    cluster = cluster_of(roles, options=options(of))
    cluster.run()
    seconds = cluster.traffic.between(A, "") / rate
    times = [t for t, e in roles[B].seen if isinstance(e, Received) and e.sender == A]
    assert np.diff(times) == pytest.approx([seconds / n] * (n - 1), rel=0.01)
    assert times[-1] == pytest.approx(seconds, rel=0.06)
    if narrow != "far card":  # what waits elsewhere does not block it
        (block_at,) = [t for t, e in roles[B].seen if isinstance(e, Received) and e.sender == C]
        assert block_at == pytest.approx(BLOCK / RATE, rel=0.1)


def test_what_waits_for_its_card_dies_with_its_sender() -> None:
    opts = replace(options(fabric()), faults=(Kill(at=0.45, role=A),))
    assert len(played({A: to(B, 10)}, opts)[B]) == 4


def test_bytes_are_counted_for_each_pair() -> None:
    roles = {name: Scripted() for name in (A, B, C, D)}
    roles[A] = Scripted(on_start(*to(B, 3), *to(C, 1)))
    cluster = cluster_of(roles, options=options(fabric()))
    cluster.run()
    traffic = cluster.traffic
    assert traffic.messages == 4
    assert 3 * BLOCK < traffic.between("a", "b") < 3 * BLOCK + 3 * 150
    of_both = traffic.between("a", "b") + traffic.between("a", "c")
    assert traffic.n_bytes == traffic.between(A, "") == of_both


def test_a_host_reaches_itself_without_its_card() -> None:
    ports = Ports(fabric())
    assert ports.between("a", "a") == ports.between("a", "elsewhere") == ()


def test_each_message_takes_its_receiver_some_time() -> None:
    """One after the other: 10 small messages at once, 0.1 s each."""
    machine = SimulatedMachine(host="", handling_seconds=0.1, handling_bytes_per_second=1e9)
    seen = played({A: to(B, 10)}, ClusterOptions(introduce=True, machine=machine))[B]
    steps = np.diff([t for t, _ in seen])
    assert steps == pytest.approx([0.1] * 9, rel=0.01)


def digest(**more: object) -> str:
    opts = replace(options(fabric()), **more)  # type: ignore[arg-type] # many types
    opts = replace(opts, processors={"a": Processor(cores=1, bytes_per_second=1e9)})
    roles = {name: Scripted(on_start(*to(D, 5))) for name in (A, B, C)}
    cluster = cluster_of({**roles, D: Scripted()}, options=opts)
    cluster.run()
    return cluster.trace.digest


def digests() -> list[str]:
    """Of shared cards, encoded or passed on: `test_trace` compares processes."""
    return [digest(), digest(trace="order"), digest(trace="order", codec=False)]


def test_both_kinds_of_post_have_the_same_times() -> None:
    whole, order, passed = digests()
    assert whole != order == passed


def test_a_trace_of_the_order_has_the_last_events_of_each_role() -> None:
    opts = replace(options(fabric()), trace="order", n_lines_kept=2)
    roles = {A: Scripted(on_start(*to(D, 5))), D: Scripted()}
    cluster = cluster_of(roles, options=opts)
    cluster.run()
    lines = cluster.trace.last()[D]
    assert [line.split(" ", 1)[1] for line in lines] == ["d#1 PushBlock from a#1"] * 2
    assert "PushBlock from a#1" in cluster.trace.table()
    opts = replace(opts, faults=(Kill(at=0.01, role=D),))
    cluster = cluster_of(roles, options=opts)
    with pytest.raises(SimulationFailed, match="lost, from a: no such process"):
        cluster.run_until(lambda: False)
