"""The chaos report: a timeline of faults and reports, and what was lost or done again."""

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


@final
class IterationCount:
    """Counts iterations that a job with a coordinator has repeated or lost.

    A shard without a backup restarts from a checkpoint, and the job continues from there. The
    coordinator then reports iterations again. A report that is lost is not counted.
    """

    def __init__(self) -> None:
        self.n_again = 0  # reported more than once
        self._last = self._highest = -1  # the first iteration is 0

    @property
    def n_lost(self) -> int:
        """How far the last iteration is behind the highest one."""
        return self._highest - self._last

    def count(self, event: Event) -> None:
        """Count an event of the supervisor."""
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
        return CountingSupervisor(supervisor, self)


@final
class CountingSupervisor:
    """Wraps a supervisor, to count the iterations that are reported to it."""

    def __init__(self, role: Role, iterations: IterationCount) -> None:
        self._role = role
        self._iterations = iterations

    @property
    def accepts(self) -> frozenset[type]:
        return self._role.accepts

    def handle(self, event: Event, now: Seconds) -> Sequence[Action]:
        self._iterations.count(event)
        return self._role.handle(event, now)

    def status(self) -> tuple[str, Mapping[str, float]]:
        return self._role.status()


@final
class ReportLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the timeline."""

    seconds: Seconds
    what: Literal["fault", "report", "end"]
    text: str


@final
class ChaosReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a job under faults."""

    job: str
    seed: int  # the same seed repeats the schedule
    real: bool  # real processes, or virtual time
    horizon: Seconds  # length over which the schedule was laid
    fault_events: tuple[FaultEvent, ...]  # the whole schedule
    lines: tuple[ReportLine, ...]  # ordered by time
    error: str | None  # why the job failed
    exit_code: int  # of the command, as of `distbelief train`
    samples: int
    metric_name: str
    metric: float | None  # held out, at the end
    undisturbed_seconds: Seconds | None  # without faults; None if unknown
    seconds: Seconds
    pushes_applied: int  # a push to all shards counts as one
    pushes_lost: int  # acknowledged, then lost with a shard; a lower bound
    pushes_refused: int  # from earlier incarnations of replicas; a lower bound
    messages_lost: int | None
    restarts: dict[str, int]  # by role
    steps_again: int | None  # computed steps that do not count; None if unknown
    iterations_again: int | None  # reported more than once; None without a coordinator
    iterations_lost: int | None  # how far the job ended behind its highest iteration
    digest: str | None  # of the trace; None of a real run


def report_lines(view: JobView) -> list[ReportLine]:
    """Return the supervisor's reports."""
    return [
        ReportLine(seconds=message.seconds, what="report", text=message.text)
        for message in view.messages
    ]


def end_line(view: JobView, error: str | None) -> ReportLine:
    text = f"failed: {error}" if error else f"ended: {view.stop_reason}"
    return ReportLine(seconds=view.seconds, what="end", text=text)


def in_order(lines: Sequence[ReportLine]) -> tuple[ReportLine, ...]:
    """Return the lines ordered by time; lines of the same time keep their order."""
    return tuple(sorted(lines, key=lambda line: line.seconds))


def restarts_of(view: JobView) -> dict[str, int]:
    """Return the number of restarts of each role that was restarted."""
    return {role.name: role.restarts for role in view.roles if role.restarts}


def rendered(report: ChaosReport) -> RenderableType:
    """Return the report as text for the terminal."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    styles = {"fault": "bold red", "report": "", "end": "bold"}
    marks = {"fault": "x", "report": "", "end": "="}
    for line in report.lines:
        style = styles[line.what]
        table.add_row(
            f"{line.seconds:.2f} s", Text(marks[line.what], style), Text(line.text, style)
        )
    return Group(table, Text(), *(Text(text) for text in _summary(report)))


def _remaining(report: ChaosReport, n_faults: int) -> str:
    text = f"{n_faults} more faults were scheduled after its end"
    if not report.real:
        return text
    return (
        f"{text}: the schedule is for {report.horizon:g} s of training; "
        "--set stop.seconds=N makes it N"
    )


def _summary(report: ChaosReport) -> list[str]:
    lost = [f"{report.pushes_lost:,} acknowledged pushes"]
    if report.iterations_lost is not None:
        lost.insert(0, _iterations(report.iterations_lost))
    if report.messages_lost is not None:
        lost.append(f"{report.messages_lost:,} messages")
    again = [f"{n} x {formatting.role(name)}" for name, n in report.restarts.items()]
    took = formatting.duration(report.seconds)
    if report.undisturbed_seconds is not None:
        took += f", undisturbed {formatting.duration(report.undisturbed_seconds)}"
    metric = formatting.metric(report.metric, report.metric_name)
    n_injected = sum(line.what == "fault" for line in report.lines)
    n_remaining = len(report.fault_events) - n_injected
    lines = [_remaining(report, n_remaining)] if n_remaining else []
    lines += [
        f"Lost: {', '.join(lost)}; {report.pushes_refused:,} pushes rejected as too late",
        f"Repeated: {_steps(report)}; restarted: {', '.join(again) or 'none'}",
        f"Took {took}; {report.samples:,} samples, {report.metric_name} {metric}",
    ]
    replay = f"distbelief chaos JOB.toml --seed {report.seed}"
    if report.real:
        lines.append(f"To repeat the schedule: {replay} --real")
    else:
        digest = (report.digest or "")[:16]
        lines.append(f"To repeat this run exactly: {replay} (trace {digest})")
    return lines


def _steps(report: ChaosReport) -> str:
    if report.iterations_again is not None:
        return _iterations(report.iterations_again)
    if report.steps_again is None:
        return "steps not counted"
    return f"{report.steps_again:,} steps"


def _iterations(n: int) -> str:
    return f"{n:,} iteration{'' if n == 1 else 's'}"
