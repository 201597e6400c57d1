"""Text of others, on the terminal and in logs: none of it moves a cursor or sets a title."""

from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from distbelief.cli.main import app
from distbelief.config.load import parse_job
from distbelief.core import formatting
from distbelief.core.errors import JobFileError
from distbelief.core.writer import log_line
from distbelief.job.run.directory import Status, status_in
from distbelief.job.run_log import RunLog
from distbelief.supervisor.view import JobView, Message, RoleView
from tests.distbelief.jobs import small


ESC = "\x1b]0;owned\x07\x1b[2J"
OTHERS = ("\x9b31m", "\u202egnp.exe", "\x00", "\u2028", "\x08\x08")


@pytest.mark.parametrize("text", [ESC, *OTHERS])
def test_what_terminals_obey_is_replaced(text: str) -> None:
    shown = formatting.plain(f"a{text}b\n\tc")
    assert shown.replace("\n\t", "").isprintable()
    assert shown.startswith("a?")
    assert shown.endswith("b\n\tc")
    assert text not in log_line("host-1", "info", text)


def test_other_languages_stay() -> None:
    for text in ("Grüße aus Köln: 5 µs", "日本語", "naïve\u00a0café", "🎉"):
        assert formatting.plain(text) == text


def test_the_status_of_a_hostile_directory_is_shown_without_its_orders(tmp_path: Path) -> None:
    """`distbelief status` on a directory of somebody else set the title, and cleared the screen."""
    run = tmp_path / f"run{ESC[:6]}"
    run.mkdir()
    (run / "job.toml").write_text("")
    role = RoleView(name=f"replica-0{ESC}", state=ESC, counters={ESC: 1.0}, at=ESC)
    view = JobView(
        error=ESC,
        stop_reason=ESC,
        metric_name=ESC,
        figures={ESC: 1.0},
        roles=(role,),
        messages=(Message(number=1, seconds=0.0, text=ESC, level="warning"),),
    )
    for ended, error in ((True, ESC), (False, None)):
        status = Status(name=ESC, pid=1, written=0.0, view=view, ended=ended, error=error)
        (run / "status.json").write_bytes(msgspec.json.encode(status))
        for option in ([], ["--json"]):
            shown = CliRunner().invoke(app, ["status", str(run), *option])
            assert shown.exit_code == 0, shown.output
            assert "owned" in shown.output
            assert "\x1b]" not in shown.output
            assert "\x07" not in shown.output
    found = status_in((run / "status.json").read_bytes(), run)
    assert found.view.roles[0].name == "replica-0?]0;owned??[2J"


@pytest.mark.parametrize("trained", [0.0, 50.0])
@pytest.mark.parametrize("command", [["status", "--why"], ["forecast"], ["dashboard"]])
def test_what_is_told_of_a_hostile_directory_is_plain(
    tmp_path: Path, command: list[str], trained: float
) -> None:
    """`distbelief status --why` printed the name of a directory whose run had not trained yet."""
    run = tmp_path / f"run{ESC[:6]}"
    run.mkdir()
    (run / "job.toml").write_text(small("nets:make", "nets:data", stop={"accuracy": 0.9}))
    spent = {"spent_computing": trained, "spent_reading": trained, f"waits_{ESC}": trained}
    roles = tuple(
        RoleView(name=f"{name}{ESC}", state=f"waiting for {ESC}", counters=spent)
        for name in ("shard-0", "replica-0", "replica-1")
    )
    view = JobView(metric_name=ESC, roles=roles, samples=100, training_seconds=60.0)
    status = Status(name=ESC, pid=1, written=0.0, view=view, ended=True)
    (run / "status.json").write_bytes(msgspec.json.encode(status))
    options = ["--listen", ESC] if command == ["dashboard"] else []  # it would go on
    for option in ([], ["--json"])[: 1 if options else 2]:
        shown = CliRunner().invoke(app, [*command, str(run), *options, *option])
        assert shown.output
        assert not {"\x1b", "\x07"} & {*shown.output}, shown.output


def test_errors_are_shown_without_them(tmp_path: Path) -> None:
    shown = CliRunner().invoke(app, ["train", str(tmp_path / f"{ESC[:6]}.toml")])
    assert shown.exit_code == 2
    assert "\x1b" not in shown.output


def test_what_a_log_prints_is_plain_too(tmp_path: Path) -> None:
    told: list[str] = []
    log = RunLog(tmp_path / "host.log", "host-1", tell=told.append)
    log.announce(f"rejected: {ESC}")
    assert told == ["rejected: ?]0;owned??[2J"]
    assert "\x1b" not in (tmp_path / "host.log").read_text()


@pytest.mark.parametrize("name", ["a\\u001b[2J", "a\\u0000", "a\\nb", "a\\u202eb"])
def test_no_job_has_a_name_with_control_characters(tmp_path: Path, name: str) -> None:
    job = small("nets:make", "nets:data")
    with pytest.raises(JobFileError, match=r"name = 'a\\.*: wants no control characters"):
        parse_job(f'name = "{name}"\n{job}', path=tmp_path / "job.toml")
