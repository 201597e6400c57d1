"""A supervisor that would run code on a host that joins, by the address of its checkpoints.

It went to fsspec as it was. `reference://::data:...` makes fsspec up to 2026.4 render templates,
and a template calls the shell: nothing of that needs `--allow-import`.
"""

import base64
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


OLD = "fsspec==2026.2.0"
ROOT = Path(__file__).parents[4]

CONTROL = """
import sys
from contextlib import suppress
import fsspec
with suppress(Exception):
    fsspec.core.url_to_fs(sys.argv[1])
"""

JOIN = """
import sys
from pathlib import Path
import fsspec
from distbelief.job.hosts.bootstrap import write_job_spec
from distbelief.core.errors import DistBeliefError, StorageError
from distbelief.job.launch import preflight
from distbelief.job.run.directory import RunDirectory
from distbelief.job.run.folders import folder_at
from distbelief.job.run.resume import store_of
from tests.distbelief.job.hosts.test_agent import FACTORIES, site_of
from tests.distbelief.job.hosts.test_bootstrap import spec_of

url, code = sys.argv[1], Path(sys.argv[2])
(code / "letters.py").write_text("def net(): ...\\ndef frames(): ...\\n")
sys.path.insert(0, str(code))
spec = write_job_spec(spec_of("data.train.arguments={}", *FACTORIES), snapshots=url)
for places in ((), (url,)):  # also where the user of the host agrees to it
    storage = site_of(code, "letters", places=places)
    try:
        storage.store_job_spec(spec)
    except DistBeliefError as error:
        print("said", error)
    else:
        preflight.prepare_main("prepare", 1, str(storage.spec))
        print("said", storage.verdict())
    storage.clear()
try:
    folder_at(url)  # what roles do, and [cluster] checkpoints of a job
except StorageError as error:
    print("said", error)
run = RunDirectory(code / "run", lock=None)
run.snapshots.mkdir(parents=True)
run.place_file.write_text(url)
try:
    store_of(run, run.snapshots, report=print)  # --resume, and the model file
except StorageError as error:
    print("said", error)
"""


@pytest.fixture(scope="module")
def old_fsspec(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("old")
    words = ["-m", "pip", "install", "-q", "--no-deps", "--target", str(target), OLD]
    made = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=120, check=False
    )
    if made.returncode:
        pytest.skip(f"{OLD} cannot be installed: {made.stderr.strip()[-200:]}")
    return target


def run(code: str, *arguments: str, first: Path) -> str:
    paths = os.pathsep.join([str(first), str(ROOT), *sys.path])
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=240,
        check=True,
    )
    return done.stdout


@pytest.mark.soak  # it needs a package index
@pytest.mark.timeout(600)
def test_an_address_of_checkpoints_runs_nothing(tmp_path: Path, old_fsspec: Path) -> None:
    ran = tmp_path / "ran"
    shell = "{{ cycler.__init__.__globals__.os.system('touch %s') }}" % ran  # noqa: UP031 -- braces
    generated = [{"key": shell, "url": "x", "dimensions": {"i": [0]}}]
    program = {"version": 1, "templates": {}, "refs": {}, "gen": generated}
    content = base64.b64encode(json.dumps(program).encode()).decode()
    url = f"reference://::data:application/json;base64,{content}"
    run(CONTROL, url, first=old_fsspec)
    assert ran.exists()  # else the rest says nothing
    ran.unlink()
    lines = run(JOIN, url, str(tmp_path), first=old_fsspec).splitlines()
    said = [line for line in lines if line.startswith("said")]
    assert not ran.exists()
    assert len(said) == 4
    assert "--allow-checkpoints reference://" in said[0]
    assert all("cannot use reference://" in line for line in said[1:])
