"""How fast the link to the supervisor is."""

import pytest
from hypothesis import given, strategies as st

from distbelief.cluster.bootstrap import (
    CHUNK_BYTES,
    N_CHUNKS_MAX,
    SECONDS_MAX,
    BandwidthProbe,
    probe_chunk,
)
from distbelief.errors import RemoteProtocolError
from distbelief.protocol import FileRequest


def run(*, bandwidth: float, latency: float = 0.0) -> tuple[BandwidthProbe, float]:
    """Return what is found on such a link, and how long it took."""
    now = 0.0
    probe = BandwidthProbe(begun_at=now)
    asks = probe.ask(now)
    while asks:
        now += latency
        more: list[FileRequest] = []
        for ask in asks:
            now += CHUNK_BYTES / bandwidth
            more = probe.take(probe_chunk(ask.offset), now)
        asks = more
    return probe, now


@given(bandwidth=st.floats(1e5, 1e9), latency=st.floats(0.0, 0.0005))
def test_the_rate_is_that_of_the_link_but_for_its_latency(bandwidth: float, latency: float) -> None:
    probe, seconds = run(bandwidth=bandwidth, latency=latency)
    assert probe.is_over
    assert 0.8 * bandwidth <= probe.rate <= 1.01 * bandwidth
    assert seconds < 1.0


def test_one_gigabit_is_measured_within_a_tenth_of_a_second() -> None:
    probe, seconds = run(bandwidth=1.25e8, latency=2e-4)
    assert probe.rate == pytest.approx(1.25e8, rel=0.02)
    assert seconds < 0.1


def test_a_turn_of_another_program_is_not_the_rate_of_the_link() -> None:
    probe = BandwidthProbe(begun_at=0.0)
    probe.ask(0.0)
    assert probe.take(probe_chunk(0), 0.08)  # a long turn
    probe.take(probe_chunk(CHUNK_BYTES), 0.081)
    assert probe.take(probe_chunk(2 * CHUNK_BYTES), 0.082)
    assert probe.rate == pytest.approx(2 * CHUNK_BYTES / 0.002)
    assert not probe.is_over


def test_a_link_without_an_end_is_asked_for_no_more_than_there_is() -> None:
    probe, _ = run(bandwidth=1e15)
    assert probe.is_over
    with pytest.raises(RemoteProtocolError, match="probe has no chunk"):
        probe_chunk(N_CHUNKS_MAX * CHUNK_BYTES)
    with pytest.raises(RemoteProtocolError, match="probe has no chunk at offset 1"):
        probe_chunk(1)


def test_what_comes_twice_or_out_of_turn_does_not_count() -> None:
    probe = BandwidthProbe(begun_at=0.0)
    probe.ask(0.0)
    assert not probe.take(probe_chunk(CHUNK_BYTES), 0.001)
    assert len(probe.take(probe_chunk(0), 0.001)) == 2
    assert not probe.take(probe_chunk(0), 0.002)
    assert probe.rate == pytest.approx(CHUNK_BYTES / 0.001)


def test_a_link_on_which_something_is_lost_is_given_up() -> None:
    probe = BandwidthProbe(begun_at=5.0)
    probe.ask(5.0)
    assert not probe.is_late(5.0 + SECONDS_MAX)
    assert probe.is_late(5.1 + SECONDS_MAX)
