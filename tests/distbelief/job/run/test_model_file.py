from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from distbelief.core.errors import StorageError
from distbelief.core.tensor_files import TensorFile
from distbelief.job.run import model_file
from distbelief.job.run.checkpoints import CheckpointStore
from distbelief.job.run.model_file import write_model_file
from distbelief.parameter_server.layout import Layout
from distbelief.protocol.role import Snapshot
from distbelief.worker.local_executor import FlatModel
from tests.distbelief.limits import largest_file
from tests.distbelief.parameter_server.pair import gather


class Net(nn.Module):
    """Integers, complex numbers, a tied tensor, half precision, a scalar, empty tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(33, 20, bias=False)
        self.norm = nn.BatchNorm1d(20)
        self.back = nn.Linear(20, 33, bias=False)
        self.again = self.embed
        self.scale = nn.Parameter(torch.tensor(3.0))
        self.thirds = nn.Parameter(torch.ones(3, dtype=torch.bfloat16) / 3)
        self.none = nn.Parameter(torch.zeros(0, 4))
        self.register_buffer("seen", torch.tensor([7, 8], dtype=torch.int64))
        self.register_buffer("turns", torch.polar(torch.ones(5, 3), torch.rand(5, 3)))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)


def saved(
    directory: Path, module: nn.Module, n_shards: int, *, shift: float = 0.0
) -> tuple[Layout, list[TensorFile]]:
    """Return the layout of a module, and the snapshots of its shards."""
    model = FlatModel(module)
    layout = Layout.of(model.specs(), n_shards=n_shards)
    store = CheckpointStore(directory, report=print)
    for k in range(n_shards):
        vector = np.zeros(layout.shard_size(k), np.float32)
        gather(layout, k, model.values, vector)
        values = vector + np.float32(shift)
        store.save(f"shard-{k}", Snapshot(label="1", arrays={"values": values}, facts={}))
    return layout, [store.file(f"shard-{k}", "1") for k in range(n_shards)]


def kinds(module: nn.Module) -> dict[str, Mapping[str, str]]:
    """Return types and other names of a module's tensors, as the preflight reports them."""
    model = FlatModel(module)
    tensors = model.named_tensors().items()
    dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors}
    names = {name: name for name, _ in tensors} | dict(model.aliases())
    return {"dtypes": dtypes, "names": names}


@pytest.mark.parametrize("n_shards", [1, 2, 3, 7])
def test_the_written_model_loads_into_the_plain_module(
    n_shards: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_file, "PIECE", 50)
    torch.manual_seed(n_shards)
    trained = Net()
    trained.norm(torch.randn(8, 20))  # moves the statistics and the counter
    layout, snapshots = saved(tmp_path, trained, n_shards)
    path = tmp_path / "model.safetensors"
    write_model_file(path, layout, snapshots, **kinds(Net()), averaged=False)
    fresh = Net()
    fresh.load_state_dict(load_file(path), strict=True)
    for name, tensor in trained.state_dict().items():
        assert fresh.state_dict()[name].dtype == tensor.dtype
        torch.testing.assert_close(fresh.state_dict()[name], tensor, rtol=0.0, atol=0.0, msg=name)


def test_averaged_counts_are_written_as_the_nearest_integer(tmp_path: Path) -> None:
    layout, snapshots = saved(tmp_path, Net(), 1, shift=0.6)
    path = tmp_path / "model.safetensors"
    write_model_file(path, layout, snapshots, **kinds(Net()), averaged=False)
    assert load_file(path)["seen"].tolist() == [8, 9]


def test_without_a_module_all_tensors_are_of_the_layouts_type(tmp_path: Path) -> None:
    layout, snapshots = saved(tmp_path, nn.BatchNorm1d(5), 2)
    path = tmp_path / "model.safetensors"
    write_model_file(path, layout, snapshots)
    tensors = load_file(path)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    assert tuple(tensors["weight"].shape) == (5,)


def test_unreadable_checkpoints_are_refused(tmp_path: Path) -> None:
    layout, snapshots = saved(tmp_path, nn.Linear(2, 2), 2)
    path = tmp_path / "m.safetensors"
    Path(snapshots[0].place).write_bytes(b"cut")
    with pytest.raises(StorageError, match="a checkpoint cannot be read"):
        write_model_file(path, layout, snapshots)


def test_a_model_without_room_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"old")
    layout, snapshots = saved(tmp_path, nn.Linear(100, 100), 1)
    with largest_file(4096), pytest.raises(StorageError, match=str(path)):
        write_model_file(path, layout, snapshots)
    assert path.read_bytes() == b"old"
