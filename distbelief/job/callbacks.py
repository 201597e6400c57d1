"""Callbacks of a job: the user's functions that see it run, in the supervisor's process.

They see views while replicas work on: of each evaluation, and else a few each second, so several
steps may lie between two calls. A callback that returns True, or raises StopIteration, ends the
job. One that raises another error ends it in order, and its error is raised then.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Final, Self, final

import numpy as np
import torch

from distbelief.core.errors import JobError, RaisedBy, raised_by
from distbelief.supervisor.view import JobView
from distbelief.task.imports import call_factory, named


# Receives a view; returns whether to end the job.
Watch = Callable[[JobView], object]

HOOKS: Final = ("on_step", "on_evaluation", "on_checkpoint", "on_end")
_COUNTS: Final = {
    "on_step": "step",
    "on_evaluation": "n_evaluations",
    "on_checkpoint": "n_checkpoints",
}
_SHOWN: Final = {"on_end": "run"}


@final
class Callbacks:
    """Calls those that have something to hear of."""

    def __init__(self, callbacks: Iterable[object]) -> None:
        self._callbacks = [*callbacks]
        self._before: JobView | None = None
        for each in self._callbacks:
            _check(each)

    def __call__(self, view: JobView) -> bool:
        """Show a view; return whether to end the job."""
        before, self._before = self._before or view, view
        hooks = [h for h, count in _COUNTS.items() if getattr(view, count) > getattr(before, count)]
        answers = [ends for hook in ("__call__", *hooks) for ends in self._call(hook, view)]
        return any(answers)  # all have heard of it

    def end(self, run: object) -> None:
        """The job has ended, and its files are written."""
        with ExitStack() as stack:  # all hear of it, also if one raises
            for each in reversed(self._callbacks):
                stack.callback(list, self._call("on_end", run, [each]))

    def _call(self, hook: str, shown: object, of: Sequence[object] = ()) -> Iterator[bool]:
        """Call this hook of those that have it; yield whether each wants the job to end."""
        for each in of or self._callbacks:
            if not hasattr(each, hook):
                continue
            try:
                yield is_true(getattr(each, hook)(shown))
            except StopIteration:
                yield True
            except BaseException as error:
                error.add_note(RaisedBy(f"callback {_name(each, hook)}"))
                raise


def is_true(answer: object) -> bool:
    """Return whether a callback has answered that the job is to end."""
    if isinstance(answer, np.ndarray | torch.Tensor) and math.prod(answer.shape) == 1:
        answer = answer.item()
    return isinstance(answer, bool | np.bool_) and bool(answer)


def _name(callback: object, hook: str) -> str:
    named = callback if hasattr(callback, "__qualname__") else type(callback)
    name = f"{named.__module__}.{named.__qualname__}"
    return name if hook == "__call__" else f"{name}.{hook}"


def _check(callback: object) -> None:
    names = [name for name in dir(callback) if name.startswith("on_")]
    unknown = [name for name in names if name not in HOOKS]
    if unknown or not (names or callable(callback)) or isinstance(callback, type):
        found = f"has {', '.join(unknown[:3])}" if unknown else "has none of them"
        found = "is a class: call it" if isinstance(callback, type) else found
        raise JobError(
            f"callback {callback!r:.80} {found}: use a function of the job's view, or an object "
            f"with {', '.join(HOOKS[:-1])} or {HOOKS[-1]}"
        )
    for hook in filter(partial(hasattr, callback), ("__call__", *HOOKS)):
        call = callback if hook == "__call__" else getattr(callback, hook)
        _check_hook(call, _name(callback, hook), of=_SHOWN.get(hook, "view"))


def _check_hook(call: object, name: str, *, of: str) -> None:
    if not callable(call):
        raise JobError(f"callback {name} is {call!r:.80}: make it a function of ({of})")
    try:
        signature = inspect.signature(call)
    except ValueError:  # of some functions in C it is unknown
        return
    try:
        signature.bind(None)
    except TypeError as error:
        raise JobError(f"callback {name}{signature} cannot take ({of}): {error}") from None


def named_callbacks(paths: Sequence[str]) -> list[object]:
    """Return what these import paths name; a class is called without arguments."""
    found = [(path, named(path, table="output")) for path in paths]
    return [
        call_factory(path, {}, table="output") if isinstance(each, type) else each
        for path, each in found
    ]


@final
class HeldCallback:
    """A callback whose error ends the job in order, and is raised at the end of a `with` block.

    Until then the callback is not called again: it would probably fail again.
    """

    def __init__(self, watch: Watch) -> None:
        if not callable(watch):
            raise JobError(f"watch is {watch!r}; use a function of the job's view")
        self._watch = watch
        self._error: BaseException | None = None

    def __call__(self, view: JobView) -> bool:
        if self._error is not None:
            return True
        try:
            return is_true(self._watch(view))
        except BaseException as error:  # noqa: BLE001 -- SystemExit, too, can wait
            self._error = error
            return True

    @property
    def reason(self) -> str:
        """Why it ends the job."""
        user = "" if self._error is None else raised_by(self._error)
        if not user:
            return "stopped by the caller"
        return f"{user} raised {type(self._error).__name__}: {self._error}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # It takes precedence over an error of the block, which may follow from it; Python keeps
        # that one as its context.
        if self._error is not None:
            raise self._error
