import numpy as np
import pytest
import torch

from distbelief.core.errors import JobError, raised_by
from distbelief.job.callbacks import Callbacks, HeldCallback, named_callbacks
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


class Listener:
    """Notes what it hears, and ends the job at an evaluation."""

    def __init__(self, *, ends: bool = False) -> None:
        self.heard: list[tuple[str, int]] = []
        self.ends = ends

    def on_step(self, view: JobView) -> None:
        self.heard.append(("step", view.step))

    def on_evaluation(self, view: JobView) -> bool:
        self.heard.append(("evaluation", view.n_evaluations))
        return self.ends

    def on_end(self, run: object) -> None:
        self.heard.append((f"end of {run}", 0))


def test_callbacks_hear_of_what_is_new_since_the_last_view() -> None:
    listener, steps = Listener(ends=True), list[int]()
    callbacks = Callbacks([listener, lambda view: steps.append(view.step)])
    views = [
        JobView(step=7, n_evaluations=3),  # of a former session
        JobView(step=7, n_evaluations=3, n_checkpoints=1),
        JobView(step=9, n_evaluations=3, n_checkpoints=1),
        JobView(step=9, n_evaluations=4, n_checkpoints=1),
    ]
    assert [callbacks(view) for view in views] == [False, False, False, True]
    callbacks.end("run")
    assert listener.heard == [("step", 9), ("evaluation", 4), ("end of run", 0)]
    assert steps == [7, 7, 9, 9]


@pytest.mark.parametrize(
    ("answer", "ends"),
    [
        *(
            (True, True),
            (np.True_, True),
            (torch.ones((), dtype=torch.bool), True),
            (torch.tensor([True]), True),
        ),
        *((np.array([True]), True), (torch.tensor([True, True]), False), (torch.tensor(1), False)),
        *((False, False), (None, False), (3, False), ("no", False)),
    ],
)
def test_only_true_ends_a_job(answer: object, *, ends: bool) -> None:
    assert Callbacks([lambda _view: answer])(JobView()) is ends


class Lightnings:
    def on_train_start(self) -> None: ...

    def on_end(self) -> None: ...


@pytest.mark.parametrize(
    ("callback", "why"),
    [
        (Lightnings(), "has on_train_start: use"),
        (3, "has none of them: use"),
        (Listener, "is a class: call it: use"),
    ],
)
def test_an_object_that_would_hear_nothing_is_refused(callback: object, why: str) -> None:
    with pytest.raises(JobError, match=f"{why} a function of the job's view, or an object with"):
        Callbacks([callback])


class Takes:
    def __call__(self) -> None: ...


class TakesNoRun:
    def on_end(self) -> None: ...


def takes_two(view: JobView, other: object) -> None: ...


@pytest.mark.parametrize(
    ("callback", "why"),
    [
        (Takes(), r"Takes\(\).* cannot take \(view\)"),
        (TakesNoRun(), r"TakesNoRun\.on_end\(\).* cannot take \(run\)"),
        (takes_two, r"takes_two\(view.* cannot take \(view\): missing"),
        (type("Holds", (), {"on_step": 3})(), r"Holds\.on_step is 3: make it a function of \(view"),
    ],
)
def test_a_hook_that_cannot_be_called_is_refused_before_the_job(callback: object, why: str) -> None:
    with pytest.raises(JobError, match=why):
        Callbacks([callback])


def test_stop_iteration_ends_the_job_as_true_does_and_all_hear_of_it() -> None:
    def enough(_view: JobView) -> None:
        raise StopIteration

    seen: list[JobView] = []
    assert Callbacks([enough, seen.append])(JobView())
    assert len(seen) == 1


class Fails:
    def on_evaluation(self, _view: JobView) -> None:
        raise KeyError("mine")


def test_an_error_has_the_name_of_the_callback_that_raised_it() -> None:
    def job() -> None:
        with HeldCallback(Callbacks([Fails()])) as held:
            assert held.reason == "stopped by the caller"
            assert [held(JobView(n_evaluations=n)) for n in (0, 1)] == [False, True]
            name = f"callback {__name__}.Fails.on_evaluation"
            assert held.reason == f"{name} raised KeyError: 'mine'"

    with pytest.raises(KeyError) as raised:
        job()
    assert raised_by(raised.value) == f"callback {__name__}.Fails.on_evaluation"


def test_all_hear_of_the_end_also_if_one_raises() -> None:
    """The first of two trackers could not be reached, and the second was never closed."""
    heard: list[object] = []

    class Broken:
        def on_end(self, run: object) -> None:
            heard.append(self)
            raise OSError(f"no server for {run}")

    class Second:
        def on_end(self, run: object) -> None:
            heard.append(run)

    broken = Broken()
    with pytest.raises(OSError, match="no server for a run") as raised:
        Callbacks([broken, Second()]).end("a run")
    assert heard == [broken, "a run"]
    assert "Broken.on_end" in str(raised.value.__notes__)


def test_callbacks_of_a_job_are_objects_and_classes() -> None:
    here = __name__
    listener, function = named_callbacks([f"{here}:Listener", f"{here}:hears_nothing"])
    assert isinstance(listener, Listener)
    assert function is hears_nothing


def hears_nothing(_view: JobView) -> None: ...
