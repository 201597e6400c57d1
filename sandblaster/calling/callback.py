"""The user's callback: told of each new iteration, and asked whether to end the run."""

from collections.abc import Callable
from typing import final

from distbelief.job.display.view import SupervisorView
from sandblaster.calling.plain import plain
from sandblaster.calling.result import MinimizeResult, interim_result


Callback = Callable[[MinimizeResult], object]
"""Told of progress; returns True, or raises StopIteration, to end the run."""


@final
class CallbackWatch:
    """Watches a job for a callback, which is not called again once it has ended it.

    scipy's minimisers are ended by StopIteration, some of them by True as well.

    Args:
        callback: The user's; what else it raises is left to the caller.
    """

    def __init__(self, callback: Callback) -> None:
        self._callback = callback
        self._iteration: float | None = None
        self._has_ended_it = False

    def __call__(self, view: SupervisorView) -> bool:
        """Tell a new iteration; return whether to end."""
        iteration = view.figures.get("iteration")
        if view.phase != "training" or iteration in {None, self._iteration}:
            return self._has_ended_it
        self._iteration = iteration
        return self._tell(interim_result(view))

    def end(self, result: MinimizeResult) -> None:
        """Tell the last iteration: a short run ends before anybody looks."""
        if result.nit not in {0, self._iteration}:
            self._tell(result)

    def _tell(self, result: MinimizeResult) -> bool:
        if not self._has_ended_it:
            try:
                self._has_ended_it = plain(self._callback(result)) is True
            except StopIteration:
                self._has_ended_it = True
        return self._has_ended_it
