"""A model as flat tensors, compared with the same model trained by plain torch."""

import copy
from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from typing_extensions import override

from distbelief.core.errors import JobError
from distbelief.parameter_server.layout import Layout
from distbelief.task.data import Batch
from distbelief.task.task import specs_of
from distbelief.worker.local_executor import FlatModel
from tests.distbelief.examples import Everything, Frames, net
from tests.distbelief.parameter_server.pair import gather, scatter


def everything() -> nn.Module:
    torch.manual_seed(0)
    return Everything(4, 2)


def batch(n: int = 12) -> Batch:
    frames = Frames(n_samples=12)
    return Batch(frames.inputs[:n], frames.targets[:n])


def test_tensors_are_sorted_once_each_and_of_their_kind() -> None:
    model = FlatModel(everything())
    kinds = {spec.name: spec.kind for spec in model.specs()}
    assert kinds == {
        "first.bias": "parameter",
        "first.weight": "parameter",
        "frozen.bias": "buffer",
        "frozen.weight": "buffer",
        "norm.bias": "parameter",
        "norm.num_batches_tracked": "counter",
        "norm.running_mean": "buffer",
        "norm.running_var": "buffer",
        "norm.weight": "parameter",
        "rebound": "buffer",
        "scale": "parameter",
        "transposed": "parameter",
        "unused.bias": "parameter",
        "unused.weight": "parameter",
    }
    assert list(kinds) == sorted(kinds)


def test_values_are_flat_in_the_order_of_the_specs() -> None:
    model = FlatModel(everything())
    for spec, value in zip(model.specs(), model.values, strict=True):
        assert value.shape == (spec.n_elements,)


def test_a_transposed_parameter_is_flat_in_row_major_order() -> None:
    module = everything()
    assert isinstance(module, Everything)
    assert not module.transposed.is_contiguous()
    expected = module.transposed.detach().clone().reshape(-1)
    model = FlatModel(module)
    index = [spec.name for spec in model.specs()].index("transposed")
    assert torch.equal(model.values[index], expected)
    model.values[index].zero_()
    assert not module.transposed.any()


def test_shared_tensors_have_one_name_and_aliases() -> None:
    model = FlatModel(everything())
    assert model.aliases() == {
        "again.weight": "first.weight",
        "again.bias": "first.bias",
        "tied.weight": "first.weight",
    }


def test_names_and_aliases_are_those_of_the_state_dict() -> None:
    module = everything()
    model = FlatModel(module)
    tensors = dict(model.named_tensors())
    tensors |= {alias: tensors[name] for alias, name in model.aliases().items()}
    assert tensors.keys() == module.state_dict().keys()


def test_the_gradient_is_that_of_plain_torch() -> None:
    plain = everything()
    model = FlatModel(copy.deepcopy(plain))
    loss = cross_entropy(plain(batch().inputs), Frames(n_samples=12).targets)
    loss.backward()
    assert model.gradient(batch(), cross_entropy) == float(loss.detach())
    expected = dict(plain.named_parameters())
    for spec, gradient in zip(model.specs(), model.gradients, strict=True):
        plain_gradient = expected[spec.name].grad if spec.name in expected else None
        if plain_gradient is None:
            assert gradient is None, spec.name
        else:
            assert gradient is not None, spec.name
            # A bias before BatchNorm has no gradient but rounding, which depends on addresses.
            torch.testing.assert_close(gradient, plain_gradient.reshape(-1), rtol=1e-6, atol=1e-6)


def test_what_is_unused_frozen_or_a_buffer_has_no_gradient() -> None:
    model = FlatModel(everything())
    model.gradient(batch(), cross_entropy)
    missing = {
        spec.name
        for spec, gradient in zip(model.specs(), model.gradients, strict=True)
        if gradient is None
    }
    assert {"unused.weight", "frozen.weight", "norm.num_batches_tracked"} <= missing
    assert "scale" not in missing


def test_each_gradient_is_fresh_and_the_older_one_stays_as_it_was() -> None:
    model = FlatModel(net())
    model.gradient(batch(), cross_entropy)
    stolen = model.gradients[0]
    assert stolen is not None
    kept = stolen.clone()
    model.gradient(batch(), cross_entropy)
    assert torch.equal(stolen, kept)
    fresh = model.gradients[0]
    assert fresh is not None
    assert fresh.data_ptr() != stolen.data_ptr()


def test_views_stay_those_of_the_module_whatever_forward_does() -> None:
    module = everything()
    model = FlatModel(module)
    model.gradient(batch(), cross_entropy)
    model.gradient(batch(), cross_entropy)
    names = [spec.name for spec in model.specs()]
    assert float(model.values[names.index("rebound")]) == 2.0
    assert float(model.values[names.index("norm.num_batches_tracked")]) == 2.0
    for name, value in zip(names, model.values, strict=True):
        assert value.data_ptr() == module.state_dict()[name].data_ptr()


def test_what_is_fetched_is_what_the_module_uses() -> None:
    """Through a layout of two shards and back, integers included."""
    model, other = FlatModel(everything()), FlatModel(Everything(4, 2))
    model.gradient(batch(), cross_entropy)
    layout = Layout.of(model.specs(), n_shards=2)
    for k in range(2):
        vector = np.zeros(layout.shard_size(k), layout.dtype)
        gather(layout, k, model.values, vector)
        scatter(layout, k, vector, other.values)
    for name, value in model.named_tensors().items():
        assert torch.equal(other.named_tensors()[name], value), name


def test_clipping_bounds_the_norm_and_keeps_the_direction() -> None:
    model = FlatModel(net())
    model.gradient(batch(), cross_entropy)
    before = torch.cat([g for g in model.gradients if g is not None])
    model.clip(0.01)
    after = torch.cat([g for g in model.gradients if g is not None])
    assert float(after.norm()) == pytest.approx(0.01, rel=1e-4)
    torch.testing.assert_close(after / after.norm(), before / before.norm())


def test_a_sparse_gradient_is_made_dense() -> None:
    model = FlatModel(nn.Sequential(nn.Embedding(10, 2, sparse=True), nn.Flatten()))
    model.gradient(Batch(torch.tensor([[1], [3]]), torch.tensor([0, 1])), cross_entropy)
    gradient = model.gradients[0]
    assert gradient is not None
    assert gradient.shape == (20,)
    assert gradient.nonzero().flatten().tolist() == [2, 3, 6, 7]


def test_complex_parameters_are_refused_by_name_if_they_train() -> None:
    module = nn.Module()
    module.register_parameter("w", nn.Parameter(torch.zeros(2, dtype=torch.complex64)))
    with pytest.raises(JobError, match=r"parameter 'w' is torch\.complex64.*view_as_complex"):
        FlatModel(module)


def test_complex_buffers_and_frozen_parameters_are_pairs_of_numbers() -> None:
    """Regression: tables of rotary embeddings were refused as if they were trained."""
    module, turns = nn.Module(), torch.polar(torch.ones(3), torch.arange(3.0))
    module.register_buffer("table", turns.clone())
    module.register_buffer("order", torch.tensor([2, 0, 1]))
    module.register_parameter("w", nn.Parameter(turns[:2].clone(), requires_grad=False))
    model = FlatModel(module)
    shapes = {spec.name: (spec.shape, spec.kind) for spec in model.specs()}
    both = {"order": ((3,), "counter"), "table": ((3, 2), "buffer"), "w": ((2, 2), "buffer")}
    assert shapes == both
    assert shapes == {spec.name: (spec.shape, spec.kind) for spec in specs_of(module)}
    model.values[1].mul_(2)  # as a fetch does
    assert torch.equal(module.get_buffer("table"), 2 * turns)


def test_a_sparse_buffer_is_refused_with_a_way_to_keep_it() -> None:
    module = nn.Module()
    module.register_buffer("edges", torch.eye(3).to_sparse())
    with pytest.raises(JobError, match=r"'edges' is torch\.sparse_coo.*persistent=False"):
        FlatModel(module)


def test_conjugate_and_negative_views_are_as_any_tensor() -> None:
    """torch keeps conj() and imag of it as marks: the first ended in an error of `view_as_real`."""
    module, table = nn.Module(), torch.fft.fft(torch.arange(4.0)).conj()
    module.register_buffer("table", table)
    module.register_buffer("sines", table.imag)
    expected = torch.view_as_real(table.resolve_conj()).reshape(-1).clone()
    model = FlatModel(module)
    sines, values = model.values
    assert torch.equal(values, expected)
    assert torch.equal(sines, expected[1::2])
    values.mul_(2)
    assert torch.equal(torch.view_as_real(module.get_buffer("table")).reshape(-1), 2 * expected)


class Staged(nn.Module):
    """Does something else with its parameters from its second forward on."""

    def __init__(self, change: Callable[["Staged"], object]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(784, 4), nn.Linear(4, 10)
        self.first.requires_grad_(requires_grad=False)
        self.register_buffer("seen", torch.zeros(2))
        self.change, self.n_calls = change, 0

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.n_calls:
            self.change(self)
        self.n_calls += 1
        outputs: torch.Tensor = self.last(self.first(x[:, :1].expand(-1, 784)))
        return outputs


def halved(module: Staged) -> None:
    with torch.no_grad():
        module.last.weight.mul_(0.5)


def moved(module: Staged) -> None:
    module.last.weight.data = 0.5 * module.last.weight.data


CHANGES: Mapping[str, tuple[Callable[[Staged], object], str]] = {
    "unfreezes": (lambda m: m.first.requires_grad_(), "begins to train parameter 'first.weight'"),
    "another": (lambda m: setattr(m, "last", nn.Linear(4, 10)), "replaces parameter 'last.weight'"),
    "one more": (lambda m: setattr(m, "more", nn.Linear(1, 1)), "makes a parameter"),
    "in place": (halved, "changes parameter 'last.weight'"),
    "by data": (moved, "changes parameter 'last.weight'"),
    "grows": (lambda m: setattr(m, "seen", torch.zeros(3)), r"'seen' of a Staged has become \[3\]"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_later_forward_does_to_parameters_is_refused(name: str) -> None:
    """Only the first one was looked at: from then on such a replica trained something else."""
    change, why = CHANGES[name]
    model = FlatModel(Staged(change))
    model.gradient(batch(), cross_entropy, keeps_all=True)
    with pytest.raises(JobError, match=why):
        model.gradient(batch(), cross_entropy, keeps_all=True)


@pytest.mark.parametrize("change", [halved, moved])
def test_a_parameter_that_forward_may_change_stays_what_is_exchanged(
    change: Callable[[Staged], object],
) -> None:
    """With new memory for `data`, fetches and local steps went to the old one."""
    model = FlatModel(Staged(change))
    before = model.module.get_parameter("last.weight").detach().clone()
    for _ in range(2):
        model.gradient(batch(), cross_entropy)
    weight = model.module.get_parameter("last.weight")
    assert torch.equal(weight, 0.5 * before)
    (value,) = (
        value
        for spec, value in zip(model.specs(), model.values, strict=True)
        if spec.name == "last.weight"
    )
    value.zero_()
    assert not weight.any()


def test_batches_may_be_of_any_size() -> None:
    model = FlatModel(net())
    for n in (1, 5, 12):
        model.gradient(batch(n), cross_entropy)
    assert model.flops(12) == 6.0 * model.n_parameters * 12
    assert model.n_bytes == 4 * model.n_parameters
