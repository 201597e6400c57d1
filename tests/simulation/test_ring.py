"""The ring over links of every kind: each member ends with the bits of the plain sum.

RA-1 to RA-5 and HV-1 are rules of Gibiansky 2017 and Sergeev & Del Balso 2018; E9: one ring is as
good as one server.
"""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from distbelief.core import vectors
from distbelief.protocol.ring import RingBlock
from distbelief.protocol.role import SUPERVISOR, Address, PeerLost, Seconds
from distbelief.simulation.driver import HandledEvent
from distbelief.simulation.faults import (
    CutOff,
    Delay,
    Drop,
    Duplicate,
    Fault,
    Kill,
    Pause,
    Supersede,
)
from distbelief.simulation.network import Link
from distbelief.worker.ring import CREDIT_BLOCKS, chunk_of
from tests.simulation.jobs import seeds
from tests.simulation.random_faults import message_faults
from tests.simulation.ring_variants import VARIANTS, drawn, play
from tests.simulation.rings import RingScene
from tests.simulation.scene import sends
from tests.simulation.variants import assert_noticed


@pytest.fixture(autouse=True)
def small_blocks() -> Iterator[None]:
    """Send blocks of a few elements, so that a chunk has many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vectors, "BLOCK_BYTES", 64)
        yield


@settings(max_examples=60, deadline=None)
@given(
    n_members=st.integers(1, 6),
    n_elements=st.integers(0, 300),
    dtype=st.sampled_from(["float32", "float64"]),
    seed=st.integers(0, 2**20),
)
def test_ra3_ra5_all_members_end_with_the_bits_of_the_plain_sum(
    n_members: int, n_elements: int, dtype: str, seed: int
) -> None:
    """RA-3, RA-5: fewer elements than members, none at all, one member."""
    scene = RingScene(
        n_members=n_members, n_elements=n_elements, dtype=dtype, n_rounds=3, seed=seed
    )
    scene.finish()
    assert len(scene.results.members[scene.overseer.generation]) == n_members
    assert scene.results.n >= 3 * n_members


def test_e9_two_members_get_the_very_sum_of_the_first_and_the_second() -> None:
    """E9: as a server adds in the order of names, with the same bits."""
    scene = RingScene(n_members=2, n_elements=257)
    scene.finish()
    generation = scene.overseer.generation
    one, other = (scene.contribution(name, generation, 1) for name in scene.names)
    assert scene.results.sums[generation, 1] == (one + other).tobytes()


@pytest.mark.parametrize("n_members", [2, 3, 4, 8])
def test_ra1_ra2_owners_messages_and_bytes_are_those_of_the_papers(n_members: int) -> None:
    """RA-1: member j first has the whole chunk j + 1. RA-2: 2 K (N - 1) / N bytes each way."""
    scene = RingScene(n_members=n_members, n_elements=16 * n_members, n_rounds=1)
    blocks: dict[Address, list[bytes]] = {name: [] for name in scene.names}

    def look(happening: HandledEvent) -> None:
        if happening.name in blocks and scene.overseer.members == scene.names:
            of_generation = scene.overseer.generation
            sent = [
                one for _, one in sends(happening, RingBlock) if one.generation == of_generation
            ]
            blocks[happening.name] += [one.values.tobytes() for one in sent]

    scene.cluster.observe(look)
    scene.finish()
    generation = scene.overseer.generation
    whole = np.frombuffer(scene.results.sums[generation, 1], np.float32)
    for rank, name in enumerate(scene.names):
        sent = blocks[name]  # a block is a chunk
        assert len(sent) == 2 * (n_members - 1)
        assert sum(map(len, sent)) == 2 * whole.nbytes * (n_members - 1) // n_members
        assert scene.member(name).ring.n_bytes >= sum(map(len, sent))
        start, stop = chunk_of(len(whole), n_members, (rank + 1) % n_members)
        assert sent[n_members - 1] == whole[start:stop].tobytes()  # the first of the all-gather


def test_ra4_hv1_different_lengths_are_an_error_on_all_members() -> None:
    """RA-4, HV-1: also those that never see the odd one's vector."""
    scene = RingScene(n_members=5, lengths={Address("replica-3"): 999})
    scene.run_until(lambda: all(scene.member(name).ring.failure for name in scene.names))
    for name in scene.names:
        failure = scene.member(name).ring.failure
        assert failure is not None
        assert "received different lengths" in failure
        assert "999 float32" in failure
        assert "1000 float32" in failure
    scene.wait(60.0)  # nobody tells anybody any more
    n_events = scene.cluster.counts.delivered
    scene.wait(0.2)
    assert scene.cluster.counts.delivered == n_events


def test_ra4_the_error_arrives_over_links_that_lose_messages() -> None:
    scene = RingScene(
        n_members=4,
        lengths={Address("replica-0"): 3},
        faults=[Drop(probability=0.4, at=0.0, seconds=5.0)],
        seed=3,
    )
    scene.run_until(lambda: all(scene.member(name).ring.failure for name in scene.names))


def test_hv1_a_sum_waits_for_the_slowest_member() -> None:
    """HV-1: and the others hold at most what they may have under way."""
    scene = RingScene(n_members=3, n_elements=4000, n_rounds=2)
    late = scene.names[1]
    scene.run_until(lambda: len(scene.overseer.members) == 3)
    scene.pause(late, 20.0)
    scene.wait(15.0)
    held = [len(scene.member(name).ring._early) for name in scene.names]
    assert max(held) <= CREDIT_BLOCKS
    generation = scene.overseer.generation
    assert (generation, 1) not in scene.results.sums
    scene.finish()
    assert (generation, 2) in scene.results.sums


@pytest.mark.parametrize("seed", seeds(10, of=30))
def test_lost_repeated_and_overtaken_messages_change_no_bit(seed: int) -> None:
    stream = np.random.default_rng([seed, 0x51])
    faults = message_faults(stream, horizon=1.0, intensity=4.0)
    scene = RingScene(n_members=2 + seed % 4, n_elements=700, faults=faults, seed=seed)
    scene.finish()


@pytest.mark.parametrize("seed", seeds(12, of=40))
def test_hv3_after_kills_all_begin_anew_and_no_sum_mixes_generations(seed: int) -> None:
    """A death, a restart, and links that lose and delay messages meanwhile."""
    drawn(seed).finish()


@pytest.mark.parametrize("name", VARIANTS)
def test_a_broken_rule_is_noticed(name: str) -> None:
    assert_noticed(name, VARIANTS, play)


def test_a_member_that_was_taken_for_dead_gets_no_further_sum() -> None:
    scene = RingScene(n_members=3, n_rounds=50)
    scene.run_until(lambda: scene.results.n > 20)
    scene.cluster.inject(Supersede(at=scene.now, role=scene.names[1]))
    scene.finish()


def test_a_link_that_is_cut_holds_up_all_and_changes_nothing() -> None:
    one, other = Address("replica-0"), Address("replica-1")
    faults: list[Fault] = [
        CutOff(at=0.01, a=one, b=other, seconds=3.0, loses=True),
        Duplicate(probability=0.5, seconds_max=0.5, seconds=4.0),
        Delay(probability=0.2, seconds_max=0.3, overtaken=True, seconds=4.0),
        Pause(at=0.02, role=other, seconds=1.0),
    ]
    scene = RingScene(n_elements=3000, n_rounds=8, faults=faults)
    scene.finish()
    assert scene.now > 3.0


def test_without_faults_nothing_is_sent_twice() -> None:
    scene = RingScene(n_members=4, n_elements=5000, n_rounds=10)
    scene.finish()
    assert [scene.member(name).ring.n_again for name in scene.names] == [0] * 4


def test_blocks_of_a_chunk_overlap_with_their_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block is passed on as it comes: a round takes about as long as its bytes one way."""
    monkeypatch.setattr(vectors, "BLOCK_BYTES", 1024)
    n_elements, n_members, bytes_per_second = 16_000, 4, 1e6
    scene = RingScene(
        n_members=n_members,
        n_elements=n_elements,
        n_rounds=1,
        rest=0.0,
        link=Link(bytes_per_second=bytes_per_second),
    )
    begun: list[Seconds] = []

    def look(happening: HandledEvent) -> None:
        if scene.overseer.members == scene.names and any(sends(happening, RingBlock)):
            begun.append(scene.now)

    scene.cluster.observe(look)
    scene.finish()
    n_bytes = 2 * 4 * n_elements * (n_members - 1) / n_members
    assert scene.now - begun[0] < 2.0 * n_bytes / bytes_per_second


def test_the_kill_of_one_member_does_not_stop_the_others() -> None:
    scene = RingScene(n_members=3, n_rounds=30)
    scene.run_until(lambda: scene.results.n > 10)
    dead = scene.names[2]
    scene.cluster.inject(Kill(at=scene.now, role=dead))
    scene.wait(1.0)
    scene.cluster.post(SUPERVISOR, PeerLost(peer=dead, incarnation=1, reason="killed"))
    scene.finish()
    assert list(scene.results.members[scene.overseer.generation]) == scene.names[:2]
