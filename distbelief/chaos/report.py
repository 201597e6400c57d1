"""What came of breaking a job: a timeline, what was lost, what was done again."""

from collections.abc import Mapping, Sequence
from typing import Literal, final

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from distbelief.chaos.schedule import FaultEvent
from distbelief.core import formatting
from distbelief.forecast.run import first_word
from distbelief.protocol import Progress
from distbelief.roles.role import Action, Event, Received, Role, Seconds
from distbelief.supervisor.view import JobView


# Iterations of a job with a coordinator: which were done again, which were lost.
#
# A shard without a second copy comes back from a snapshot, and all go on from there. So
# the coordinator tells of iterations that it has told of before.


@final
class IterationCount:
    """Counts them by what the supervisor hears; a message that is lost is not counted.

    Attributes:
        n_again: Told of once more.
    """

    def __init__(self) -> None:
        self.n_again = 0
        self._last = self._highest = -1  # the first is told of as 0

    @property
    def n_lost(self) -> int:
        """How many the last one is behind the highest that there was."""
        return self._highest - self._last

    def heard(self, event: Event) -> None:
        """Take note of what the supervisor is told."""
        if (
            isinstance(event, Received)
            and isinstance(event.message, Progress)
            and first_word(event.sender) == "coordinator"
        ):
            self._last = event.message.step
            if self._last <= self._highest:
                self.n_again += 1
            self._highest = max(self._highest, self._last)

    def around(self, supervisor: Role) -> "CountingSupervisor":
        """Return the supervisor as one at whom this listens."""
        return CountingSupervisor(supervisor, self)


@final
class CountingSupervisor:
    """A supervisor of whose iterations count is kept."""

    def __init__(self, role: Role, iterations: IterationCount) -> None:
        self._role = role
        self._iterations = iterations

    @property
    def accepts(self) -> frozenset[type]:
        return self._role.accepts

    def handle(self, event: Event, now: Seconds) -> Sequence[Action]:
        """Return the actions that `event` calls for."""
        self._iterations.heard(event)
        return self._role.handle(event, now)

    def status(self) -> tuple[str, Mapping[str, float]]:
        """Return what it is doing."""
        return self._role.status()


@final
class ReportLine(msgspec.Struct, frozen=True, kw_only=True):
    """One moment of the timeline."""

    seconds: Seconds
    what: Literal["blow", "told", "end"]
    text: str


@final
class ChaosReport(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it.

    Attributes:
        job: Its name.
        seed: By which it happens again.
        real: Whether to processes, or in virtual time.
        horizon: Seconds that the blows were laid over.
        blows: The whole schedule.
        lines: What happened, in order of time.
        error: Why the job failed, if it did.
        exit_code: Of the command: as of `distbelief train`.
        samples: Trained on.
        metric_name: What `metric` is.
        metric: Held out, at the end.
        undisturbed_seconds: How long it takes if nothing breaks; None if unknown.
        seconds: How long it took.
        pushes_applied: In the values of every shard; one, however many shards.
        pushes_lost: Acknowledged, and gone with a shard; at least so many.
        pushes_refused: Too late, of a former life of a replica; at least so many.
        messages_lost: That never arrived; None where nobody counts them.
        restarts: By role.
        steps_again: Steps that were computed and do not count; None if unknown.
        iterations_again: Of a job with a coordinator: told of more than once; None of
            other jobs.
        iterations_lost: Likewise: how far it ended behind where it had been.
        digest: Of the trace; None of a real run.
    """

    job: str
    seed: int
    real: bool
    horizon: Seconds
    blows: tuple[FaultEvent, ...]
    lines: tuple[ReportLine, ...]
    error: str | None
    exit_code: int
    samples: int
    metric_name: str
    metric: float | None
    undisturbed_seconds: Seconds | None
    seconds: Seconds
    pushes_applied: int
    pushes_lost: int
    pushes_refused: int
    messages_lost: int | None
    restarts: dict[str, int]
    steps_again: int | None
    iterations_again: int | None
    iterations_lost: int | None
    digest: str | None


def report_lines(view: JobView) -> list[ReportLine]:
    """Return what the supervisor has told."""
    return [
        ReportLine(seconds=message.seconds, what="told", text=message.text)
        for message in view.messages
    ]


def end_line(view: JobView, error: str | None) -> ReportLine:
    """Return the last line."""
    text = f"failed: {error}" if error else f"ended: {view.stop_reason}"
    return ReportLine(seconds=view.seconds, what="end", text=text)


def in_order(lines: Sequence[ReportLine]) -> tuple[ReportLine, ...]:
    """Return lines by time; of one moment, as they stand."""
    return tuple(sorted(lines, key=lambda line: line.seconds))


def restarts_of(view: JobView) -> dict[str, int]:
    """Return how often each role was restarted, if it was."""
    return {role.name: role.restarts for role in view.roles if role.restarts}


def rendered(story: ChaosReport) -> RenderableType:
    """Return the story for people."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    styles = {"blow": "bold red", "told": "", "end": "bold"}
    marks = {"blow": "x", "told": "", "end": "="}
    for line in story.lines:
        style = styles[line.what]
        table.add_row(
            f"{line.seconds:.2f} s", Text(marks[line.what], style), Text(line.text, style)
        )
    return Group(table, Text(), *(Text(text) for text in _summary(story)))


def _spared(story: ChaosReport, n_blows: int) -> str:
    text = f"{n_blows} more blows were to fall after its end"
    if not story.real:
        return text
    return (
        f"{text}: all lie over {story.horizon:g} s of training; "
        "--set stop.seconds=N lays them over N"
    )


def _summary(story: ChaosReport) -> list[str]:
    lost = [f"{story.pushes_lost:,} acknowledged pushes"]
    if story.iterations_lost is not None:
        lost.insert(0, _iterations(story.iterations_lost))
    if story.messages_lost is not None:
        lost.append(f"{story.messages_lost:,} messages")
    again = [f"{n} x {formatting.role(name)}" for name, n in story.restarts.items()]
    took = formatting.duration(story.seconds)
    if story.undisturbed_seconds is not None:
        took += f", undisturbed {formatting.duration(story.undisturbed_seconds)}"
    metric = formatting.metric(story.metric, story.metric_name)
    n_struck = sum(line.what == "blow" for line in story.lines)
    n_spared = len(story.blows) - n_struck
    lines = [_spared(story, n_spared)] if n_spared else []
    lines += [
        f"Lost: {', '.join(lost)}; {story.pushes_refused:,} pushes refused as too late",
        f"Done again: {_steps(story)}; started again: {', '.join(again) or 'nobody'}",
        f"Took {took}; {story.samples:,} samples, {story.metric_name} {metric}",
    ]
    replay = f"distbelief chaos JOB.toml --seed {story.seed}"
    if story.real:
        lines.append(f"The same blows again: {replay} --real")
    else:
        digest = (story.digest or "")[:16]
        lines.append(f"Exactly the same again: {replay} (trace {digest})")
    return lines


def _steps(story: ChaosReport) -> str:
    if story.iterations_again is not None:
        return _iterations(story.iterations_again)
    if story.steps_again is None:
        return "nobody counts what was computed twice"
    return f"{story.steps_again:,} steps"


def _iterations(n: int) -> str:
    return f"{n:,} iteration{'' if n == 1 else 's'}"
