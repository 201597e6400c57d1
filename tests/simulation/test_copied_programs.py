"""Programs of rounds on shards with two copies: whichever copy dies, the series goes on."""

from collections import Counter
from dataclasses import replace

import pytest

from distbelief.protocol import AddRows, RowsAdded
from distbelief.protocol.role import Address
from distbelief.simulation.driver import HandledEvent
from distbelief.simulation.faults import CutOff, Kill
from sandblaster.chunks import COORDINATOR
from tests.simulation.copied_programs import KINDS, SHARD, VICTIMS, CopiedRounds, drawn
from tests.simulation.programs import FIRST_OF_FLIGHTS, Which
from tests.simulation.scene import heard, sends
from tests.simulation.test_seeds import chunks, name, play_seeds


FILE = "tests/simulation/test_copied_programs.py"
SMALL = CopiedRounds(n_shards=1, n_replicas=2)


def played(seed: int) -> Counter[str]:
    scene = drawn(seed)
    scene.play()
    return scene.sights


@pytest.mark.parametrize("first", [0, FIRST_OF_FLIGHTS])
def test_whatever_dies_the_bits_are_the_same(first: int) -> None:
    play_seeds(range(first, first + (2 if first else 3)), played, file=FILE, seldom=())


SOAKED = (range(3, 2003), range(FIRST_OF_FLIGHTS + 2, FIRST_OF_FLIGHTS + 1002))


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seeds", [one for some in SOAKED for one in chunks(some, 500)], ids=name)
def test_the_same_for_two_thousand_seeds(seeds: range) -> None:
    play_seeds(seeds, played, file=FILE, seldom=VICTIMS)


# --- what only the primary has ---


def adds(happening: HandledEvent) -> bool:
    return happening.name == SHARD and heard(happening.event, AddRows) is not None


@pytest.mark.parametrize(
    "which",
    [
        "lasso",
        pytest.param("planned lasso", marks=pytest.mark.soak),
        pytest.param("path", marks=pytest.mark.soak),
        "factors",
        "topics",
        pytest.param("topics in flight", marks=pytest.mark.soak),
        "mixing",
    ],
)
def test_the_loss_of_a_host_with_its_shard_costs_no_restart(which: Which) -> None:
    """The series goes on; where blocks keep nothing, also if a worker was on that host."""
    scene = replace(SMALL, which=which)
    moments = scene.moments(adds)
    at = moments[len(moments) // 2] + 1e-6
    kills = [Kill(at=at, role=SHARD)]
    if not scene.program.keeps_state:
        kills.append(Kill(at=at, role=scene.replicas[0], restart_after=0.05))
    again = replace(scene, faults=kills)
    again.play()
    assert [again.cluster.incarnation(one.role) for one in kills] == [2] * len(kills)
    assert again.status(COORDINATOR)["series"] % 4096 == 1


@pytest.mark.each_value
@pytest.mark.parametrize("which", KINDS)
@pytest.mark.parametrize("moment", [2, 9])
def test_a_primary_dies_with_rows_that_only_it_has(which: Which, moment: int) -> None:
    scene = replace(SMALL, which=which)
    at = scene.moments(adds)[moment] + 1e-6
    again = replace(scene, faults=(Kill(at=at, role=SHARD),))
    again.play()
    assert again.cluster.incarnation(SHARD) == 2


def test_rows_are_acknowledged_when_both_copies_have_them() -> None:
    at = SMALL.moments(adds)[4] - 1e-6
    backup = Address("shard-0b")
    cut = CutOff(at=at, a=SHARD, b=backup, seconds=0.05, loses=True)
    scene = replace(SMALL, faults=(cut, Kill(at=at + 0.04, role=SHARD)))
    answered: list[float] = []

    def see(happening: HandledEvent) -> None:
        if happening.name == SHARD and any(sends(happening, RowsAdded)):
            answered.append(scene.now)

    scene.cluster.observe(see)
    scene.play()
    assert not [one for one in answered if at + 1e-3 < one < at + 0.04]


@pytest.mark.parametrize("wait", [0.004, 0.011, 0.018])
def test_the_loss_of_both_copies_is_noticed_in_a_round(wait: float) -> None:
    """No command is due then: a copy that comes back makes the coordinator ask."""
    scene = replace(SMALL, latency_seconds=1e-3, kills=((wait, "both", None),))
    scene.play()
    assert scene.now < 5.0
