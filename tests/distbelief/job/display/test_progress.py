import datetime as dt
import io
import math
import re
import threading

import pytest
from hypothesis import example, given, strategies as st
from msgspec.structs import replace
from rich.console import Console

from distbelief.core import formatting
from distbelief.job.display.progress import ProgressLine, WaitProgress, local_time
from distbelief.job.display.screen import Screen, spark
from distbelief.supervisor.view import HostView, JobView, Message, Point, RoleView


NOON = dt.datetime(2026, 11, 21, 12, 0, tzinfo=dt.UTC)

LOST = Message(
    number=1,
    seconds=70.0,
    text="shard 1 silent for 3.0 s: restarting it from checkpoint 00412",
    level="warning",
)

VIEW = JobView(
    seconds=72.0,
    phase="training",
    samples=305_000,
    total_samples=710_000,
    eta_seconds=101.0,
    progress=0.43,
    samples_per_second=78_912.3,
    loss=2.21,
    metric=0.398,
    held_out_loss=2.34,
    best_metric=0.401,
    staleness_mean=0.93,
    staleness_p95=2.0,
    bytes_in=1_200_000_000,
    bytes_out=34_000_000_000,
    pushes_lost=2,
    roles=(
        RoleView(name="shard-0", state="serving", rate=310.2, last_heartbeat_age=0.2),
        RoleView(name="shard-1", state="restarting", last_heartbeat_age=3.2, restarts=1),
        RoleView(name="replica-0", state="computing", rate=39_400.0, last_heartbeat_age=0.1),
        RoleView(name="replica-1", state="computing", last_heartbeat_age=4.0),
    ),
    history=tuple(
        Point(
            seconds=float(t),
            samples=t,
            loss=4 * math.exp(-t / 30),
            held_out_loss=5 * math.exp(-t / 30),
            metric=0.4 * (1 - math.exp(-t / 25)),
        )
        for t in range(72)
    ),
    messages=(LOST,),
)


def drawn(
    view: JobView, *, width: int = 80, height: int = 40, strip: bool = False, is_past: bool = False
) -> str:
    console = Console(width=width, height=height, file=io.StringIO(), record=True)
    console.print(Screen(view, name="speech-demo", is_past=is_past))
    text = console.export_text()
    return "\n".join(lines_of(text)) + "\n" if strip else text


def lines_of(text: str) -> list[str]:
    return [line.rstrip() for line in text.splitlines()]


# --------------------------------------------------------------------- screen


def test_the_screen_looks_so() -> None:
    flat = replace(
        VIEW,
        held_out_loss=None,
        best_metric=None,
        bytes_in=0,
        bytes_out=0,
        pushes_lost=0,
        messages=(),
        history=tuple(
            Point(seconds=float(t), samples=t, loss=8.0 - t, metric=t / 10) for t in range(8)
        ),
    )
    assert drawn(flat, width=72, strip=True) == SCREEN


SCREEN = """\
speech-demo  training                      1 m 12 s, about 1 m 41 s left
━━━━━━━━━━━━━━━━                        43 %  305,000 of 710,000 samples
78,912 samples/s   staleness mean 0.9, p95 2

held-out accuracy  39.8 %  ▁▂▃▄▅▆▇█
training loss        2.21  █▇▆▅▄▃▂▁

role        state                           rate       heard   restarts
───────────────────────────────────────────────────────────────────────
shard 0     serving                 310 pushes/s   0.2 s ago          0
shard 1     restarting                         -   3.2 s ago          1
replica 0   computing           39,400 samples/s   0.1 s ago          0
replica 1   computing, silent                  -   4.0 s ago          0
"""


def test_the_held_out_loss_has_one_row_if_it_is_the_metric() -> None:
    text = drawn(replace(VIEW, metric_name="loss", metric=2.34, best_metric=2.3))
    assert text.count("held-out loss") == 1
    assert "best 2.30" in text


def test_machines_that_have_joined_are_shown_with_what_they_offer() -> None:
    view = JobView(
        phase="training",
        roles=(RoleView(name="replica-0", state="computing", at="lab-2"),),
        hosts=(
            HostView(
                name="host-1",
                label="lab-2",
                cores=8,
                state="ready",
                memory_bytes=16_000_000_000,
                flops=4.2e10,
                bandwidth=1.17e8,
            ),
            HostView(name="host-2", label="lab-3", cores=2, state="gone"),
        ),
    )
    assert drawn(view, width=72, strip=True).endswith(MACHINES)
    assert "lab-3" not in drawn(view, width=72, height=16)  # roles come first
    assert "lab-3" not in drawn(view, width=63)


MACHINES = """\

host    state   cores    memory       a core   link from here
─────────────────────────────────────────────────────────────
lab-2   ready       8   16.0 GB   42 GFLOP/s         117 MB/s
lab-3   gone        2       0 B            -                -
"""


@pytest.mark.parametrize("width", [20, 34, 40, 50, 63, 64, 80, 100, 200])
def test_no_line_is_wider_than_the_terminal_and_every_role_is_named(width: int) -> None:
    text = drawn(VIEW, width=width)
    assert all(len(line) <= width for line in lines_of(text))
    assert "43 %" in text
    for name in ("shard 0", "shard 1", "replica 0", "replica 1"):
        assert name in text or width < 40


def test_more_roles_than_lines_leave_the_troubled_ones() -> None:
    calm = [RoleView(name=f"replica-{r}", state="computing") for r in range(200)]
    calm[150] = RoleView(name="replica-150", state="restarting")
    view = JobView(roles=tuple(calm))
    lines = lines_of(drawn(view, height=24))
    assert len(lines) <= 24
    assert any(line.startswith("replica 150   restarting") for line in lines)
    assert lines[-1] == "and 188 more"


def test_what_nobody_has_measured_is_not_shown() -> None:
    roles = (RoleView(name="shard-0", state="starting"),)
    text = drawn(JobView(roles=roles))
    assert "None" not in text
    assert "nan" not in text
    for word in ("samples/s", "loss", "accuracy", "staleness", "%"):
        assert word not in text


@pytest.mark.parametrize(
    ("view", "title"),
    [
        (JobView(phase="stopping", stop_reason="1 epoch trained"), "stopping: 1 epoch trained"),
        (JobView(phase="failed", stop_reason="a", error="b"), "failed: b"),
        (JobView(phase="interrupted", stop_reason="Ctrl+C"), "interrupted: Ct"),
        (JobView(phase="saving", stop_reason="1 epoch done"), "saving: 1 epoch"),
        (JobView(phase="resuming", samples=30, progress=0.74), "resuming"),
    ],
)
def test_the_title_says_what_the_job_does(view: JobView, title: str) -> None:
    text = drawn(replace(view, eta_seconds=4.0))
    assert text.startswith(f"speech-demo  {title}")
    assert " left" not in text  # nobody trains


def test_of_a_job_that_was_killed_the_screen_says_what_was() -> None:
    text = drawn(VIEW, is_past=True)
    assert text.startswith("speech-demo  was training")
    assert "was computing" in text
    for word in (" left", " ago", "samples/s"):
        assert word not in text


# ---------------------------------------------------------------------- spark


@given(
    values=st.lists(st.floats(), max_size=200), width=st.integers(0, 60), ascii_only=st.booleans()
)
@example(values=[1.7976931348623157e308, -9.9e291], width=2, ascii_only=False)  # their difference
def test_a_curve_never_exceeds_its_room_nor_fails(
    values: list[float],
    width: int,
    ascii_only: bool,  # noqa: FBT001
) -> None:
    finite = [v for v in values if math.isfinite(v)]
    curve = spark(values, width, ascii_only=ascii_only)
    assert len(curve) == min(width, len(finite))


def test_a_curve_rises_with_its_values_and_is_flat_if_they_are() -> None:
    assert spark([1, 2, 3, 4, 5, 6, 7, 8], 8) == "▁▂▃▄▅▆▇█"
    assert spark([1, 1, 8, 8], 2) == "▁█"
    assert spark([3, 3, 3], 8) == "▅▅▅"
    assert spark([1, 2, 3, 4, 5, 6, 7, 8], 8, ascii_only=True) == "_.-~=+*#"


# ---------------------------------------------------------------- plain lines


def in_a_pipe(*views: JobView, report_every: float = 2.0) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, width=40)
    progress = ProgressLine(
        "demo", console=console, report_every=report_every, time_of_day=lambda: NOON
    )
    progress.start()
    for view in views:
        progress.update(view)
    progress.stop()
    return out.getvalue().splitlines()


def test_in_a_pipe_each_report_is_one_unbroken_line() -> None:
    message, report = in_a_pipe(VIEW)
    assert message == f"11:59:58  {LOST.text}"
    assert report == (
        "12:00:00  training  43 %  305,000 samples  78,912/s  loss 2.21  held-out "
        "accuracy 39.8 %  staleness mean 0.9, p95 2  about 1 m 41 s left"
    )


def test_reports_come_every_few_seconds_and_when_the_phase_changes() -> None:
    def at(seconds: float, samples: int) -> JobView:
        return JobView(seconds=seconds, samples=samples, phase="training")

    lines = in_a_pipe(
        JobView(),
        JobView(seconds=0.5),
        *(at(1.0 + t / 4, t) for t in range(13)),
        JobView(seconds=4.1, phase="stopping", stop_reason="Ctrl+C"),
    )
    assert [line.removeprefix("12:00:00  ") for line in lines] == [
        "starting",
        "training",
        "training  8 samples",
        "stopping: Ctrl+C",
    ]


def test_a_message_is_told_once_at_once_and_without_markup() -> None:
    lines = in_a_pipe(VIEW, VIEW, VIEW, report_every=1000.0)
    assert sum("silent" in line for line in lines) == 1
    message = Message(number=1, seconds=0.0, text="[model] [red]hidden[/red] :smile:")
    assert in_a_pipe(JobView(messages=(message,)))[0].endswith(message.text)


# ------------------------------------------------------------------- terminal


def on_a_terminal(*views: JobView, no_color: bool) -> str:
    out = io.StringIO()
    n_threads = threading.active_count()
    console = Console(
        file=out,
        width=80,
        height=24,
        force_terminal=True,
        color_system="standard",
        no_color=no_color,
    )
    progress = ProgressLine("demo", console=console, time_of_day=lambda: NOON)
    progress.start()
    for view in views:
        progress.update(view)
        assert threading.active_count() == n_threads  # no thread draws
    progress.stop()
    return out.getvalue()


def test_on_a_terminal_messages_stay_and_the_screen_vanishes() -> None:
    out = on_a_terminal(VIEW, VIEW, no_color=False)
    assert out.count("shard 1 silent for 3.0 s") == 1
    assert "\x1b[33m" in out  # a warning is yellow
    assert left_on_terminal(out) == [f"11:59:58  {LOST.text}"]
    assert "\x1b[33m" not in on_a_terminal(VIEW, no_color=True)
    assert local_time().tzinfo is not None


def left_on_terminal(out: str) -> list[str]:
    """Return the lines that stand on a terminal that received `out`."""
    lines, row = [""], 0
    for control, text in re.findall(r"(\x1b\[[0-9;?]*[A-Za-z]|\r|\n)|([^\x1b\r\n]+)", out):
        if text:
            lines[row] += text
        elif control == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif control.endswith("A"):
            row -= int(control[2:-1])
        elif control == "\x1b[2K":
            lines[row] = ""
    return [line.rstrip() for line in lines if line.strip()]


# -------------------------------------------------------------- simulated runs


def waiting(what: str, name: str, *, width: int, terminal: bool = False) -> str:
    """Return what is written about something, and about one run."""
    written = io.StringIO()
    console = Console(file=written, width=width, force_terminal=terminal)
    with pytest.MonkeyPatch.context() as patch, WaitProgress(console, n_runs=1) as progress:
        patch.setattr("distbelief.job.display.progress.LINE_SECONDS", 0.0)
        if what:
            progress.say(what)
        progress.begin(name)
        progress.tell(JobView())
    return written.getvalue()


def test_in_a_pipe_a_run_is_told_in_unbroken_lines_without_markup() -> None:
    """The run of "small[red]" was called "small"; lines came in pieces of 80 characters."""
    said = waiting("hidden [3]", "small[red], seed 0", width=20).splitlines()
    assert said[0] == "hidden [3]"
    assert "small[red], seed 0" in said[1]
    assert len(said) == 2


def test_in_a_pipe_a_short_run_is_not_told() -> None:
    """An empty line came at the end, in the errors of whoever had asked for JSON."""
    written = io.StringIO()
    with WaitProgress(Console(file=written), n_runs=1) as progress:
        progress.begin("small, seed 0")
        progress.end()
    assert not written.getvalue()


def test_on_a_terminal_there_is_a_bar_that_is_taken_away() -> None:
    written = waiting("", "small[red], seed 0", width=80, terminal=True)
    assert "small[red], seed 0" in written
    assert written.endswith("\x1b[2K")


# ---------------------------------------------------------------------- words


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (formatting.duration(0.44), "0.4 s"),
        (formatting.duration(9.96), "10 s"),
        (formatting.duration(59.7), "1 m 00 s"),
        (formatting.duration(491), "8 m 11 s"),
        (formatting.duration(3 * 3600 + 300), "3 h 05 m"),
        (formatting.duration(52 * 3600), "2 d 04 h"),
        (formatting.duration(None), "-"),
        (formatting.size(0), "0 B"),
        (formatting.size(999), "999 B"),
        (formatting.size(1500), "1.5 kB"),
        (formatting.size(26e9), "26.0 GB"),
        (formatting.size(260e9), "260 GB"),
        (formatting.size(2.6e13), "26.0 TB"),
        (formatting.size(None), "-"),
        (formatting.rate(3.44), "3.4"),
        (formatting.rate(78_900.4), "78,900"),
        (formatting.rate(None), "-"),
        (formatting.count(None), "-"),
        (formatting.figure(2.344), "2.34"),
        (formatting.figure(0.01234), "0.0123"),
        (formatting.figure(None), "-"),
        (formatting.metric(0.398, "accuracy"), "39.8 %"),
        (formatting.metric(0.398, "mse"), "0.40"),
        (formatting.metric(None, "mse"), "-"),
        (formatting.speed(None), "-"),
        (formatting.speed(2.5e6), "2.5 MFLOP/s"),
        (formatting.speed(4.2e10), "42 GFLOP/s"),
        (formatting.speed(1.5e12), "1.5 TFLOP/s"),
        (formatting.staleness(None, None), "mean -, p95 -"),
    ],
)
def test_a_figure_in_words(shown: str, text: str) -> None:
    assert shown == text


def test_a_terminal_that_got_narrower_keeps_no_rest_of_the_screen() -> None:
    """It wraps what it shows: the rows above were left behind, one after each resize."""
    file = io.StringIO()
    console = Console(file=file, width=120, height=50, force_terminal=True, color_system=None)
    progress = ProgressLine("job", console=console)
    progress.start()
    progress.update(replace(VIEW, messages=()))
    for width in (70, 70, 50):
        frame = file.getvalue().rpartition("\x1b[2K")[2]
        lines = [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line) for line in frame.split("\n")]
        console.width = width
        file.truncate(file.seek(0))
        progress.update(replace(VIEW, messages=()))
        n_rows = sum(max(1, math.ceil(len(line) / width)) for line in lines)
        assert file.getvalue().count("\x1b[1A") == n_rows - 1
    progress.stop()
