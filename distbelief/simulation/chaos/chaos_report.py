"""The chaos report: a timeline of faults and reports, and what was lost or done again."""

from collections.abc import Sequence
from typing import Literal, final

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from distbelief.core import formatting
from distbelief.job.run.summary import Summary
from distbelief.protocol import Progress
from distbelief.protocol.role import Event, Received, Seconds
from distbelief.simulation.chaos.schedule import FaultEvent
from distbelief.simulation.forecast.run import first_word
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
        if (
            isinstance(event, Received)
            and isinstance(event.message, Progress)
            and first_word(event.sender) == "coordinator"
        ):
            self._last = event.message.step
            if self._last <= self._highest:
                self.n_again += 1
            self._highest = max(self._highest, self._last)


@final
class ReportLine(msgspec.Struct, frozen=True, kw_only=True):
    seconds: Seconds
    what: Literal["fault", "report", "end"]
    text: str


@final
class ChaosReport(msgspec.Struct, frozen=True, kw_only=True):
    job: str
    seed: int  # the same seed repeats the schedule
    real: bool  # real processes, or virtual time
    horizon: Seconds  # length over which the schedule was laid
    fault_events: tuple[FaultEvent, ...]  # the whole schedule
    error: str | None  # why the job failed
    exit_code: int  # of the command, as of `distbelief train`
    # None if unknown, as in a real run:
    undisturbed_seconds: Seconds | None = None  # without faults
    messages_lost: int | None = None
    steps_again: int | None = None  # computed steps that do not count
    digest: str | None = None  # of the trace
    # The rest is filled in by `completed`:
    lines: tuple[ReportLine, ...] = ()  # ordered by time
    samples: int = 0
    metric_name: str = ""
    metric: float | None = None  # held out, at the end
    seconds: Seconds = 0.0
    pushes_applied: int = 0  # a push to all shards counts as one
    pushes_lost: int = 0  # acknowledged, then lost with a shard; a lower bound
    pushes_refused: int = 0  # from earlier incarnations of replicas; a lower bound
    restarts: dict[str, int] = {}  # by role
    iterations_again: int | None = None  # reported more than once; None without a coordinator
    iterations_lost: int | None = None  # how far the job ended behind its highest iteration


def completed(
    report: ChaosReport,
    view: JobView,
    totals: JobView | Summary,
    *,
    faults: Sequence[ReportLine],
    iterations: IterationCount,
) -> ChaosReport:
    """Return a report with its timeline and `totals`; without a coordinator no iterations count."""
    end = f"failed: {report.error}" if report.error else f"ended: {view.stop_reason}"
    reported = [
        ReportLine(seconds=message.seconds, what="report", text=message.text)
        for message in view.messages
    ]
    lines = [*faults, *reported, ReportLine(seconds=view.seconds, what="end", text=end)]
    counts = any(role.name == "coordinator" for role in view.roles)
    return msgspec.structs.replace(
        report,
        lines=tuple(sorted(lines, key=lambda line: line.seconds)),
        samples=totals.samples,
        metric_name=totals.metric_name,
        metric=totals.metric,
        seconds=totals.seconds,
        pushes_applied=totals.pushes_applied,
        pushes_lost=totals.pushes_lost or 0,  # None only in a resumed run
        pushes_refused=totals.pushes_refused,
        restarts={role.name: role.restarts for role in view.roles if role.restarts},
        iterations_again=iterations.n_again if counts else None,
        iterations_lost=iterations.n_lost if counts else None,
    )


def rendered(report: ChaosReport) -> RenderableType:
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
