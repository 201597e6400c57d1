import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from distbelief.core import files
from distbelief.core.errors import JobError, StorageError
from distbelief.core.folders import LocalFolder
from distbelief.job.launch.forkserver import _redirect
from distbelief.job.run.directory import RunDirectory, Status
from distbelief.supervisor.view import JobView, Message, Point, RoleView
from tests.distbelief.limits import largest_file
from tests.elsewhere import ended


VIEW = JobView(
    seconds=3.5,
    phase="training",
    samples=100,
    loss=2.5,
    roles=(RoleView(name="shard-0", state="serving", counters={"clock": 3.0}),),
    history=(Point(seconds=1.0, samples=50, loss=3.0),),
    messages=(Message(number=1, seconds=2.0, text="hello", level="warning"),),
)


def a_run(path: Path) -> RunDirectory:
    run = RunDirectory.create(path)
    run.write(run.job_file, "name = 'x'\n")
    return run


# --------------------------------------------------------------------- create


def test_a_run_directory_has_places_for_all_that_a_job_leaves(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "runs" / "demo") as run:
        assert run.path == tmp_path / "runs" / "demo"
        assert run.snapshots.is_dir()
        assert run.logs.is_dir()
        places = {
            run.job_file: "job.toml",
            run.status_file: "status.json",
            run.metrics_file: "metrics.jsonl",
            run.curve_file: "curve.png",
            run.summary_file: "summary.json",
            run.model_file: "model.safetensors",
            run.log_file("shard-0"): "logs/shard-0.log",
        }
    assert [str(place.relative_to(run.path)) for place in places] == list(places.values())


@pytest.mark.parametrize("umask", [0o022, 0])
def test_only_its_user_reads_a_run(tmp_path: Path, umask: int) -> None:
    """Directories were 0755, and the lock and the logs 0644: others read models and paths."""

    def modes(*paths: Path) -> set[int]:
        return {path.stat().st_mode & 0o777 for path in paths}

    before = os.umask(umask)
    try:
        with a_run(tmp_path / "runs" / "demo") as run:
            files.LineFile(run.log_file("supervisor"), tell=print).append("a line")
            forkserver_log = run.log_file("replica-0")
            put = run.put_aside(run.job_file)
            LocalFolder(run.snapshots).write("shard-0/00001.safetensors", [memoryview(b"x")])
            child = os.fork()
            if not child:
                _redirect(str(forkserver_log))
                os._exit(0)
            os.waitpid(child, 0)
    finally:
        os.umask(before)
    places = run.path, run.snapshots, run.logs, put, run.snapshots / "shard-0"
    assert modes(*places) == {0o700}
    assert modes(run.path / "lock", run.log_file("supervisor"), forkserver_log) == {0o600}


def test_nothing_is_overwritten_the_next_free_sibling_is_taken(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("mine")
    for name, taken in (
        ("demo", "demo"),
        ("demo", "demo.2"),
        ("demo", "demo.3"),
        ("empty", "empty"),
        ("file", "file.2"),
    ):
        with RunDirectory.create(tmp_path / name) as run:
            assert run.path.name == taken
            run.write(run.job_file, "")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("at", ["iterdir", "open"])
def test_a_directory_that_another_run_takes_along_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """Two jobs of one name began at once, and both had a mistake.

    The first took its directory away when the second had found it, and was about to
    lock it: "cannot write to runs/tiny: No such file or directory".
    """
    place = tmp_path / "demo"
    target = Path if at == "iterdir" else os
    true: Callable[..., object] = getattr(target, at)
    n_left = 2

    def gone_before(*arguments: object) -> object:
        nonlocal n_left
        if n_left and place.exists():
            n_left -= 1
            place.rmdir()
        return true(*arguments)

    monkeypatch.setattr(target, at, gone_before)
    with RunDirectory.create(place) as run:
        assert (run.path, n_left) == (place, 0)


def test_a_place_that_cannot_be_is_named_with_the_fix(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    place = tmp_path / "file" / "demo"
    with pytest.raises(StorageError) as caught:
        RunDirectory.create(place)
    assert str(caught.value) == (
        f"cannot make {place}: a part of this path is a file: choose another directory"
    )


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_place_that_is_not_writable_says_how_to_choose_another(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StorageError, match=r"permission denied: .* --set output\.dir"):
        RunDirectory.create(tmp_path / "demo")
    tmp_path.chmod(0o700)


@pytest.mark.parametrize("name", ["status.json", "lock", "snapshots/shard-0/00001.safetensors"])
@pytest.mark.parametrize("write", [False, True])
def test_a_pipe_in_a_run_directory_is_refused_and_hangs_nothing(
    tmp_path: Path, name: str, *, write: bool
) -> None:
    """`status` and `--resume` waited for a writer for ever, even after SIGTERM."""
    with a_run(tmp_path / "demo") as run:
        pipe = run.path / name
    pipe.parent.mkdir(parents=True, exist_ok=True)
    pipe.unlink(missing_ok=True)
    os.mkfifo(pipe)
    with pytest.raises(StorageError, match=rf"{pipe} is no regular file: remove it"):
        RunDirectory.open(run.path, write=write)


# ----------------------------------------------------------------------- lock


def locked_by_another(path: Path) -> str:
    """Try to open the directory in another process; return what it says."""
    code = (
        "import sys\n"
        "from distbelief.job.run.directory import RunDirectory\n"
        "try:\n    RunDirectory.open(sys.argv[1])\n"
        "except Exception as error:\n    print(error)\n"
        "else:\n    print('open')\n"
    )
    return ended(code, str(path)).stdout.strip()


def test_two_processes_cannot_go_on_with_one_run(tmp_path: Path) -> None:
    with a_run(tmp_path / "demo") as run:
        said = locked_by_another(run.path)
        assert said == (
            f"{run.path} is still running (process {os.getpid()}): wait for "
            f"its end, or stop it: kill -INT {os.getpid()}"
        )
        assert run.writer_pid() == os.getpid()
    assert run.writer_pid() is None
    assert locked_by_another(run.path) == "open"


def test_a_run_can_be_read_while_another_process_writes_it(tmp_path: Path) -> None:
    with a_run(tmp_path / "demo") as run:
        reader = RunDirectory.open(run.path, write=False)
        assert reader.writer_pid() == os.getpid()
        with pytest.raises(StorageError, match="still running"):
            RunDirectory.open(run.path)
    assert reader.writer_pid() is None
    with RunDirectory.open(run.path):  # reading the lock did not take it
        assert reader.writer_pid() == os.getpid()


def test_what_is_no_run_directory_is_not_opened(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="there is no such directory"):
        RunDirectory.open(tmp_path / "none")
    with pytest.raises(JobError, match="passwd: it is a file, not a directory"):
        RunDirectory.open("/etc/passwd")
    with pytest.raises(JobError, match=r"is not a run directory \(no job\.toml\)"):
        RunDirectory.open(tmp_path)
    assert list(tmp_path.iterdir()) == []


# --------------------------------------------------------------------- status


def test_a_status_reads_back_equal_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    status = Status(name="demo", pid=7, written=1e9, view=VIEW, ended=True, error="no")
    with a_run(tmp_path / "demo") as run:
        assert run.read_status() is None
        run.write_status(status)
        assert run.read_status() == status
        assert not list(run.path.glob(f"*{files.TEMPORARY}"))
        run.status_file.write_text('{"name": 3}')
        with pytest.raises(StorageError, match=re.escape(str(run.status_file))):
            run.read_status()


# ---------------------------------------------------------------------- files


def test_a_file_that_does_not_fit_leaves_the_old_one_whole(tmp_path: Path) -> None:
    with a_run(tmp_path / "demo") as run:
        with largest_file(100), pytest.raises(StorageError) as caught:
            run.write(run.job_file, "x" * 1000)
        assert run.job_file.read_text() == "name = 'x'\n"
        assert not list(run.path.glob(f"*{files.TEMPORARY}"))
    assert str(caught.value).startswith(f"cannot write {run.job_file}: ")


def test_a_full_disk_says_what_to_do() -> None:
    full = Path("/dev/full")
    with pytest.raises(OSError, match="No space") as caught, full.open("wb") as file:
        file.write(b"x" * 100_000)
    said = str(files.explained(caught.value, full, doing="write"))
    assert said == (
        "cannot write /dev/full: there is no space left: free some, then go on with --resume"
    )


# ----------------------------------------------------------------------- plan


def test_a_refusal_leaves_the_plan_as_it_was(tmp_path: Path) -> None:
    """A refused --resume with other partitions left the run with their plan.

    Its job.toml asked for two machines, and `predict` took three.
    """
    with a_run(tmp_path / "run") as run:
        run.plan_file.write_text("of two machines")
        picture = run.plan_file.with_suffix(".png")

        def plan_and_refuse() -> None:
            with run.plan_kept():
                run.plan_file.write_text("of three machines")
                picture.write_bytes(b"three")
                raise JobError("the data are others")

        with pytest.raises(JobError):
            plan_and_refuse()
        assert run.plan_file.read_text() == "of two machines"
        assert not picture.exists()
        with run.plan_kept():
            run.plan_file.write_text("of three machines")
        assert run.plan_file.read_text() == "of three machines"
