import pytest

from distbelief.job.trainer import HeldCallback
from distbelief.supervisor.view import JobView


def test_what_a_watcher_raises_ends_the_job_and_is_raised_once_it_has_ended() -> None:
    """It ended all ticks but not the job, and nobody heard of it.

    `RoleRunner` logged "no further ticks": no display, no metrics, no status any more.
    """
    seen: list[int] = []

    def watch(view: JobView) -> bool:
        seen.append(view.samples)
        if view.samples == 2:
            raise StopIteration("enough")  # an error like others: it is `train`'s
        return False

    held = HeldCallback(watch)
    ends: list[bool] = []

    def job() -> None:
        with held:
            ends.extend(held(JobView(samples=n)) for n in (1, 2, 3))

    with pytest.raises(StopIteration, match="enough") as raised:
        job()
    assert ends == [False, True, True]
    assert seen == [1, 2]
    assert raised.traceback[-1].name == "watch"


def test_a_watchers_error_goes_before_that_of_its_job() -> None:
    def watch(_view: JobView) -> bool:
        raise SystemExit(3)

    def job() -> None:
        with HeldCallback(watch) as held:
            held(JobView())
            raise ValueError("no point was found")

    with pytest.raises(SystemExit) as raised:
        job()
    assert isinstance(raised.value.__context__, ValueError)


def test_a_watcher_who_does_not_fail_is_heard_and_the_job_as_it_ends() -> None:
    with HeldCallback(lambda view: view.samples > 1) as held:
        assert [held(JobView(samples=n)) for n in (1, 2)] == [False, True]
    with pytest.raises(ValueError, match="no point"), held:
        raise ValueError("no point was found")
