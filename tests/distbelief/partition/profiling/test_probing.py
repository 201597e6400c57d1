"""The probe itself; what is done with it is tested with plans (`test_outlook`)."""

from distbelief.partition.profiling import probing


def test_the_probe_is_the_least_of_its_runs() -> None:
    ticks = iter(range(10_000))
    assert probing.seconds(clock=lambda: float(next(ticks)) ** 2) == 1.0
