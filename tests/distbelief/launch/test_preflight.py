"""What the check of model and data reports, tried in this process."""

import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset

from distbelief.config.load import parse_job
from distbelief.core.memory import PrivateMemory
from distbelief.core.tensor_files import TensorFile
from distbelief.launch import preflight
from distbelief.launch.preflight import PreflightRequest, PreflightResult, check_main, read_result
from distbelief.launch.role_process import context_of
from distbelief.parameter_server.initial_values import Initial
from distbelief.parameter_server.layout import Layout, TensorSpec
from distbelief.run.summary import DataFacts, TaskFacts
from distbelief.task.initializers import reader
from tests.distbelief.examples import a_sample
from tests.distbelief.jobs import small


JOB = small(f"{__name__}:tied", f"{__name__}:points")
TEST = f"data.test.factory={__name__}:points"
done: list[str] = []


def tied() -> nn.Module:
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    assert isinstance(net[0], nn.Linear)
    net[2].weight = net[0].weight
    return net


def points() -> TensorDataset:
    done.append("points")
    return TensorDataset(torch.zeros(9, 3), torch.zeros(9, dtype=torch.int64))


def prepare() -> None:
    done.append("prepare")


def checked(folder: Path, *overrides: str) -> PreflightResult:
    done.clear()
    job = parse_job(JOB, path=folder / "job.toml", overrides=(TEST, *overrides))
    content = PreflightRequest(
        job=msgspec.Raw(job.to_json()),
        initial_file=str(folder / "initial.safetensors"),
        plan=str(folder / "plan.json"),
    )
    request = folder / "request.json"
    request.write_bytes(msgspec.json.encode(content))
    assert check_main("check", 1, str(request)) == 0
    found = read_result(request)
    assert found is not None
    return found


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    n_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(n_threads)


def test_types_and_names_of_tensors_are_reported(tmp_path: Path) -> None:
    """The supervisor's process builds no model, and writes one with all names and types."""
    found = checked(tmp_path)
    assert found.error is None
    assert found.aliases == {"2.weight": "0.weight"}
    assert found.dtypes["1.num_batches_tracked"] == "int64"
    assert found.dtypes["0.weight"] == "float32"
    assert {spec.name for spec in found.tensors} == found.dtypes.keys()
    assert load_file(tmp_path / "initial.safetensors").keys() == found.dtypes.keys()
    assert (found.metric_name, found.task.n_parameters) == ("accuracy", 21)


KEPT: dict[str, tuple[torch.Tensor, str]] = {
    "large numbers": (torch.tensor([3, 2**24 + 1]), "int64 with numbers above 16,777,216"),
    "another type": (torch.zeros(2, dtype=torch.complex128), "complex128"),
}


def kept(name: str) -> nn.Module:
    net = tied()
    net.register_buffer("table", KEPT[name][0])
    return net


@pytest.mark.parametrize("name", KEPT)
def test_a_buffer_that_shards_cannot_keep_is_refused_with_a_way_to_keep_it(
    name: str, tmp_path: Path
) -> None:
    """Large numbers were rounded without a word; other types failed at the end of a run."""
    model = f"model.factory={__name__}:kept"
    found = checked(tmp_path, model, f"model.arguments.name={name}")
    assert found.is_users
    assert found.error is not None
    assert f"'table' is {KEPT[name][1]}, which shards cannot keep" in found.error
    assert "persistent=False" in found.error


def turning() -> nn.Module:
    net = tied()
    net.register_buffer("table", torch.polar(torch.ones(3), torch.arange(3.0)))
    net.register_buffer("order", torch.tensor([2, 0, 1]))
    return net


def test_complex_and_integer_buffers_are_kept(tmp_path: Path) -> None:
    found = checked(tmp_path, f"model.factory={__name__}:turning")
    assert found.error is None
    assert found.dtypes["table"] == "complex64"
    assert TensorSpec(name="table", shape=(3, 2), kind="buffer") in found.tensors
    assert found.initial_file is not None
    layout = Layout.of(found.tensors, n_shards=1)
    read = reader(TensorFile.at(Path(found.initial_file)), layout)
    table = torch.view_as_complex(torch.from_numpy(read("table", 0, 6)).view(3, 2))
    assert torch.equal(table, turning().get_buffer("table"))


def test_data_are_prepared_first_and_built_once(tmp_path: Path) -> None:
    checked(tmp_path)
    assert done == ["prepare", "prepare", "points", "points"]  # of [data.train] and [data.test]
    assert preflight.prepared_mark(tmp_path / "request.json").exists()


def test_faults_of_the_user_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = checked(tmp_path, "algorithm.loss=crossentropy")
    assert (found.is_users, "there is no loss" in str(found.error)) == (True, True)

    def fail(*_: object, **__: object) -> None:
        raise OSError("no memory")

    monkeypatch.setattr(preflight, "answer_to", fail)
    found = checked(tmp_path)
    claim = "model and data failed the check: OSError: no memory (test_preflight.py, line "
    assert str(found.error).startswith(claim)


def test_roles_are_built_from_all_that_the_check_found(tmp_path: Path) -> None:
    job = parse_job(JOB, path=tmp_path / "job.toml")
    found = PreflightResult(
        tensors=(TensorSpec(name="w", shape=(300,)),),
        initials={"w": Initial(distribution="constant", value=1.0)},
        initial_file="initial.safetensors",
        plans={1: "plan.json"},
        sample=a_sample((2,)),
        task=TaskFacts(train=DataFacts(n_samples=7)),
    )
    layout = Layout.of(found.tensors, n_shards=2)
    spec = found.role_spec(job, layout)
    context = context_of(spec, job, PrivateMemory())
    assert context.initial_file is not None
    assert context.initial_file.place == "./initial.safetensors"
    assert context.plan == "plan.json"
    for name in ("initials", "sample"):
        assert getattr(context, name) == getattr(spec, name) == getattr(found, name), name
    assert context.n_train == spec.n_train == 7
    assert spec.layout == layout.spec
    assert context.task == job.task
