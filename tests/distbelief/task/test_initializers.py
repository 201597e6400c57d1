from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from distbelief.core.errors import JobError, StorageError
from distbelief.core.tensor_files import TensorFile, header_of
from distbelief.parameter_server.initial_values import Initial, draw, shard_values_from
from distbelief.parameter_server.layout import Layout, TensorSpec
from distbelief.task.initializers import lost, reader, recorded_initials
from distbelief.worker.local_executor import FlatModel
from tests.distbelief.parameter_server.pair import scatter


def recorded(make: Callable[[], nn.Module]) -> dict[str, Initial]:
    module = make()
    names = [*dict(module.named_parameters()), *dict(module.named_buffers())]
    built: list[nn.Module] = []

    def build() -> nn.Module:
        built.append(make())
        return built[0]

    found = recorded_initials(build, names)
    assert all(tensor.is_meta for tensor in built[0].parameters())
    return dict(found)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(300, 200),
        lambda: nn.Linear(4, 1),
        lambda: nn.Conv2d(20, 30, 5),
        lambda: nn.Conv2d(20, 40, 5, groups=4),
        lambda: nn.ConvTranspose2d(30, 20, 5),
        lambda: nn.Bilinear(20, 30, 40),
        lambda: nn.Embedding(500, 50),
        lambda: nn.LSTM(40, 60),
        lambda: nn.GRUCell(40, 60),
        lambda: nn.MultiheadAttention(80, 4),
    ],
)
def test_the_distribution_is_that_of_torch(make: Callable[[], nn.Module]) -> None:
    initials = recorded(make)
    for name, tensor in FlatModel(make()).named_tensors().items():
        n = tensor.numel()
        drawn = draw(initials[name], seed=1, tensor=name, start=0, stop=n, dtype=np.float64)
        theirs = tensor.detach().double().numpy().reshape(-1)
        if n < 10:
            assert np.abs(drawn).max() <= 0.5, name
        elif n < 1000:  # too few to compare: at least it is of that size
            assert np.abs(drawn).max() <= 1.5 * max(np.abs(theirs).max(), 0.01), name
        else:
            assert drawn.std() == pytest.approx(theirs.std(), rel=0.05), name
            assert np.abs(drawn).max() == pytest.approx(np.abs(theirs).max(), rel=0.3), name


def test_norms_and_counters_start_as_in_the_module() -> None:
    initials = recorded(lambda: nn.BatchNorm1d(5))
    values = {name: initial.value for name, initial in initials.items()}
    assert values == {
        "bias": 0.0,
        "num_batches_tracked": 0.0,
        "running_mean": 0.0,
        "running_var": 1.0,
        "weight": 1.0,
    }
    assert {initial.distribution for initial in initials.values()} == {"constant"}


def test_initial_values_chosen_by_the_user_are_kept() -> None:
    def make() -> nn.Module:
        layer = nn.Linear(6, 6)
        nn.init.xavier_normal_(layer.weight, gain=2.0)
        nn.init.constant_(layer.bias, -4.5)
        layer.ones = nn.Parameter(torch.ones(3))
        layer.full = nn.Parameter(torch.full((2, 2), 0.5))
        layer.register_buffer("zeros", torch.zeros(3))
        return layer

    found = recorded(make)
    assert found["weight"].distribution == "normal"
    assert found["weight"].std == pytest.approx(2.0 / 6**0.5)
    values = {name: initial.value for name, initial in found.items() if name != "weight"}
    assert values == {"bias": -4.5, "ones": 1.0, "full": 0.5, "zeros": 0.0}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda m: setattr(m, "weight", nn.Parameter(torch.randn(3, 3) * 0.1)), "cannot repeat"),
        (lambda m: nn.init.trunc_normal_(m.weight), "cannot repeat"),
        # Regression: the cast was reported as a fill that shards cannot repeat.
        (nn.Module.double, r"cast to another type after .*in that type \(dtype=torch\.float64\)"),
        (lambda m: nn.init.orthogonal_(m.weight), "cannot repeat"),
        (lambda m: m.weight[0].zero_(), "cannot repeat"),
        (lambda m: nn.init.constant_(m.weight, float("inf")), "cannot repeat"),
        (lambda m: m.weight.fill_(torch.tensor(1.0)), "cannot repeat"),
        (lambda m: setattr(m, "weight", nn.Parameter(torch.empty(3, 3))), "never given any values"),
    ],
)
def test_what_shards_cannot_draw_is_named(change: Callable[[nn.Linear], object], why: str) -> None:
    def make() -> nn.Module:
        module = nn.Linear(3, 3)
        with torch.no_grad():
            change(module)
        return module

    with pytest.raises(JobError, match=rf"tensor 'weight' is .*{why}.*'module'"):
        recorded(make)


# --------------------------------------------------------------------- from a file


TENSORS = {
    "matrix": torch.arange(300.0).reshape(20, 15),
    "half": torch.arange(8.0, dtype=torch.bfloat16),
    "count": torch.tensor(7),
    "vector": torch.arange(5.0),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "weights.safetensors")
    return tmp_path / "weights.safetensors"


def layout_of(tensors: dict[str, torch.Tensor], *, n_shards: int = 2) -> Layout:
    specs = [TensorSpec(name=name, shape=tuple(t.shape)) for name, t in tensors.items()]
    return Layout.of(specs, n_shards=n_shards)


@pytest.mark.parametrize("bounds", [(0, 300), (7, 8), (14, 31), (0, 15), (299, 300)])
def test_a_range_of_a_matrix_is_row_major(path: Path, bounds: tuple[int, int]) -> None:
    read = reader(TensorFile.at(path), layout_of(TENSORS))
    assert read("matrix", *bounds).tolist() == list(map(float, range(*bounds)))


def test_every_type_and_shape_becomes_that_of_the_layout(path: Path) -> None:
    read = reader(TensorFile.at(path), layout_of(TENSORS))
    for name, n in (("half", 8), ("count", 1), ("vector", 5)):
        values = read(name, 0, n)
        assert values.dtype == np.float32
        assert values.tolist() == TENSORS[name].float().reshape(-1).tolist()


def test_complex_numbers_are_read_as_pairs(tmp_path: Path) -> None:
    table = torch.polar(torch.ones(4), torch.arange(4.0))
    save_file({"table": table}, tmp_path / "one.safetensors")
    layout = layout_of({"table": torch.view_as_real(table)})
    read = reader(TensorFile.at(tmp_path / "one.safetensors"), layout)
    assert read("table", 3, 8).tolist() == torch.view_as_real(table).flatten()[3:].tolist()


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_an_empty_tensor_is_read_as_one(
    tmp_path: Path, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Regression: torch refuses to view zero bytes of numpy's as another type."""
    file = tmp_path / "weights.safetensors"
    tensors = {"empty": torch.zeros(shape, dtype=dtype), "full": torch.ones(2)}
    save_file(tensors, file)
    layout = layout_of(tensors)
    read = reader(TensorFile.at(file), layout)
    assert (read("empty", 0, 0).shape, read("empty", 0, 0).dtype) == ((0,), layout.dtype)
    assert shard_values_from(layout, 0, read).shape == (layout.shard_size(0),)


def test_a_file_with_fewer_bytes_than_its_shapes_need_is_damaged(tmp_path: Path) -> None:
    """Regression: the shards ended with an error that named neither file nor tensor."""
    file = tmp_path / "weights.safetensors"
    facts = header_of([("full", "F32", (2,), 4)], {})
    file.write_bytes(facts + bytes(4))
    read = reader(TensorFile.at(file), layout_of({"full": torch.zeros(2)}))
    with pytest.raises(StorageError, match=r"weights.*header is wrong about 'full'"):
        read("full", 0, 2)


def test_shards_filled_from_a_file_hold_the_file(path: Path) -> None:
    layout = layout_of(TENSORS, n_shards=3)
    got = [torch.zeros(spec.n_elements) for spec in layout.tensors]
    for k in range(3):
        vector = shard_values_from(layout, k, reader(TensorFile.at(path), layout))
        scatter(layout, k, vector, got)
    for spec, values in zip(layout.tensors, got, strict=True):
        assert torch.equal(values, TENSORS[spec.name].float().reshape(-1))


def test_a_file_that_does_not_fit_is_named(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.safetensors"
    with pytest.raises(StorageError, match=r"cannot read initial values from .*other"):
        reader(TensorFile.at(other), layout_of(TENSORS))
    other.write_bytes(b"no weights at all")
    with pytest.raises(StorageError, match="cannot read initial values"):
        reader(TensorFile.at(other), layout_of(TENSORS))
    with pytest.raises(StorageError, match=r"no tensor 'other' \(it has count, half"):
        reader(TensorFile.at(path), layout_of({"other": torch.zeros(3)}))
    read = reader(TensorFile.at(path), layout_of({"matrix": torch.zeros(3, 3)}))
    with pytest.raises(StorageError, match=r"has shape \(20, 15\), the model's has \(3"):
        read("matrix", 0, 9)


def test_numbers_that_the_shards_type_has_not_are_refused(tmp_path: Path) -> None:
    """1e300 was read as infinity, and 16,777,217 as the number before, without a word."""
    wide = {
        "large": torch.tensor([[1.0, 2.0], [3.0, -1e300]], dtype=torch.float64),
        "whole": torch.tensor([5, 2**24 + 1]),
        "infinite": torch.tensor([-torch.inf, 1e-300], dtype=torch.float64),
    }
    save_file(wide, tmp_path / "wide.safetensors")
    file = TensorFile.at(tmp_path / "wide.safetensors")
    read = reader(file, layout_of(wide))
    with pytest.raises(StorageError, match=r"'large', elements 2 to 3: -1e\+300 at \[1\], which"):
        read("large", 2, 4)
    assert read("large", 0, 3).tolist() == [1.0, 2.0, 3.0]
    with pytest.raises(StorageError, match=r"'whole', elements 0 to 1: 16777217 at \[1\], which"):
        read("whole", 0, 2)
    assert read("infinite", 0, 2).tolist() == [-np.inf, 0.0]  # as they were, but for rounding
    specs = [TensorSpec(name=name, shape=tuple(t.shape)) for name, t in wide.items()]
    exact = reader(file, Layout.of(specs, n_shards=1, dtype="float64"))
    assert exact("large", 3, 4).tolist() == [-1e300]
    assert exact("whole", 0, 2).tolist() == [5.0, 2.0**24 + 1]


def test_what_a_cast_has_lost_is_named() -> None:
    """1.5 and NaN became whole numbers in buffers that count."""
    for given in (1.5, torch.nan, 2.0**70):
        before = torch.tensor([1.0, given], dtype=torch.float64)
        assert lost(before, before.long()) == f"{given!r} at [1]"
    assert lost(torch.tensor([3.0]), torch.tensor([3])) == ""
