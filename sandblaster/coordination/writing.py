"""Writes the journal down, whenever every shard has marked a cut."""

from collections.abc import Sequence
from typing import Final, final

from distbelief.roles import Action, Persist, Persisted, Report, Seconds, SetTimer
from sandblaster.coordination.coordinator_config import CoordinatorConfig
from sandblaster.coordination.course import Course
from sandblaster.coordination.journal import Journal


TIMER: Final = "coordinator:save"


@final
class Writing:
    """The journal of one life on its way to the disk, one cut at a time.

    Args:
        config: Of the coordinator.
        journal: What is written.
        incarnation: Whose.
    """

    def __init__(self, config: CoordinatorConfig, journal: Journal, *, incarnation: int) -> None:
        self._config = config
        self._journal = journal
        self._incarnation = incarnation
        self._saving: int | None = None  # the cut that is being written down

    def if_marked(self, course: Course) -> Sequence[Action]:
        """Write down the cut that every shard has marked by now, if there is one."""
        if course.unsaved is None or course.mark is not None:
            return []
        if self._saving is not None or course.save_error is not None:
            return []
        return self.write(course)

    def write(self, course: Course | None) -> Sequence[Action]:
        """Write it down, unless that is under way."""
        if course is None or course.unsaved is None or self._saving is not None:
            return []
        course.save_error = None
        self._saving = course.unsaved
        snapshot = self._journal.snapshot(incarnation=self._incarnation)
        return [Persist(snapshot=snapshot)]

    def persisted(self, event: Persisted, course: Course | None, now: Seconds) -> Sequence[Action]:
        """It is on disk, or is not."""
        saved, self._saving = self._saving, None
        if course is None or course.unsaved is None:
            return []
        if saved != course.unsaved:  # of a course that was given up
            return [] if course.mark is not None else self.write(course)
        if event.error is not None:
            course.save_error = event.error
            text = f"the journal could not be saved, and will be later: {event.error}"
            retry = SetTimer(name=TIMER, at=now + self._config.retry_seconds_max)
            return [Report(text=text, level="warning"), retry]
        course.unsaved, course.settled = None, max(saved, course.settled)
        self._journal.settle(saved)
        return []
