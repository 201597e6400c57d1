"""What a job from another machine may call."""

import os
import sys
from pathlib import Path

import msgspec
import pytest

from distbelief.config.job import Job
from distbelief.core.errors import JobError
from distbelief.job.launch.role_process import RoleSpec, check_allowed, import_paths, readers_of
from distbelief.parameter_server.layout import Layout
from tests.distbelief.jobs import speech


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "__init__.py").write_text("")
    (tmp_path / "letters" / "model.py").write_text(
        "import os\nfrom os import system\ndef net():\n    pass\ndef frames():\n    pass\n"
    )
    (tmp_path / "lettersmith.py").write_text("raise OSError('it was imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("letters", "letters.model", "lettersmith"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return changed()


def changed(**tables: str) -> Job:
    return speech(
        "model.factory=letters.model:net",
        "data.train.factory=letters.model:frames",
        "data.test.factory=letters.model:frames",
        *(f"{table.replace('_', '.')}={value}" for table, value in tables.items()),
    )


@pytest.mark.parametrize("allowed", [("letters",), ("x", "letters.model")])
def test_what_is_allowed_may_be_called(job: Job, allowed: tuple[str, ...]) -> None:
    check_allowed(job, allowed)
    assert len(list(import_paths(job))) == 3


@pytest.mark.parametrize("allowed", [(), ("letter",), ("letters.mod",), ("os",)])
def test_nothing_else_may(job: Job, allowed: tuple[str, ...]) -> None:
    with pytest.raises(JobError, match=r"--allow-import letters\.model"):
        check_allowed(job, allowed)


@pytest.mark.parametrize(
    "path", ["letters.model:system", "letters.model:os.system", "letters.model:os.path"]
)
@pytest.mark.usefixtures("job")
def test_nor_what_an_allowed_module_has_from_elsewhere(path: str) -> None:
    with pytest.raises(JobError, match=r"does not allow|cannot be called"):
        check_allowed(changed(model_factory=path), ("letters",))


@pytest.mark.usefixtures("job")
def test_nothing_is_imported_to_find_out() -> None:
    other = changed(evaluation_metric="lettersmith:metric")
    with pytest.raises(JobError, match=r"\[evaluation\] 'lettersmith:metric'"):
        check_allowed(other, ("letters",))
    with pytest.raises(JobError, match=r"\[algorithm\] 'lettersmith:loss'"):
        check_allowed(changed(algorithm_loss="lettersmith:loss"), ("letters",))


def test_readers_import_nothing_else_either(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    """They begin before the replica has looked at what is allowed."""
    wanted = speech(
        "model.factory=letters.model:net",
        "data.train.factory=lettersmith:frames",
        "data.test.factory=letters.model:frames",
        "data.train.num_workers=1",
    )
    said = []
    spec = RoleSpec(job=msgspec.Raw(job.to_json()), layout=Layout.of([], n_shards=1).spec)
    for one in (msgspec.structs.replace(spec, allowed=("letters",)), spec):
        readers = readers_of("replica-0", one, wanted)
        assert readers is not None
        (pid,) = readers.pids
        assert os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT) is not None
        with readers:
            said.append(capfd.readouterr().err)
    refused, imported = said
    assert "'lettersmith:frames' is a function of module 'lettersmith'" in refused
    assert "it was imported" not in refused
    assert "it was imported" in imported
    assert readers_of("shard-0", spec, wanted) is None
    assert readers_of("evaluator", spec, wanted) is None
