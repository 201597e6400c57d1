import pytest

from experiments.benchmarks.downpour import CONTESTANTS
from tests.experiments.benchmarks.runs import figures_of


@pytest.mark.soak
@pytest.mark.timeout(180)
def test_every_contestant_trains_and_the_last_line_has_the_ratios() -> None:
    figures = figures_of(
        "downpour", "--small", "--rounds=1", "--seconds=0.7", "--batch-sizes=8"
    )
    for key in ("downpour_bs8", "ddp_bs8", "downpour_over_kept_bs8"):
        assert figures[key] > 0.0
    for name in CONTESTANTS:
        assert figures[f"{name}_bs8_cpu_seconds_per_1000"] >= 0.0
        assert figures[f"{name}_bs8_bytes"] > 0
