"""Which machines are faster for a job."""

from hypothesis import given, strategies as st

from distbelief.cluster.host_table import StepTime


FAST, SLOW = 80e9, 20e9  # FLOP/s
GIGABIT, TENTH = 1.25e8, 1.25e7  # bytes/s


def test_a_large_batch_goes_by_the_processor_and_a_small_one_by_the_link() -> None:
    for batch, is_processor in ((4096, True), (16, False)):
        step = StepTime(operations=6.0 * batch, n_bytes=8.0)
        quick = step.grade(flops=FAST, bandwidth=TENTH)
        near = step.grade(flops=SLOW, bandwidth=GIGABIT)
        assert quick is not None
        assert near is not None
        assert (quick < near) == is_processor


def test_hosts_that_hardly_differ_are_alike() -> None:
    step = StepTime(operations=6.0 * 256, n_bytes=8.0)
    grades = {step.grade(flops=FAST * f, bandwidth=GIGABIT) for f in (0.99, 1.0, 1.01)}
    assert len(grades) == 1


def test_an_unmeasured_host_has_no_grade() -> None:
    step = StepTime(operations=6.0, n_bytes=8.0)
    assert step.grade(flops=0.0, bandwidth=GIGABIT) is None
    assert step.grade(flops=FAST, bandwidth=0.0) == StepTime(operations=6.0).grade(
        flops=FAST, bandwidth=GIGABIT
    )


@given(flops=st.floats(0.0, 1e18), bandwidth=st.floats(0.0, 1e18))
def test_any_reported_speed_gives_a_grade(flops: float, bandwidth: float) -> None:
    """5e-324 operations a second took infinitely long, and the supervisor down."""
    grade = StepTime(operations=6.0, n_bytes=8.0).grade(flops=flops, bandwidth=bandwidth)
    assert (grade is None) == (flops == 0.0)
