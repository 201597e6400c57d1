import pytest
from torch import nn

from experiments.benchmarks.model_parallel import TWO, ratios, turns
from experiments.benchmarks.peers.dtensor import parallel


def test_a_net_that_dtensor_cannot_cut_in_turn_is_refused() -> None:
    even = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 4))
    with pytest.raises(ValueError, match="2 Linear layers"):
        parallel(even, n_ranks=2)


def test_two_machines_have_a_turn_between_any_two_others() -> None:
    taken = list(turns(["torch", TWO, "dtensor"], n_rounds=2))
    assert [(turn.name, turn.core) for turn in taken[:7]] == [
        *((TWO, 0), ("torch", 0), (TWO, 0), ("torch", 1), (TWO, 0)),
        *(("dtensor", 0), (TWO, 0)),
    ]
    assert [(turn.name, turn.core) for turn in taken[7:]] == [
        *((TWO, 1), ("dtensor", 1), (TWO, 1), ("torch", 1), (TWO, 1)),
        *(("torch", 0), (TWO, 1)),
    ]


def test_everybody_is_divided_by_the_turns_beside_his_own() -> None:
    """Of one process the mean over both cores; no other turn has a say."""
    seconds = [1.0, 1.5, 2.0, 4.0, 2.0, 6.0, 4.0]  # the machine becomes slower
    taken = [
        turn._replace(seconds=taken)
        for turn, taken in zip(turns(["torch", TWO, "dtensor"], n_rounds=1), seconds, strict=True)
    ]
    assert ratios(taken) == {"torch": [(1.0 + 2.0) / 2], "dtensor": [2.0]}
