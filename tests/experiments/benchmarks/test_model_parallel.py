import math

import pytest
from torch import nn

from experiments.benchmarks.peers.dtensor import parallel
from tests.experiments.benchmarks.runs import figures_of


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_everybody_steps_and_the_last_line_has_the_ratios() -> None:
    figures = figures_of(
        *("model_parallel", "--small", "--rounds=1", "--seconds=0.2"),
        *("--parts", "speech_bs64", "speech_bs256", "image"),
    )
    for key in (
        *("speech_bs64", "speech_bs256", "speech_bs256_over_two_threads"),
        *("speech_bs256_over_dtensor", "image"),
    ):
        assert math.isfinite(figures[key])
        assert figures[key] > 0
    assert figures["speech_bs64_2_machines_bytes"] > 0


def test_a_net_that_dtensor_cannot_cut_in_turn_is_refused() -> None:
    even = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 4))
    with pytest.raises(ValueError, match="2 Linear layers"):
        parallel(even, n_ranks=2)
