"""The probe itself; what is done with it is tested with plans (`test_outlook`)."""

from distbelief.partition.profiling import this_host


def test_the_probe_is_the_median_of_its_runs() -> None:
    """The least of them said that a machine was as fast as ever: 0.75 of a step."""
    ticks = iter(range(10_000))
    n = this_host._N_PROBE_RUNS
    taken = this_host.seconds(clock=lambda: float(next(ticks)) ** 2)
    assert taken == (2 * n - 2) + 1.0  # (2 k + 1)^2 - (2 k)^2 = 4 k + 1, k = 0 ... n - 1
