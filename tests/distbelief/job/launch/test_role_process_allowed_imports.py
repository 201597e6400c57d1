"""What a job from another machine may call."""

import sys
from pathlib import Path

import pytest

from distbelief.config.job import Job
from distbelief.core.errors import JobError
from distbelief.job.launch.role_process import check_allowed, import_paths
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
