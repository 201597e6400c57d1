"""One blocking replica has the same bits wherever it runs: here, by ssh, on Ray, on Spark.

`tests/spark` has the same for the rows of a DataFrame.
"""

import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.processes.commands import COMMAND, MODULE, ended, sets, write_job
from tests.processes.test_ssh import FAKE


pytestmark = [pytest.mark.processes, pytest.mark.soak, pytest.mark.timeout(600)]
ONE = sets(
    "cluster.replicas=1", "algorithm.blocking=true", "stop.epochs=2", "algorithm.warm_start_steps=0"
)


def values(folder: Path, *words: str) -> dict[str, torch.Tensor]:
    folder.mkdir()
    write_job(folder)
    done = ended(folder, COMMAND, "train", "tiny.toml", *ONE, *words, seconds=300.0)
    assert done.returncode == 0, done.stdout + done.stderr
    log = (folder / "runs" / "tiny" / "logs" / "supervisor.log").read_text()
    assert ("has joined" in log and "replica 0: on" in log) == bool(words), log
    return load_file(folder / "runs" / "tiny" / "model.safetensors")


@pytest.mark.parametrize("on", ["ssh", "ray", "spark"])
def test_one_replica_has_the_bits_of_a_local_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on: str
) -> None:
    words = ["--on", on, "--hosts", "1", "--cores", "0"]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "there"), *sys.path]))
    there = tmp_path / "there"
    there.mkdir()
    (there / "tiny.py").write_text(MODULE)
    if on == "ssh":
        program = tmp_path / "bin" / "ssh"
        program.parent.mkdir()
        program.write_text(FAKE.format(python=sys.executable, there=there))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
        words[1:2] = ["ssh:me@localhost", "--remote", f"exec {COMMAND}"]
    elif on == "ray":
        pytest.importorskip("ray", reason="needs ray: pip install '.[ray]'")
    else:
        pytest.importorskip("pyspark", reason="needs pyspark: pip install '.[spark]'")
        if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
            pytest.skip("needs Java 17")
        monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
        options = "--master local[2] --conf spark.ui.enabled=false pyspark-shell"
        monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", options)
    plain, found = values(tmp_path / "local"), values(tmp_path / on, *words)
    assert plain.keys() == found.keys()
    assert all(torch.equal(plain[name], found[name]) for name in plain)
