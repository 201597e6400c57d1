"""What a host receives, and whether a run's roles can be built there."""

import sys
from pathlib import Path

import msgspec
import pytest

from distbelief.core.errors import JobError
from distbelief.job.hosts.agent import AgentStorage
from distbelief.job.hosts.bootstrap import write_job_spec
from distbelief.job.launch import preflight
from distbelief.job.launch.local import LocalLauncher
from distbelief.job.launch.role_process import read_spec
from distbelief.transport.listen_config import ListenConfig
from tests.distbelief.job.hosts.test_bootstrap import spec_of


LETTERS = """
def net():
    pass


def frames():
    pass


def prepare():
    raise OSError("no letters here")
"""

FACTORIES = tuple(
    f"{table}.factory=letters:{name}"
    for table, name in (("model", "net"), ("data.train", "frames"), ("data.test", "frames"))
)


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "letters.py").write_text(LETTERS)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "letters", raising=False)
    return tmp_path


FILES = "tcp://127.0.0.1:7"  # where the supervisor serves checkpoints


def site_of(code: Path, *allowed: str, places: tuple[str, ...] = ()) -> AgentStorage:
    return AgentStorage(
        supervisor="tcp://127.0.0.1:7",
        reach=ListenConfig(),
        allowed=allowed,
        places=places,
        code=code,
        directory=code / "joined",
        launcher=LocalLauncher(),
    )


def told(storage: AgentStorage, code: Path) -> str | None:
    """Let it be told of a run, and tried out; return the verdict."""
    plan = code / "plan.json"
    plan.write_text("{}")
    overrides = ("data.train.arguments={}", "model.arguments={}", *FACTORIES)
    storage.store_job_spec(
        write_job_spec(
            msgspec.structs.replace(spec_of(*overrides), plans={2: str(plan)}), files=FILES
        )
    )
    assert preflight.prepare_main("prepare", 1, str(storage.spec)) == 0
    return storage.verdict()


def test_two_hosts_may_join_from_one_folder(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both looked for the next free number, and the second to make it was refused."""
    monkeypatch.setattr(Path, "exists", lambda _: False)  # as if both looked at once
    sites = [site_of(code, "letters") for _ in range(2)]
    brief = write_job_spec(spec_of(*FACTORIES), files=FILES)
    for storage in sites:
        storage.store_job_spec(brief)
        storage.clear()
    assert {path.name for path in (code / "joined").iterdir()} == {"1", "2"}


def test_what_roles_read_is_of_this_host(code: Path) -> None:
    storage = site_of(code, "letters")
    told(storage, code)
    spec = read_spec(str(storage.spec))
    assert spec.supervisor == "tcp://127.0.0.1:7"
    assert spec.allowed == ("letters",)
    assert spec.snapshots == ""  # the file server has them
    assert spec.plans
    assert Path(spec.plans[2]).read_text() == "{}"
    assert Path(spec.memory) == storage.spec.parent
    assert storage.spec.parent.stat().st_mode & 0o777 == 0o700
    storage.clear()
    assert not storage.spec.exists()


@pytest.mark.parametrize(
    ("place", "why"),
    [("/nowhere/runs", "has no directory /nowhere/runs: mount"), ("s3://x::y://z", "cannot use")],
)
def test_a_host_that_cannot_reach_the_checkpoints_is_refused(
    code: Path, place: str, why: str
) -> None:
    storage = site_of(code, "letters", places=(place,))
    overrides = ("data.train.arguments={}", "model.arguments={}", *FACTORIES)
    storage.store_job_spec(write_job_spec(spec_of(*overrides), snapshots=place))
    assert preflight.prepare_main("prepare", 1, str(storage.spec)) == 0
    assert why in str(storage.verdict())
    storage.clear()


@pytest.mark.parametrize(
    "place", ["/home/me", "/mnt/runs-of-others", "/mnt/runs/../../home/me", "s3://theirs/runs"]
)
def test_a_job_saves_only_where_the_host_agrees(code: Path, place: str) -> None:
    """A shard there wrote, listed and deleted files at any place that the supervisor named."""
    storage = site_of(code, "letters", places=("/mnt/runs", "s3://ours"))
    with pytest.raises(JobError, match=rf"does not allow .*--allow-checkpoints {place}"):
        storage.store_job_spec(write_job_spec(spec_of(*FACTORIES), snapshots=place))
    for agreed in ("/mnt/runs", "/mnt/runs/speech-1", "s3://ours/speech-1"):
        storage.store_job_spec(write_job_spec(spec_of(*FACTORIES), snapshots=agreed))
    with pytest.raises(JobError, match="names no place"):  # the folder of the process, before
        storage.store_job_spec(write_job_spec(spec_of(*FACTORIES)))
    storage.clear()


def test_a_host_says_what_is_wrong_with_a_run(code: Path) -> None:
    storage = site_of(code)
    assert "--allow-import letters" in str(told(storage, code))
    storage.clear()
    storage = site_of(code, "letters")
    assert "no letters here" in str(told(storage, code))
    (code / "letters.py").write_text(LETTERS.replace("prepare", "other"))
    sys.modules.pop("letters")
    assert told(storage, code) is None
    preflight.answer_file(storage.spec).unlink()
    assert "trying out the job failed" in str(storage.verdict())
    storage.clear()
