"""Between a coordinator and its supervisor: snapshots asked for, progress told of."""

from collections.abc import Sequence
from typing import Final, final

from distbelief.messages import Progress, Saved
from distbelief.roles import SUPERVISOR, Action, Report, Send
from sandblaster.coordination.course import Course
from sandblaster.coordination.figures import Figures, Wishes


_N_SAVES_MAX: Final = 8


@final
class Supervision:
    """What the supervisor has asked for, and what it is told.

    Args:
        wishes: What was asked for, for courses to see.
        figures: Of all courses.
    """

    def __init__(self, wishes: Wishes, figures: Figures) -> None:
        self._wishes = wishes
        self._figures = figures

    def ask_to_save(self, label: str) -> None:
        """A snapshot of this name is to be taken, at the next accepted point."""
        saves = self._wishes.saves
        if label in saves:
            return
        if len(saves) >= _N_SAVES_MAX:
            error = f"{_N_SAVES_MAX} snapshots wait to be taken already: ask less often"
            self._wishes.saved.append((label, error))
        else:
            saves.append(label)

    def tell(self, course: Course | None) -> Sequence[Action]:
        """Tell what there is to tell."""
        actions: list[Action] = []
        figures, saved = self._figures, self._wishes.saved
        while course is not None and course.progress:
            iterated = course.progress.popleft()
            progress = Progress(
                step=figures.offset + iterated.iteration,
                samples=figures.samples,
                loss=iterated.loss,
                seconds_computing=0.0,
                seconds_waiting=0.0,
            )
            actions.append(Send(receiver=SUPERVISOR, message=progress))
        if course is not None and course.note:
            actions.append(Report(text=course.note, level="warning"))
            course.note = ""
        while saved:
            label, error = saved.popleft()
            message = Saved(label=label, clock=figures.iteration, error=error)
            actions.append(Send(receiver=SUPERVISOR, message=message))
        return actions
