from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from distbelief.errors import StorageError
from distbelief.parameter_server.initial_values import shard_values_from
from distbelief.parameter_server.layout import Layout, TensorSpec
from distbelief.task.initializers import reader


TENSORS = {
    "matrix": torch.arange(300.0).reshape(20, 15),
    "half": torch.arange(8.0, dtype=torch.bfloat16),
    "count": torch.tensor(7),
    "vector": torch.arange(5.0),
}


@pytest.fixture
def path(tmp_path: Path) -> str:
    save_file(TENSORS, tmp_path / "weights.safetensors")
    return str(tmp_path / "weights.safetensors")


def layout_of(tensors: dict[str, torch.Tensor], *, n_shards: int = 2) -> Layout:
    specs = [TensorSpec(name=name, shape=tuple(t.shape)) for name, t in tensors.items()]
    return Layout.of(specs, n_shards=n_shards)


@pytest.mark.parametrize("bounds", [(0, 300), (7, 8), (14, 31), (0, 15), (299, 300)])
def test_a_range_of_a_matrix_is_row_major(path: str, bounds: tuple[int, int]) -> None:
    read = reader(path, layout_of(TENSORS))
    assert read("matrix", *bounds).tolist() == list(map(float, range(*bounds)))


def test_every_type_and_shape_becomes_that_of_the_layout(path: str) -> None:
    read = reader(path, layout_of(TENSORS))
    for name, n in (("half", 8), ("count", 1), ("vector", 5)):
        values = read(name, 0, n)
        assert values.dtype == np.float32
        assert values.tolist() == TENSORS[name].float().reshape(-1).tolist()


def test_shards_filled_from_a_file_hold_the_file(path: str) -> None:
    layout = layout_of(TENSORS, n_shards=3)
    got = [torch.zeros(spec.n_elements) for spec in layout.tensors]
    for k in range(3):
        vector = shard_values_from(layout, k, reader(path, layout))
        layout.scatter(k, vector, got)
    for spec, values in zip(layout.tensors, got, strict=True):
        assert torch.equal(values, TENSORS[spec.name].float().reshape(-1))


def test_a_file_that_does_not_fit_is_named(path: str, tmp_path: Path) -> None:
    other = tmp_path / "other.safetensors"
    with pytest.raises(StorageError, match=r"cannot read initial values from .*other"):
        reader(str(other), layout_of(TENSORS))
    other.write_bytes(b"no weights at all")
    with pytest.raises(StorageError, match="cannot read initial values"):
        reader(str(other), layout_of(TENSORS))
    with pytest.raises(StorageError, match=r"no tensor 'other' \(it has count, half"):
        reader(path, layout_of({"other": torch.zeros(3)}))
    read = reader(path, layout_of({"matrix": torch.zeros(3, 3)}))
    with pytest.raises(StorageError, match=r"has shape \(20, 15\), the model's has \(3"):
        read("matrix", 0, 9)
