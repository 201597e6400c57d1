"""compose.yaml: its commands exist, and together they train, here without containers."""

import re
import shlex
import subprocess
from os import environ
from pathlib import Path
from typing import Any

import pytest

from distbelief.config.load import parse_job
from tests.docs.pages import BIN, ROOT


yaml = pytest.importorskip("yaml")

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]
JOB = COMPOSE["configs"]["job"]["content"]
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def test_the_image_has_what_the_package_needs_and_no_more() -> None:
    copied = set(re.findall(r"^COPY (.+) \S+$", DOCKERFILE, re.MULTILINE))
    names = {name for line in copied for name in line.split()}
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().split() if line[0] == "!"]
    assert names == set(kept)
    assert all((ROOT / name).exists() for name in names)
    assert "USER 1000" in DOCKERFILE  # none of its processes is root's


def test_its_job_and_volumes_exist() -> None:
    parse_job(JOB, path="job.toml")
    used = {each.split(":")[0] for service in SERVICES.values() for each in service["volumes"]}
    assert used == set(COMPOSE["volumes"])
    # A volume belongs to root, where the image has no directory at its place.
    made = re.findall(r"install -d -o trainer (.+)", DOCKERFILE)[0].split()
    places = {v.split(":")[1] for service in SERVICES.values() for v in service["volumes"]}
    assert places <= set(made)
    for service in SERVICES.values():
        assert set(service.get("depends_on", {})) <= set(SERVICES)
        assert service["image"] == "distbelief"


def test_its_keys_are_those_of_compose() -> None:
    """No schema of compose is at hand: these are the keys that its specification has, of ours."""
    known = {"build", "image", "volumes", "entrypoint", "command", "init", "shm_size"}
    assert {*COMPOSE} == {"services", "volumes", "configs"}
    for service in SERVICES.values():
        assert {*service} <= known | {"depends_on", "configs"}
        for needed in service.get("depends_on", {}).values():
            assert needed["condition"] in {"service_started", "service_completed_successfully"}
        for config in service.get("configs", ()):
            assert config["source"] in COMPOSE["configs"]
            assert {*config} <= {"source", "target", "uid", "gid", "mode"}


def test_the_image_has_a_version_of_python_that_is_tested() -> None:
    (version,) = re.findall(r"^FROM python:(3\.\d+)-slim$", DOCKERFILE, re.MULTILINE)
    assert f'"Programming Language :: Python :: {version}"' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.soak
@pytest.mark.processes
@pytest.mark.timeout(400)
def test_together_they_train(tmp_path: Path) -> None:
    environment = environ | {"PATH": f"{BIN}:{environ['PATH']}"}

    def here(command: str) -> str:
        moved = command.replace("$$", "$").replace("/keys/", f"{tmp_path}/keys/")
        return re.sub(r"tcp://(0\.0\.0\.0|head):7700", "tcp://127.0.0.1:17700", moved)

    (tmp_path / "keys").mkdir(mode=0o700)
    (tmp_path / "job.toml").write_text(JOB.replace("25 s", "8 s"))
    script = here(SERVICES["keys"]["command"][0])
    subprocess.run(["bash", "-euc", script], cwd=tmp_path, env=environment, check=True)
    roles = {}
    for name in ("head", "host-1", "host-2"):
        (tmp_path / name).mkdir()
        command = shlex.split(here(SERVICES[name]["command"]))
        if name == "head":
            command[command.index("job.toml")] = "../job.toml"
        roles[name] = subprocess.Popen(
            [BIN / "distbelief", *command], cwd=tmp_path / name, env=environment
        )
    try:
        assert [role.wait(timeout=300) for role in roles.values()] == [0, 0, 0]
    finally:
        for role in roles.values():
            role.kill()
    assert [*(tmp_path / "head").glob("runs/*/model.safetensors")]
