import re
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional
from typing_extensions import override

from distbelief.graph.capture import InputSpec, capture
from distbelief.graph.graph import INPUT, GraphError, LayerGraph
from distbelief.graph.region import Shape
from tests.distbelief.graph.zoo.catalogue import Applied, Case
from tests.distbelief.graph.zoo.comparison import assert_same
from tests.distbelief.graph.zoo.local import LocalNet


Function = Callable[[torch.Tensor], object]


def owning(
    function: Callable[[torch.Tensor, torch.Tensor], object], shape: Shape, *, buffer: bool = False
) -> nn.Module:
    """A function of the input and of a tensor of the model."""
    tensor = torch.rand(shape)
    return Applied(function, own=tensor if buffer else nn.Parameter(tensor))


def attending(function: Callable[..., object], **parts: torch.Tensor) -> nn.Module:
    return Applied(function, attention=nn.MultiheadAttention(4, 2, batch_first=True), **parts)


def captured(function: Function, *shape: int) -> LayerGraph:
    return capture(Applied(function), [InputSpec(shape=shape)])


def in_place(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    z = y
    y.add_(1.0)
    y += x
    return z * functional.relu_(y)


MODULES: dict[str, tuple[Callable[[], nn.Module], Shape]] = {
    "leaky relu": (lambda: nn.LeakyReLU(0.3), (4,)),
    "elu": (lambda: nn.ELU(0.7), (4,)),
    "gelu": (lambda: nn.GELU(approximate="tanh"), (4,)),
    "softplus": (nn.Softplus, (4,)),
    "softmax": (lambda: nn.Softmax(dim=-1), (3, 4)),
    "softmax 2d": (nn.Softmax2d, (3, 4, 2)),
    "log softmax": (lambda: nn.LogSoftmax(dim=1), (3, 4)),
    "layer norm": (lambda: nn.LayerNorm((3, 4)), (2, 3, 4)),
    "layer norm, plain": (lambda: nn.LayerNorm(4, elementwise_affine=False), (3, 4)),
    "rms norm": (lambda: nn.RMSNorm(4), (3, 4)),
    "batch norm 1d": (lambda: nn.BatchNorm1d(4), (4,)),
    "batch norm, untracked": (lambda: nn.BatchNorm1d(4, track_running_stats=False), (4, 3)),
    "convolution 1d": (lambda: nn.Conv1d(4, 6, 3, groups=2, dilation=2), (4, 9)),
    "convolution 3d": (lambda: nn.Conv3d(2, 3, 2, padding=1), (2, 3, 4, 3)),
    "convolution, reflected": (
        lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), (2, 4, 4),
    ),
    "encoder layer": (
        lambda: nn.TransformerEncoderLayer(
            *(4, 2, 6), dropout=0.0, batch_first=True, activation=nn.Mish()
        ), (3, 4),
    ),
    "attention": (lambda: attending(lambda x, attend: attend(x, x, x)[0]), (3, 4)),
    "in a row": (lambda: nn.Sequential(nn.Unflatten(1, (2, 2)), nn.Identity(), nn.Mish()), (4,)),
    "adaptive": (lambda: nn.AdaptiveMaxPool2d((2, 3)), (2, 5, 5)),
    "bilinear": (lambda: nn.Upsample(scale_factor=2, mode="bilinear"), (2, 3, 3)),
    "flatten": (nn.Flatten, (2, 3)),
    "own mask for a module": (
        lambda: attending(
            lambda x, attend, mask: attend(x, x, x, attn_mask=mask)[0],
            mask=torch.arange(9.0).view(3, 3),
        ), (3, 4),
    ),
    "padded module": (
        lambda: attending(lambda x, f: f(x, x, x, key_padding_mask=x[:, :, 0] > 1.0)[0]), (3, 4),
    ),
    "padded module, by numbers": (
        lambda: attending(
            lambda x, f, bias: f(x, x, x, key_padding_mask=x[:, :, 0], attn_mask=bias)[0],
            bias=torch.rand(3, 3),
        ), (3, 4),
    ),
    "padded encoder": (
        lambda: Applied(
            lambda x, encode: encode(x, src_key_padding_mask=x[:, :, 0] > 1.0),
            part=nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True),
        ), (3, 4),
    ),
    "causal module": (
        lambda: attending(
            lambda x, f: f(x, x, x, attn_mask=torch.ones(x.size(1), 3).triu(1).bool())[0]
        ), (3, 4),
    ),
}  # fmt: skip

OWNING: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], object], Shape, Shape]] = {
    "scale": (lambda x, w: x * w, (3, 1), (3, 4)),
    "positions": (lambda x, w: x + w, (1, 3, 4), (3, 4)),
    "positions, cut": (lambda x, w: x + w[:, :3], (1, 5, 4), (3, 4)),
    "exponents": (lambda x, w: x * w.exp().transpose(0, 1).sum(0), (4, 3), (4,)),
    "token": (lambda x, w: torch.cat([w.expand(x.size(0), -1, -1), x], 1), (1, 1, 4), (3, 4)),
    "token, raised": (
        lambda x, w: torch.cat([w[None, None].expand(len(x), 2, 4), x], 1), (4,), (3, 4),
    ),
    "weight": (functional.linear, (2, 4), (4,)),
    "weight of one": (functional.linear, (1, 4), (4,)),
    "matrix": (lambda x, w: x @ w, (4, 2), (3, 4)),
    "matrix, turned": (lambda x, w: x @ w.T, (2, 4), (4,)),
    "matrix, by letters": (lambda x, w: torch.einsum("bti,ij->btj", x, w), (4, 2), (3, 4)),
    "matrix, by other letters": (lambda x, w: torch.einsum("bi,oi->bo", x, w), (2, 4), (4,)),
    "filters": (
        lambda x, w: functional.conv2d(x, w, stride=2, padding=1), (3, 2, 3, 3), (2, 5, 5),
    ),
    "filters, same": (
        lambda x, w: functional.conv1d(x, w, padding="same", groups=2), (4, 1, 3), (2, 5),
    ),
    "additive mask": (
        lambda x, w: functional.scaled_dot_product_attention(x, x, x, w), (1, 1, 3, 3), (2, 3, 4),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OWNING)
def test_a_function_of_a_tensor_of_the_model_becomes_layers(name: str) -> None:
    function, own, shape = OWNING[name]
    check(Case(make=lambda: owning(function, own), shape=shape))


def test_a_mask_in_a_buffer_is_captured() -> None:
    def attend(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)

    check(Case(make=lambda: owning(attend, (3, 3), buffer=True), shape=(2, 3, 4)))


FUNCTIONS: dict[str, tuple[Function, Shape]] = {
    "arithmetic": (lambda x: (1 - x) / 2 + 3 / (x**2 + 2) - x * -x.abs(), (4,)),
    "constants": (lambda x: x * torch.tensor(2.5) + torch.ones(1), (4,)),
    "shapes in arithmetic": (lambda x: x * (x.shape[-1] ** -0.5), (4,)),
    "in place": (in_place, (4,)),
    "activations": (
        lambda x: (
            functional.leaky_relu(x, 0.3)
            + functional.elu(x, alpha=0.5) * functional.softplus(x)
            - functional.gelu(x, approximate="tanh") * functional.gelu(x)
        ), (4,),
    ),
    "types": (lambda x: x.to(x.dtype).contiguous().clone().type_as(x) + 1, (4,)),
    "like another": (
        lambda x: (
            x.mean(2, keepdim=True).expand_as(x) * x.flatten(1).view_as(x)
            + x.mean((1, 2)).unsqueeze(1).unsqueeze(1).expand(-1, 3, 4)
        ), (3, 4),
    ),
    "variance": (lambda x: x.var(dim=(1, 2), correction=0), (3, 4)),
    "adaptive pooling": (lambda x: functional.adaptive_avg_pool2d(x, (2, 1)), (2, 5, 4)),
    "average over windows": (
        lambda x: functional.avg_pool1d(x, 2, padding=1, count_include_pad=False), (2, 5),
    ),
    "broadcasting": (lambda x: x * torch.softmax(x, -1).sum(1, keepdim=True), (3, 4)),
    "statistics": (lambda x: (x - x.mean(-1, keepdim=True)) / x.std(dim=-1, keepdim=True), (3, 4)),
    "several dimensions": (lambda x: x.mean([2, 3]) + torch.amax(x, (-1, -2)), (2, 3, 4)),
    "permuted": (lambda x: x.permute(0, 2, 3, 1).transpose(1, 2), (2, 3, 4)),
    "reshaped": (lambda x: x.unsqueeze(1).flatten(2).squeeze(1).view(len(x), 4, -1), (2, 6)),
    "indices": (lambda x: x[:, 1, ..., ::2] + x[..., -1, -2:], (4, 4, 4)),
    "new dimensions": (lambda x: x[:, None, 1:] * x[:, :, None, :1], (3, 4)),
    "stacked": (lambda x: torch.stack([x, 2 * x], dim=-1), (3, 4)),
    "unbound": (lambda x: sum(part * i for i, part in enumerate(x.unbind(1))), (3, 4)),
    "looped": (lambda x: sum(x[:, i] for i in range(x.size(1))), (3, 4)),
    "split": (lambda x: torch.cat(x.split([1, 3], dim=1)[::-1], 1), (4, 2)),
    "narrowed": (lambda x: x.narrow(1, 1, 2) + x.select(2, 1).unsqueeze(2)[:, :2], (4, 2)),
    "padded": (lambda x: functional.pad(x, (1, 2, 0, 1), value=3.0), (2, 3)),
    "enlarged": (lambda x: functional.interpolate(x, scale_factor=3), (2, 3, 2)),
    "pooled": (
        lambda x: (
            functional.max_pool2d(x, 3, 2, ceil_mode=True)
            + functional.avg_pool2d(x, 2, 2, ceil_mode=True)
        ), (2, 6, 6),
    ),
    "normalised": (lambda x: functional.local_response_norm(x, 2, k=2.0), (5, 3)),
    "expanded": (lambda x: x.unsqueeze(2).expand(-1, -1, 3) * x.unsqueeze(1), (3,)),
    "causal": (
        lambda x: functional.scaled_dot_product_attention(
            x, x, x, torch.ones(3, 3, dtype=torch.bool).tril(), scale=0.3
        ), (2, 3, 4),
    ),
    "unused": (lambda x: (x * 2, torch.sort(x), x.mean())[0], (4,)),
    "several outputs": (lambda x: {"a": x + 1, "b": x * 2}, (4,)),
}  # fmt: skip


def check(case: Case, *, whole: int = 0) -> None:
    model = case.model()
    graph = capture(model, case.specs)
    assert sum(bool(layer.whole) for layer in graph.layers) == whole
    for training in (True, False):
        assert_same(graph, model, case, training=training)
        assert_same(graph, model, case, training=training, seed=4)


@pytest.mark.parametrize("name", MODULES)
def test_a_module_becomes_layers_that_compute_it(name: str) -> None:
    make, shape = MODULES[name]
    check(
        Case(make=make, shape=shape),
        whole=1 if name in {"bilinear", "convolution, reflected"} else 0,
    )


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_becomes_layers_that_compute_it(name: str) -> None:
    function, shape = FUNCTIONS[name]
    check(Case(make=lambda: Applied(function), shape=shape))


WORDS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "embedding": (lambda: nn.Embedding(7, 3, padding_idx=2), 0),
    "counted embedding": (lambda: nn.Embedding(7, 3, scale_grad_by_freq=True), 1),
    "own table": (lambda: owning(functional.embedding, (7, 3)), 0),
    "positions": (
        lambda: owning(
            lambda x, w: (
                functional.embedding(x, w) + functional.embedding(torch.arange(1, 1 + x.size(1)), w)
            ),
            (7, 3),
        ),
        0,
    ),
    "whole numbers at other places": (
        lambda: owning(
            lambda x, w: functional.embedding(x[:, 1:].unsqueeze(1).transpose(1, 2), w), (7, 3)
        ),
        0,
    ),
}


@pytest.mark.parametrize("name", WORDS)
def test_words_become_rows_of_a_table(name: str) -> None:
    make, whole = WORDS[name]
    check(Case(make=make, shape=(4,), n_values=7), whole=whole)


def test_words_that_are_counted_must_follow_each_other() -> None:
    model = owning(
        lambda x, w: functional.embedding(x, w) + functional.embedding(torch.arange(6, 0, -2), w),
        (7, 3),
    )
    with pytest.raises(GraphError, match="must be consecutive"):
        capture(model, [InputSpec(shape=(3,), n_values=7)])


def test_channels_are_dropped_together() -> None:
    model = Applied(
        lambda x, drop: functional.dropout1d(drop(x).flatten(2), 0.3, drop.training),
        drop=nn.Dropout2d(0.4),
    )
    graph = capture(model, [InputSpec(shape=(2, 3, 3))])
    dropped = [layer for layer in graph.layers if layer.kind == "dropout"]
    assert [layer.options["n_shared"] for layer in dropped] == [2, 1]
    assert [layer.options["probability"] for layer in dropped] == [0.4, 0.3]


def test_frozen_modules_stay_as_they_are_in_training() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    model[1:].eval()
    graph = capture(model, [InputSpec(shape=(4,))])
    assert [layer.kind for layer in graph.layers] == [INPUT, "linear", "normalise"]
    assert model.training
    assert not model[1].training
    model.eval()
    graph = capture(model, [InputSpec(shape=(4,))])
    assert "running_average" in {layer.kind for layer in graph.layers}
    assert "dropout" in {layer.kind for layer in graph.layers}
    assert not any(part.training for part in model.modules())


def test_shared_weights_are_one_tensor_of_two_layers() -> None:
    one, other = nn.Linear(4, 4), nn.Linear(4, 4)
    other.weight = one.weight
    model = Applied(lambda x, one, other: one(one(other(x))), one=one, other=other)
    graph = capture(model, [InputSpec(shape=(4,))])
    assert list(graph.tensors) == ["one.bias", "one.weight", "other.bias"]
    assert [layer.name for layer in graph.layers] == ["x", "other", "one", "one.2"]
    assert graph.n_parameters == 24


def test_several_inputs_and_defaults_are_taken_in_order() -> None:
    class Two(nn.Module):
        @override
        def forward(
            self, x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor | None = None
        ) -> torch.Tensor:
            x = x * y
            return x if mask is None else x * mask

    shapes = [InputSpec(shape=(4,)), InputSpec(shape=(3, 4))]
    graph = capture(Two(), [InputSpec(shape=(3, 4)), shapes[1]])
    assert [layer.name for layer in graph.layers] == ["x", "y", "mul"]
    graph = capture(Two(), [shapes[1]] * 3)
    assert [layer.name for layer in graph.layers if layer.kind == INPUT] == [*("x", "y", "mask")]
    with pytest.raises(GraphError, match=r"takes 2 inputs \(x, y\), but 1 shapes"):
        capture(Two(), shapes[:1])
    with pytest.raises(GraphError, match=r"takes 3 inputs .* but 4 shapes are given"):
        capture(Two(), shapes * 2)


def test_a_model_without_memory_is_captured_whatever_its_size() -> None:
    with torch.device("meta"):
        model = LocalNet(size=100, maps=(8, 8, 17), window=10, n_classes=21_000, device="meta")
    graph = capture(model, [InputSpec(shape=(3, 100, 100))])
    assert graph.n_parameters > 1_700_000_000
    assert graph["stages.8"].shape == (17, 69, 69)
    assert not any(layer.whole for layer in graph.layers)


def test_nothing_of_the_model_is_changed() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(inplace=True))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    attributes = [set(vars(part)) for part in model.modules()]
    state = torch.get_rng_state()
    capture(model, [InputSpec(shape=(1, 5, 5))])
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
        assert not value.is_meta
    assert attributes == [set(vars(part)) for part in model.modules()]
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    ("function", "shape", "message"),
    [
        (lambda x: x.mean(0), (4,), "mean uses the batch"),
        (lambda x: x.mean(), (4,), "over all dimensions joins the batch"),
        (lambda x: x.sum(0, keepdim=True) + x, (4,), "sum uses the batch"),
        (lambda x: x.transpose(0, 1), (4,), "keep samples separate"),
        (lambda x: x.reshape(-1, 2), (4,), r"reshape gives"),
        (lambda x: torch.cat([x, x]), (4,), "cat (gives|uses the batch)"),
        (lambda x: x[1:], (4,), "slices after the batch"),
        (lambda x: x[[0, 1]], (4,), "slices after the batch"),
        (lambda x: x[:, [0, 1]], (4,), "no constant slice"),
        (lambda x: x / x.size(0), (4,), "depends on the batch size"),
        (functional.dropout, (4,), "training=self.training"),
        (lambda x: torch.add(x, x, alpha=2), (4,), "alpha=2 has no split rule"),
        (lambda x: x.view(len(x), 2, 2)[:, 0].mul_(2) + x[:, 2:], (4,), "in place"),
        (lambda _: torch.ones(3), (4,), "returns no tensors|depend on its inputs"),
        (lambda x: x.size(0), (4,), "returns no tensors"),
        (lambda x: x.to(torch.int64), (4,), "between whole and floating point"),
        (lambda x: 2**x, (4,), "input is 2"),
        (lambda x: x**x, (4,), "exponent is the output of"),
        (lambda x: x.mean(3), (4,), "Dimension out of range|no dimension 3"),
        (lambda x: functional.softplus(x, 2), (4,), "usual constants"),
        (lambda x: functional.pad(x, (1, 1), mode="reflect"), (2, 3), "'reflect'"),
        (lambda x: torch.stack([x, x]), (4,), "stack (gives|uses the batch)"),
        (lambda x: torch.cat([x, torch.ones(len(x), 2)], 1), (4,), "made: register"),
        (functional.softmax, (4,), "no dimension None|Implicit"),
        (
            lambda x: functional.scaled_dot_product_attention(
                x, x, x, torch.eye(3, dtype=torch.bool)
            ),
            (2, 3, 4),
            "only a causal mask",
        ),
        (lambda x: functional.scaled_dot_product_attention(x, x, x, dropout_p=0.1),
         (2, 3, 4), "drops elements in evaluation mode"),
        (lambda x: functional.interpolate(x, 5, mode="linear"), (2, 3), "Upsample"),
    ],
)  # fmt: skip
def test_what_has_no_rule_is_refused_by_name(
    function: Function, shape: Shape, message: str
) -> None:
    with pytest.raises(GraphError, match=message):
        captured(function, *shape)


def test_a_refusal_says_where_in_the_source_it_stands() -> None:
    with pytest.raises(GraphError, match=r'File ".*test_capture.py", line \d+'):
        captured(lambda x: torch.cumsum(x, 1).mean(0) + x.mean(0), 4)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: torch.fft.fft(x).real, "fft_fft .*has no split rule"),
        (lambda x: x.cumsum(1), "cumsum .*put it into an nn.Module"),
        (lambda x: x * torch.rand(()), "random numbers"),
        (lambda x: x + torch.rand(4), "random numbers"),
        (lambda x: x if x.sum() > 0 else -x, "cannot be traced.*values"),
        (lambda x: x * float(x.sum()), "cannot be traced"),
        (lambda x: x.long(), "long"),
    ],
)
def test_a_model_that_cannot_be_traced_is_opaque(function: Function, reason: str) -> None:
    *_, layer = captured(function, 4).layers
    assert layer.kind == "whole"
    assert layer.options["module"] == ""
    assert re.search(reason, layer.whole)
    assert re.search(r'File ".*test_capture.py", line|values', layer.whole)


@pytest.mark.parametrize(
    ("module", "shape", "message"),
    [
        (nn.MultiheadAttention(4, 2), (3, 4), "takes 3 inputs .query, key, value"),
        (Applied(lambda x, f: f(x, x, x)[0], attention=nn.MultiheadAttention(4, 2)),
         (3, 4), "batch_first=True"),
        (attending(lambda x, f: f(x, x, x)[1]), (3, 4), "result 1 is used"),
        (nn.TransformerEncoderLayer(4, 2), (3, 4), "batch_first=True"),
        (nn.LSTM(4, 2), (3, 4), "batch_first=True"),
        (nn.LSTM(4, 2, batch_first=True), (3, 4), "second dimension"),
        (nn.Softplus(beta=2), (4,), "usual 1 and 20"),
        (nn.TransformerEncoderLayer(4, 2, 6, 0.0, torch.tanh, batch_first=True),
         (3, 4), "give it as a module"),
        (nn.Sequential(nn.InstanceNorm1d(2, track_running_stats=True)), (2, 3), "would be lost"),
        (nn.Sequential(nn.CELU(inplace=True)), (4,), "use inplace=False"),
        (nn.Linear(5, 2), (4,), r"cannot be run on \[batch, 4\].*batch"),
        (nn.BatchNorm1d(5), (4,), "5 features, but 'input' has 4"),
        (nn.BatchNorm1d(4, momentum=None), (4,), "momentum=None"),
        (owning(lambda x, w: x * w.add_(1), (4,), buffer=True), (4,), "'own', a"),
        (owning(lambda x, w: w @ x, (4, 4)), (4, 3), "matmul multiplies .4, 4. and"),
        (attending(lambda x, f: f(x, x, x, key_padding_mask=torch.zeros(len(x), 3).bool())[0]),
         (3, 4), "computed from the model's input"),
        (owning(lambda _, w: w * 2, (4,)), (4,), "not depend on its inputs"),
        (nn.Embedding(7, 3, max_norm=1.0), (4,), "the model is an .* max_norm = 1, which"),
        (nn.Sequential(nn.EmbeddingBag(7, 3, max_norm=0.5)), (4,), "0 is an Emb.*0.5"),
    ],
)  # fmt: skip
def test_modules_that_would_be_wrong_are_refused(
    module: nn.Module, shape: Shape, message: str
) -> None:
    with pytest.raises(GraphError, match=message):
        capture(module, [InputSpec(shape=shape)])
