"""`distbelief export`: the model of a parameter server, and of a run without a model file."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

import distbelief
from distbelief.cli.main import app
from tests.distbelief.jobs import small
from tests.processes.test_ema import MODULE


pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(180)]


def exported(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["export", *arguments])
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize("is_named", [True, False])
def test_a_servers_directory_has_the_model(tmp_path: Path, *, is_named: bool) -> None:
    """Of twelve tensors, whose positions sort otherwise than their names."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(3, 3) for _ in range(6)))
    params = net if is_named else list(net.parameters())
    rule, directory = distbelief.SGD(learning_rate=0.1), tmp_path / "ps"
    with distbelief.ParameterServer(params, rule=rule, shards=2, directory=directory) as server:
        optimizer = distbelief.DownpourSGD(net.parameters(), server=server.address)
        net(torch.randn(8, 3)).square().sum().backward()
        optimizer.step()
        optimizer.finish()
        trained = {name: value.clone() for name, value in net.state_dict().items()}
    output = exported(str(directory), "-o", str(tmp_path / "net.safetensors"))
    assert "72 values of the newest checkpoints" in output
    found = load_file(tmp_path / "net.safetensors")
    if not is_named:
        assert found.keys() == {str(place) for place in range(12)}
        found = {name: found[str(place)] for place, name in enumerate(trained)}
    assert found.keys() == trained.keys()
    assert all(torch.equal(found[name], value) for name, value in trained.items())


@pytest.mark.usefixtures("forked_roles")
def test_a_run_is_exported_as_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frozen tensors, running averages and a counter of integers included."""
    (tmp_path / "averaged.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    tables: dict[str, dict[str, object]] = {
        "cluster": {"shards": 2},
        "output": {"directory": "run"},
        "stop": {"epochs": 2},
    }
    (tmp_path / "job.toml").write_text(small("averaged:net", "averaged:points", **tables))
    distbelief.train("job.toml", show=False)
    model = Path("run/model.safetensors")
    written = model.read_bytes()
    model.unlink()
    exported("run", "--out", "run.safetensors")
    assert Path("run.safetensors").read_bytes() == written


def test_what_is_no_server_and_no_run_is_refused(tmp_path: Path) -> None:
    for arguments, why in [
        ((str(tmp_path),), "is not a run directory"),
        ((str(tmp_path / "none"),), "there is no such"),
        ((str(tmp_path), "-o", "net.pt"), "net.pt: use a file .safetensors"),
    ]:
        done = CliRunner().invoke(app, ["export", *arguments])
        assert done.exit_code != 0
        assert why in " ".join(done.output.split())
