import json
import os
import re
import signal
import time
import tomllib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import msgspec
import pytest
import typer
from typer.testing import CliRunner, Result

from distbelief.cli.main import app
from distbelief.cli.options import (
    FAILED,
    INTERRUPTED,
    MISTAKEN,
    reported as reported_command,
    reported_errors,
)
from distbelief.core import files
from distbelief.core.errors import JobError, StorageError
from distbelief.job.launch.forkserver import ONE_THREAD
from distbelief.job.run.directory import RunDirectory, Status
from distbelief.supervisor.view import JobView, RoleView
from tests import elsewhere
from tests.distbelief.jobs import SPEECH


VIEW = JobView(
    seconds=10.0,
    phase="training",
    samples=640,
    roles=(RoleView(name="replica-0", state="computing"),),
)


def command(*arguments: str) -> Result:
    # `train` sets the variables of its process; the runner restores what it is given.
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "100", **ONE_THREAD})


def mistaken(*arguments: str) -> str:
    done = command(*arguments)
    assert done.exit_code == MISTAKEN, done.output
    assert done.stdout == ""
    return done.stderr


@pytest.fixture(autouse=True)
def _in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def a_run(path: str, *, age: float = 0.0, **status: bool | str) -> RunDirectory:
    run = RunDirectory.create(path)
    run.write(run.job_file, SPEECH)
    now = time.clock_gettime(time.CLOCK_REALTIME)
    run.write_status(
        Status(
            name="speech-demo",
            pid=os.getpid(),
            written=now - age,
            view=VIEW,
            ended=bool(status.get("ended")),
            error=str(status["error"]) if "error" in status else None,
        )
    )
    return run


def helps(words: tuple[str, ...], group: object) -> Iterator[tuple[str, str]]:
    """Yield every command with what its help says."""
    yield " ".join(words), command(*words, "-h").stdout
    for name, below in getattr(group, "commands", {}).items():
        yield from helps((*words, name), below)


ROOT = Path(__file__).parents[3]


def not_installed() -> re.Pattern[str]:
    """Return what finds the names of packages that the wheel does not carry."""
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = settings["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    others = packages - set(wheel)
    assert others == {"experiments", "tests"}
    return re.compile(rf"\b({'|'.join(sorted(others))})[./]")


def test_help_names_nothing_that_pip_does_not_install() -> None:
    """Its examples were all of `experiments`, which only a checkout has."""
    texts = dict(helps((), typer.main.get_command(app)))
    assert {"train", "partition", "keys allow"} <= texts.keys()
    missing = not_installed()
    assert [name for name, text in texts.items() if missing.search(text)] == []


def test_what_help_shows_of_a_file_of_ones_own_makes_a_model(tmp_path: Path) -> None:
    text = command("partition", "-h").stdout
    begin = text.index("from torch import nn")
    end = text.index("\n", text.index("return nn.Sequential"))
    lines = [line.strip() for line in text[begin:end].splitlines()]
    (tmp_path / "nets.py").write_text(f"{lines[0]}\n{lines[1]}\n    {lines[2]}\n")
    told = ["--input", "784", "--machines", "1,2", "--cluster", "commodity-2012"]
    found = command("partition", "nets:make", *told, "--loss", "cross_entropy")
    assert found.exit_code == 0, found.output


def test_the_readme_says_which_of_its_commands_need_a_checkout() -> None:
    missing = not_installed()
    before = ""
    for index, part in enumerate((ROOT / "README.md").read_text().split("```")):
        commands = [line for line in part.splitlines() if re.match(r"[\w-]*\$ ", line)]
        if index % 2 and missing.search("\n".join(commands)):
            assert "checkout" in before.rstrip().rsplit("\n\n", 1)[-1], commands
        before = part


def test_help_teaches_by_example_and_names_tables_and_exit_codes() -> None:
    for words, shown in [
        ([], "$ distbelief train digits.toml"),
        (["train"], "$ distbelief train speech.toml --set cluster.replicas=4"),
        (["train"], "$ distbelief train --resume runs/speech"),
        (["status"], "$ distbelief status runs/speech --json"),
        # [stop] was taken for a style: "reaches the target of  first".
        (["simulate"], "[stop]"),
        *(([name], str(INTERRUPTED)) for name in ("train", "simulate", "chaos")),
    ]:
        assert shown in command(*words, "--help" if words else "-h").stdout
    assert command("--version").stdout == f"distbelief {version('distbelief')}\n"


def loaded_by(*arguments: str) -> tuple[int, list[str]]:
    """Run the command line in a fresh process; return its code, and what it loaded."""
    code = (
        "import sys\n"
        "from distbelief.cli.entry import main\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n    code = end.code\n"
        "heavy = [m for m in ('torch', 'matplotlib', 'zmq') if m in sys.modules]\n"
        "print('LOADED', code, *heavy)\n"
    )
    last = elsewhere.ended(code, *arguments).stdout.splitlines()[-1].split()
    assert last[0] == "LOADED"
    return int(last[1]), last[2:]


def test_help_status_and_typing_errors_load_nothing_heavy() -> None:
    a_run("runs/demo").close()
    Path("speech.toml").write_text(SPEECH.replace("epochs", "epoch"))
    assert loaded_by("--help") == (0, [])
    assert loaded_by("status") == (0, [])
    assert loaded_by("train", "speech.toml") == (MISTAKEN, [])


INTERRUPTED_AT_THE_START = """
import os, signal, sys

class Hand:
    def find_spec(self, name, path, target=None):
        if name == "distbelief.cli.main":
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # as at a terminal
sys.meta_path.insert(0, Hand())
from distbelief.cli.entry import main
main()
"""


def test_who_interrupts_the_start_reads_no_traceback() -> None:
    """Ctrl+C within a quarter of a second of the command was a page of text."""
    done = elsewhere.ended(INTERRUPTED_AT_THE_START, "--version")
    assert done.returncode == -signal.SIGINT
    assert (done.stdout, done.stderr) == ("", "")


def test_a_mistake_in_what_to_train_is_one_message_and_exit_code_2() -> None:
    Path("speech.toml").write_text(SPEECH)
    assert mistaken("train", "speech.toml", "--set", "algorithm.n_pushes=5") == (
        "--set algorithm.n_pushes=5: [algorithm] has no key 'n_pushes'. Did you mean 'n_push'?\n"
    )
    assert "name a job file, as in `distbelief train speech.toml`" in mistaken("train")
    a_run("runs/demo").close()
    said = mistaken("train", "--resume", "runs/demo", "--set", "stop.epohcs=2")
    assert "[stop] has no key 'epohcs'. Did you mean 'epochs'?" in said  # in its own job file
    assert "runs is not a run directory" in mistaken("train", "--resume", "runs")


def reported(
    error: BaseException, capsys: pytest.CaptureFixture[str], *, show_traceback: bool = False
) -> tuple[int, str]:
    """Return the exit code for an error, and what is said of it."""
    with pytest.raises(typer.Exit) as caught, reported_errors(show_traceback=show_traceback):
        raise error
    return caught.value.exit_code, capsys.readouterr().err


def test_each_kind_of_error_has_its_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    mistake = JobError("mend the model")
    assert reported(mistake, capsys) == (MISTAKEN, "mend the model\n")
    assert reported(StorageError("no space"), capsys) == (FAILED, "no space\n")
    assert reported(KeyboardInterrupt(), capsys) == (INTERRUPTED, "")
    code, said = reported(KeyError("NO SUCH NAME"), capsys)  # unforeseen: it points at its place
    assert code == FAILED
    assert said.startswith("KeyError: 'NO SUCH NAME' at ")
    assert "test_main.py" in said
    assert "Traceback" not in said
    assert "--traceback" in said
    assert "Traceback" in reported(mistake, capsys, show_traceback=True)[1]
    with pytest.raises(ZeroDivisionError), reported_errors(show_traceback=True):
        _ = 1 / 0
    failing = typer.Typer()
    failing.command()(reported_command(lambda: FAILED))
    assert CliRunner().invoke(failing, []).exit_code == FAILED


def status(*options: str) -> str:
    done = command("status", *options)
    assert done.exit_code == 0
    return done.stdout


def test_status_shows_a_running_job_or_says_what_is_wrong_with_it() -> None:
    with a_run("runs/demo") as run:
        said = status("runs/demo")
        for word in ("speech-demo  training", "replica 0", f"runs/demo: process {os.getpid()}, "):
            assert word in said
        run.status_file.unlink()
        assert "starting (process" in status()
    with a_run("runs/slow", age=60.0):
        assert "this status is 1 m 00 s old: process" in status("runs/slow")


def test_status_without_a_directory_takes_the_newest_that_runs() -> None:
    assert mistaken("status").startswith("no run found in ")
    with a_run("runs/old"):
        a_run("runs/new").close()
        assert "runs/old: process" in status()
    assert "runs/new: not running" in status()


def test_a_run_that_no_longer_runs_says_why_and_how_to_go_on() -> None:
    a_run("runs/demo", age=60.0).close()
    said = status("runs/demo")
    assert "speech-demo  was training" in said
    assert "not running, and did not end properly; last status 1 m 00 s ago" in said
    assert "distbelief train --resume runs/demo" in said  # unbroken: to be copied
    with files.scratch() as memory:  # which is locked: its roles live
        Path("runs/demo/memory").write_text(str(memory))
        said = status("runs/demo")
        assert "its supervisor was killed, and its roles train on for a while" in said
        assert "To take over: distbelief train --resume runs/demo" in said
    assert "not running, and did not end properly" in status("runs/demo")
    a_run("runs/done", age=60.0, ended=True).close()
    assert "runs/done: ended, 1 m 00 s ago" in status("runs/done")
    a_run("runs/bad", age=60.0, ended=True, error="no space").close()
    assert "runs/bad: failed: no space, 1 m" in status("runs/bad")


def test_the_status_of_a_former_incarnation_is_not_that_of_a_run_that_goes_on() -> None:
    """While a resumed run began, it was said to have ended."""
    with a_run("runs/demo", ended=True) as run:
        last = run.read_status()
        assert last is not None
        run.write_status(msgspec.structs.replace(last, pid=1))
        said = status()
        assert f"starting (process {os.getpid()}), no status yet" in said
        assert "ended" not in said
        assert json.loads(status("--json"))["status"] is None


def test_status_as_json_is_only_json() -> None:
    with a_run("runs/demo"):
        content = json.loads(status("--json"))
    assert content["running"] is True
    assert 0 <= content["age_seconds"] < 60
    assert content["status"]["view"]["samples"] == 640


STATUS = "from distbelief.cli.entry import main; main()"


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_output_that_is_not_taken_is_one_message_or_none(options: list[str]) -> None:
    """On a full disk it was called an unexpected error."""
    a_run("runs/demo").close()
    reader, writer = os.pipe()
    os.close(reader)  # it had enough
    with os.fdopen(writer, "wb") as pipe:
        done = elsewhere.ended(STATUS, "status", *options, stdout=pipe)
    assert (done.stderr, done.returncode) == ("", FAILED)
    with Path("/dev/full").open("wb") as full:
        done = elsewhere.ended(STATUS, "status", *options, stdout=full)
    said = "cannot write to standard output: No space left on device\n"
    assert (done.stderr, done.returncode) == (said, FAILED)


@pytest.mark.parametrize("command", ["train", "partition", "simulate", "serve", "join", "slurm"])
@pytest.mark.parametrize("width", [80, 120])
def test_examples_of_several_lines_can_be_copied(
    monkeypatch: pytest.MonkeyPatch, command: str, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    lines = [
        line.rstrip() for line in CliRunner().invoke(app, [command, "--help"]).output.splitlines()
    ]
    assert all(len(line) <= width for line in lines)
    begins = [at for at, line in enumerate(lines) if line.startswith(" $ distbelief")]
    assert begins
    assert any(lines[at].endswith("\\") for at in begins)
    for at in begins:
        assert lines[at].endswith("\\") == lines[at + 1].startswith("     ")
