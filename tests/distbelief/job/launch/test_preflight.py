"""What the check of model and data reports, tried in this process."""

import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, final

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.utils.data import TensorDataset
from typing_extensions import override

from distbelief.config.load import parse_job
from distbelief.core.errors import JobError
from distbelief.core.memory import PrivateMemory
from distbelief.core.tensor_files import TensorFile
from distbelief.job.launch import preflight
from distbelief.job.launch.preflight import (
    PreflightRequest,
    PreflightResult,
    check_main,
    read_result,
)
from distbelief.job.launch.role_process import context_of
from distbelief.job.run.summary import DataFacts, TaskFacts
from distbelief.parameter_server.initial_values import Initial
from distbelief.parameter_server.layout import Layout, TensorSpec
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
    assert 'raise OSError("no memory")' in found.trace


class Noisy:
    """Samples with noise: drawn when the data set is made, or at each read; the first has none."""

    def __init__(self, *, anew: bool) -> None:
        self.noise = None if anew else torch.randn(9, 3)

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        noise = torch.randn(3) if self.noise is None else self.noise[index]
        return noise if index > 6 else torch.ones(3), 0


BATCH = """
[model]
factory = "tests.distbelief.job.launch.test_preflight:tied"
[data.train]
factory = "tests.distbelief.job.launch.test_preflight:Noisy"
[algorithm]
name = "sandblaster"
loss = "cross_entropy"
portion = 4
"""


@pytest.mark.parametrize("anew", [True, False])
def test_a_batch_method_refuses_samples_that_are_drawn_at_random(anew: bool) -> None:  # noqa: FBT001
    """It ended "successfully", at a loss of 0.73: each evaluation had other data."""
    job = parse_job(BATCH, path="job.toml", overrides=[f"data.train.arguments.anew={anew}".lower()])
    when = "it is read" if anew else ".*Noisy is called"
    text = rf"\[data.train\] sample 8 differs each time {when}, but a batch method .* \"downpour\""
    with pytest.raises(JobError, match=text):
        preflight.answer_to(job, initial_file="", plan="")


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


SPLIT = ("cluster.partitions=2", "algorithm.batch_size=6")


def counting() -> nn.Module:
    return Counting()


@final
class Counting(nn.Module):
    """Halves its outputs in the second step, which capture does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.calls: list[int] = []

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not isinstance(x, FakeTensor):
            self.calls.append(len(x))
        found: torch.Tensor = self.layer(x)
        return found if len(self.calls) < 2 else found / 2


def test_split_replicas_are_compared_with_one_process(tmp_path: Path) -> None:
    found = checked(tmp_path, *SPLIT)
    assert found.error is None
    assert found.proof.startswith("Split replicas compute what one process does: two steps of 6 ")
    assert checked(tmp_path, *SPLIT, "cluster.proof=false").proof == ""


def test_a_split_model_that_computes_something_else_is_refused(tmp_path: Path) -> None:
    """It once trained another model, without a word."""
    found = checked(tmp_path, *SPLIT, f"model.factory={__name__}:counting")
    assert found.is_users
    assert "split replicas would compute something else than one process" in str(found.error)
    assert "differs in the second step" in str(found.error)
    whole = checked(tmp_path, f"model.factory={__name__}:counting")
    assert (whole.error, whole.proof) == (None, "")  # a whole replica is the module itself


def test_a_model_beyond_this_host_is_not_compared_and_the_screen_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distbelief.plans.planner.profiling.this_host.memory", lambda: 1.0)
    found = checked(tmp_path, *SPLIT)
    said = "Not proved that split replicas compute what one process does: that would take 1.8 kB"
    assert (found.error, found.proof) == (None, f"{said} of memory")


def summed(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs, targets, reduction="sum")


SUMMED = f"algorithm.loss={__name__}:summed"


@pytest.mark.parametrize(
    "overrides",
    [
        (SUMMED,),
        (SUMMED, *SPLIT),
        (SUMMED, *SPLIT, "model.initial=seed"),
        (f'algorithm={{ name = "sandblaster", loss = "{__name__}:summed" }}',),
    ],
)
def test_a_sum_as_loss_is_refused(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    """Figures of a batch method depended on the size of its chunks."""
    found = checked(tmp_path, *overrides)
    assert found.is_users
    assert re.search(
        r"summed is [\d.]+ for \d samples and [\d.]+ for the same samples twice: let it be the "
        "mean over the samples, as by reduction='mean'",
        str(found.error),
    )


class Clamped(nn.Linear):
    """Keeps its weights small, in its forward pass: as people write it, by `data`."""

    @override
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.weight.data.clamp_(-0.01, 0.01)
        return super().forward(input)


def clamped() -> nn.Module:
    return Clamped(3, 3)


class Averaged(nn.Linear):
    """Has a copy of its weights, a running mean of these, as momentum encoders have."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.slow = nn.Parameter(self.weight.detach().clone(), requires_grad=False)

    @override
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.slow.data = 0.9 * self.slow.data + 0.1 * self.weight.detach()
        return super().forward(input) + input @ self.slow


class Growing(nn.Linear):
    """Makes a parameter when it sees its first batch."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.scale: nn.Parameter | None = None

    @override
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.scale is None:
            self.scale = nn.Parameter(torch.ones(input.shape[1]))
        return super().forward(input * self.scale)


LOCAL = (
    "algorithm.exchange={ send = 'delta', every = 4 }",
    "algorithm.inner={ name = 'SGD', lr = 0.1 }",
    "algorithm.rule={ name = 'sgd', learning_rate = 1.0 }",
)


def test_parameters_that_forward_changes_or_makes_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device the next step began with the values of the host's memory, without the change;
    elsewhere with those of the shards. What forward made was neither trained nor saved."""
    clamps, averages, grows = (
        f"model.factory={__name__}:{name}" for name in ("clamped", "Averaged", "Growing")
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    device = "cluster.device=cuda"
    for changes, name in (
        ([clamps], "changes parameter 'weight' itself"),
        ([clamps, device], "changes parameter 'weight' itself"),
        ([averages], "changes parameter 'slow' itself"),
        ([averages, *LOCAL], "changes parameter 'slow' itself"),
        ([grows, *LOCAL], "makes parameter 'scale'"),
    ):
        assert f"forward {name}" in str(checked(tmp_path, *changes).error)
    assert checked(tmp_path, device).error is None
    assert checked(tmp_path, clamps, *LOCAL).error is None  # they push what has become of it


class Renamed(nn.Sequential):
    """Saves its tensors by other names, as `checkpoint_wrapper` of torch does."""

    @override
    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        saved = super().state_dict(*args, **kwargs)
        return {name.replace("0.", "inner."): value for name, value in saved.items()}


class Counted(nn.Linear):
    """Has a state beside its tensors."""

    @override
    def get_extra_state(self) -> object:
        return torch.zeros(2)


class Masked(nn.Linear):
    """Saves a mask of infinities, and has buffers that its first forward makes."""

    def __init__(self, *, first: str = "") -> None:
        super().__init__(3, 3)
        self.register_buffer("mask", torch.full((3, 3), -math.inf).triu(1), persistent=bool(first))
        self.register_buffer("mean", None)
        self.first = first

    @override
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.first == "mean":
            self.mask = torch.zeros(3, 3)
            self.mean = input.detach().mean()
        return super().forward(input @ self.mask.softmax(-1))


def renamed() -> nn.Module:
    return Renamed(nn.Linear(3, 3))


def counted() -> nn.Module:
    return Counted(3, 3)


def test_what_a_job_would_neither_train_nor_save_is_refused(tmp_path: Path) -> None:
    """A model of other names in `state_dict` was trained without them, and a state, or a buffer of
    the first forward, was lost; a mask ended in "training has diverged", after ten steps."""
    masked = f"model.factory={__name__}:Masked"
    for changes, why in (
        (
            [f"model.factory={__name__}:renamed"],
            r"state_dict\(\) has no '0.\w+', so a job would not",
        ),
        ([f"model.factory={__name__}:counted"], r"state_dict\(\) has '_extra_state', which is nei"),
        ([masked, "model.arguments.first=mask"], "buffer 'mask' has NaN or infinite values after"),
        ([masked, "model.arguments.first=mean"], "forward makes buffer 'mean' itself"),
    ):
        assert re.search(why, str(checked(tmp_path, *changes).error)), changes
    assert checked(tmp_path, masked).error is None


class Scaled(nn.Linear):
    """Has a constant beyond float32."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.register_buffer("unit", torch.tensor([1.0, 1e300], dtype=torch.float64))


def test_values_beyond_the_shards_type_are_refused(tmp_path: Path) -> None:
    """They became infinite when training began."""
    scaled = f"model.factory={__name__}:Scaled"
    error = str(checked(tmp_path, scaled, "model.initial=module").error)
    assert re.search(r"'unit' is float64 with 1e\+300 at \[1\], beyond float32", error)
    bias = torch.tensor([1.0, 1e39, 1.0], dtype=torch.float64)
    weights = {"weight": torch.ones(3, 3).double(), "bias": bias}
    save_file(weights, tmp_path / "w.safetensors")
    overrides = f"model.factory={__name__}:plain", f"model.initial={tmp_path}/w.safetensors"
    error = str(checked(tmp_path, *overrides).error)
    assert "initial: 'bias' has 1e+39 at [1], beyond torch.float32" in error


def plain() -> nn.Module:
    return nn.Linear(3, 3)
