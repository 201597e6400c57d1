import pytest

from tests.experiments.benchmarks.runs import figures_of


@pytest.mark.soak
@pytest.mark.timeout(180)
def test_every_contestant_pushes_and_fetches_and_the_last_line_has_the_ratios() -> None:
    figures = figures_of("parameter_server", "--small", "--rounds=1", "--repetitions=1")
    assert figures["shared_memory_over_floor"] > 0.0
    assert figures["blocks_over_torch_rpc"] > 0.0
    assert figures["zmq_over_torch_rpc"] > 0.0
    assert figures["blocks_over_sockets"] > 0.0
    assert "peak_bytes_per_parameter" in figures
