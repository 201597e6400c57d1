"""A whole model on a device: its values and gradients are in the host's memory."""

from collections import namedtuple
from collections.abc import Sequence

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from distbelief.config.load import parse_job
from distbelief.core.errors import JobError
from distbelief.job.hosts.join_server import JoinServer
from distbelief.job.launch import role_process
from distbelief.job.launch.forkserver import Start, in_a_slot
from distbelief.task.data import Batch
from distbelief.transport.listen_config import ListenConfig
from distbelief.worker.local_executor import FlatModel
from tests.distbelief.examples import Everything, Frames
from tests.distbelief.jobs import small
from tests.distbelief.worker.execution.test_devices import Elsewhere


def everything() -> nn.Module:
    torch.manual_seed(0)
    return Everything(4, 2)


def loss(outputs: object, targets: object) -> torch.Tensor:
    assert isinstance(outputs, torch.Tensor)
    assert isinstance(targets, torch.Tensor)
    return cross_entropy(outputs, targets)


def batch() -> Batch:
    frames = Frames(n_samples=12)
    return Batch(frames.inputs, frames.targets)


def assert_equal(
    some: Sequence[torch.Tensor | None], others: Sequence[torch.Tensor | None]
) -> None:
    for one, other in zip(some, others, strict=True):
        assert (one is None) == (other is None)
        assert one is None or other is None or torch.equal(one, other)


def test_values_are_copied_there_and_gradients_and_buffers_back() -> None:
    here, there = FlatModel(everything()), FlatModel(everything(), device="cpu:0")
    pairs = list(zip(here.specs(), here.values, there.values, strict=True))
    for _, one, other in pairs:
        if one.is_floating_point():
            one.add_(0.25)
            other.add_(0.25)
    for _ in range(2):
        assert here.gradient(batch(), loss) == there.gradient(there.here(batch()), loss)
        assert_equal(here.gradients, there.gradients)
        for spec, one, other in pairs:
            assert torch.equal(one, other), spec.name
    tensors = there.named_tensors().values()
    assert not {value.data_ptr() for value in there.values} & {one.data_ptr() for one in tensors}


Pair = namedtuple("Pair", ["first", "second"])


class Library:
    """Stands for an object of a library, which knows how to move itself."""

    def to(self, device: torch.device) -> str:
        return f"on {device}"


def test_batches_of_any_form_are_moved() -> None:
    meta, one = torch.device("meta"), torch.ones(3)
    items = {"a": [one, "text"], "b": Pair(one, (one, 7)), "c": Library()}
    moved = Batch(items, items).to(meta)
    assert moved.is_dictionary
    assert isinstance(moved.inputs, dict)
    assert moved.inputs["a"][0].device == meta
    assert moved.inputs["a"][1:] == ["text"]
    pair = moved.inputs["b"]
    assert isinstance(pair, Pair)
    assert (pair.first.device, pair.second[0].device, pair.second[1]) == (meta, meta, 7)
    assert moved.inputs["c"] == "on meta"


def test_nothing_of_a_step_stays_behind() -> None:
    """Tensors without values refuse those in the host's memory, as those of a GPU do."""
    with Elsewhere():
        model = FlatModel(everything(), device="meta")
        model.gradient(model.here(batch()), loss)
        assert {one.device.type for one in model.named_tensors().values()} == {"meta"}
        found = [*model.values, *(one for one in model.gradients if one is not None)]
        assert {one.device.type for one in found} == {"cpu"}
        with pytest.raises(RuntimeError, match="device"):
            model.gradient(batch(), loss)


@pytest.mark.parametrize(
    ("name", "slot", "n_gpus", "device"),
    [
        ("replica-0", 0, 2, "cuda:0"),
        ("replica-7", 1, 2, "cuda:1"),
        ("replica-7.1", 2, 2, "cuda:0"),
        ("evaluator", 3, 2, "cuda:1"),
        ("evaluator", 3, 0, "cpu"),
    ],
)
def test_processes_of_a_host_take_its_gpus_in_turn(
    monkeypatch: pytest.MonkeyPatch, name: str, slot: int, n_gpus: int, device: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: n_gpus)
    assert role_process.device_of(name, "cuda", slot=slot) == device
    assert role_process.device_of(name, "cpu", slot=slot) == "cpu"


def test_a_replica_needs_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(JobError, match="the host of replica-0 has no GPU"):
        role_process.device_of("replica-0", "cuda", slot=0)


def test_a_process_has_the_slot_of_one_that_has_ended() -> None:
    def start(name: str) -> Start:
        return in_a_slot(Start(program="role", name=name, incarnation=1, spec="", log=""), alive)

    alive: list[Start] = []
    for name in ("shard-0", "replica-4", "replica-2.1", "shard-1", "evaluator"):
        alive = [*alive, start(name)]
    assert [one.slot for one in alive] == [0, 0, 1, 0, 2]
    alive = alive[:2] + alive[3:]
    assert start("replica-9").slot == 1


@pytest.mark.parametrize(("n_gpus", "slots"), [(0, 0), (3, 3)])
def test_a_head_has_a_replica_for_each_of_its_gpus(
    monkeypatch: pytest.MonkeyPatch, n_gpus: int, slots: int
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: n_gpus)
    job = parse_job(small("m:net", "m:data", cluster={"device": "cuda"}), path="job.toml")
    assert JoinServer(reach=ListenConfig()).slots_here(job) == slots
