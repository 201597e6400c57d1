"""The probe itself; its use is tested in `test_api_result`."""

from distbelief.partition.profiling import this_host


def test_the_probe_is_the_median_of_its_runs() -> None:
    """The minimum hid that a machine was shared: steps were predicted at 0.75 of their time."""
    ticks = iter(range(10_000))
    n = this_host._N_PROBE_RUNS
    taken = this_host.seconds(clock=lambda: float(next(ticks)) ** 2)
    assert taken == (2 * n - 2) + 1.0  # (2 k + 1)^2 - (2 k)^2 = 4 k + 1, k = 0 ... n - 1
