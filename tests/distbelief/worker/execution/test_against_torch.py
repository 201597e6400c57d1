"""Small nets, split over two ranks and two micro-batches, beside torch."""

import copy
import re
import sys
import types
import unittest
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from typing_extensions import override

from distbelief.core.errors import JobError
from distbelief.graph.append_loss import append_loss
from distbelief.graph.capture import InputSpec, capture
from distbelief.graph.graph import INPUT
from distbelief.plans.compiler import compile_plan
from distbelief.plans.step_graph import statistics_of
from distbelief.worker.in_process import LocalGroup
from tests.distbelief.graph.zoo.catalogue import Applied
from tests.distbelief.graph.zoo.comparison import tensors_of, whole_modules
from tests.distbelief.plans.plans import random_plan


pytestmark = pytest.mark.untraced

N_SAMPLES: Final = 4
N_STEPS: Final = 2
RATE: Final = 0.1


def check(model: nn.Module, inputs: Sequence[torch.Tensor], *, tolerance: float = 1e-8) -> None:
    """Compare outputs, loss and gradients of two steps, with an update between them.

    JobError if the model is refused.
    """
    specs = [
        InputSpec(
            shape=tuple(x.shape[1:]),
            n_values=None if x.is_floating_point() else 1,
            is_mask=x.dtype == torch.bool,
        )
        for x in inputs
    ]
    graph = append_loss(capture(model, specs), "mse")
    dtype = next(model.parameters()).dtype
    # What a rank calls is not what the other side calls: either may keep something.
    modules = whole_modules(graph, copy.deepcopy(model))
    plan = random_plan(graph, np.random.default_rng(1), n_machines=2)
    group = LocalGroup(
        compiled=compile_plan(graph, plan, batch=N_SAMPLES, n_machines=2),
        dtype=dtype,
        micro_batches=1 if statistics_of(graph) else 2,
        modules=modules,
        outputs=frozenset(graph.outputs),
        loss=graph.outputs[-1],
    )
    names = [layer.name for layer in graph.layers if layer.kind == INPUT]
    output = graph.outputs[0]
    for step in range(N_STEPS):
        tensors = {name: x.detach().clone() for name, x in tensors_of(model).items()}
        generator = torch.Generator().manual_seed(step)
        targets = torch.randn(N_SAMPLES, *graph[output].shape, generator=generator, dtype=dtype)
        found = group.step(dict(zip(names, [*inputs, targets], strict=True)), tensors)
        model.zero_grad()
        result = model(*inputs)
        loss = functional.mse_loss(result, targets)
        if not loss.isfinite():
            return  # the update has led out of the function's domain
        loss.backward()
        assert found.loss is not None
        pairs = {
            "output": (found.outputs[output], result.detach()),
            "loss": (torch.tensor(found.loss, dtype=torch.float64), loss.detach()),
        }
        gradients = {
            name: torch.zeros_like(x) if x.grad is None else x.grad
            for name, x in model.named_parameters()
        }
        largest = max(float(x.abs().max()) for x in gradients.values() if x.numel())
        pairs |= {
            name: (found.gradients.get(name, torch.zeros_like(x)), x)
            for name, x in gradients.items()
        }
        for name, (one, other) in pairs.items():
            scale = largest if name in gradients else float(other.abs().max())
            torch.testing.assert_close(
                one.double(),
                other.double(),
                rtol=tolerance,
                atol=tolerance * max(scale, 1e-30),
                equal_nan=True,
                msg=partial(str.format, "step {}, {}: {}", step, name),
            )
        with torch.no_grad():
            for name, x in model.named_parameters():
                x.sub_(RATE * gradients[name] / max(1.0, largest))


def random_input(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(N_SAMPLES, *shape, generator=generator, dtype=dtype)


def check_chain(*parts: nn.Module, shape: Sequence[int]) -> None:
    """Check Linear -> parts -> Linear."""
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(shape[-1], shape[-1]), *parts, nn.Flatten()).double()
    n_features = first(random_input(*shape)).shape[1]
    check(nn.Sequential(first, nn.Linear(n_features, 3)).double(), [random_input(*shape)])


# --- pooling ---

POOLS: Final = {
    **{f"{k}Pool{n}d": (2,) for k in ("Avg", "Max") for n in (1, 2, 3)},
    **{f"LPPool{n}d": (2, 2) for n in (1, 2, 3)},
    **{f"Adaptive{k}Pool{n}d": (2,) for k in ("Avg", "Max") for n in (1, 2, 3)},
}


@pytest.mark.each_value
@pytest.mark.parametrize("name", POOLS)
@pytest.mark.parametrize("channels", [(), (2,)])
def test_pooling_with_and_without_channels_is_torchs(name: str, channels: tuple[int, ...]) -> None:
    """Without channels, the samples were taken for them in one dimension too few (23 % off)."""
    pool = getattr(nn, name)(*POOLS[name])
    check_chain(pool, shape=(*channels, *(4,) * int(name[-2])))


@pytest.mark.each_value
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", ["AdaptiveAvgPool2d", "AdaptiveMaxPool1d"])
def test_adaptive_windows_may_differ_or_be_one(name: str, size: int) -> None:
    check_chain(getattr(nn, name)(size), shape=(4,) * int(name[-2]))


# --- gradients that the forward changes ---


def hooked(x: torch.Tensor, a: nn.Module, b: nn.Module) -> object:
    h = a(x)
    h.register_hook(lambda gradient: 2 * gradient)
    return b(h)


def hooked_node(x: torch.Tensor, a: nn.Module, b: nn.Module) -> object:
    h = a(x)
    h.grad_fn.register_prehook(lambda gradients: (2 * gradients[0],))
    return b(h)


def packed(x: torch.Tensor, a: nn.Module, b: nn.Module) -> object:
    with torch.autograd.graph.saved_tensors_hooks(lambda s: s.half(), lambda s: 2 * s.double()):
        return b(a(x).tanh())


def retained(x: torch.Tensor, a: nn.Module, b: nn.Module) -> object:
    h = a(x)
    h.retain_grad()
    return b(h)


def net(function: Callable[..., object], n_outputs: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return Applied(function, a=nn.Linear(8, 8), b=nn.Linear(8, n_outputs)).double()


@pytest.mark.each_value
@pytest.mark.parametrize("function", [hooked, hooked_node, packed, retained])
@pytest.mark.parametrize("inside", [False, True])
def test_hooks_on_tensors_of_a_forward_run(
    function: Callable[..., object], *, inside: bool
) -> None:
    """They were dropped: gradients 105 % off."""
    model = net(function, 8)
    if inside:
        model = nn.Sequential(nn.Linear(8, 8), model, nn.Linear(8, 2)).double()
    check(model, [random_input(8)])


def test_a_hook_on_a_parameter_in_the_forward_is_refused() -> None:
    def function(x: torch.Tensor, a: nn.Linear, b: nn.Linear) -> object:
        a.weight.register_hook(lambda gradient: 2 * gradient)
        return b(a(x))

    with pytest.raises(JobError, match=r"'a.weight' has a hook on its gradient"):
        check(net(function), [random_input(8)])


# --- what a forward keeps ---


class Keeping(nn.Module):
    """A net with any forward, and places where that may keep something."""

    def __init__(self, function: Callable[["Keeping", torch.Tensor], object]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 3)
        self.n = 0
        self.seen: list[object] = []
        self.state: Any = None
        self.function = function

    @override
    def forward(self, x: torch.Tensor) -> object:
        return self.function(self, x)


def counting(m: Keeping, x: torch.Tensor) -> object:
    m.n += 1
    return m.b(m.a(x) * m.n)


def listing(m: Keeping, x: torch.Tensor) -> object:
    m.seen.append(1)
    return m.b(m.a(x) * len(m.seen))


def in_an_object(m: Keeping, x: torch.Tensor) -> object:
    if m.state is None:
        m.state = types.SimpleNamespace(n=0)
    m.state.n += 1
    return m.b(m.a(x) * m.state.n)


def recurring(m: Keeping, x: torch.Tensor) -> object:
    h = m.a(x)
    if m.state is not None:
        h = h + m.state
    m.state = h.detach()
    return m.b(h)


def recurring_in_a_list(m: Keeping, x: torch.Tensor) -> object:
    h = m.a(x) + (m.seen[-1] if m.seen else 0)
    m.seen.append(h.detach())
    return m.b(h)


def branching(m: Keeping, x: torch.Tensor) -> object:
    m.n += 1
    return m.b(m.a(x) * m.n) if x.sum() < 1e9 else x


def branching_with_state(m: Keeping, x: torch.Tensor) -> object:
    return recurring(m, x) if x.sum() < 1e9 else x


FORWARDS: Final = [
    *(counting, listing, in_an_object, recurring, recurring_in_a_list),
    *(branching, branching_with_state),
]


@pytest.mark.each_value
@pytest.mark.parametrize("function", FORWARDS)
@pytest.mark.parametrize("inside", [False, True])
def test_what_a_forward_keeps_for_the_next_is_refused(
    function: Callable[[Keeping, torch.Tensor], object], *, inside: bool
) -> None:
    """Counters were frozen when the model was captured (61 % off), states likewise."""
    model = Keeping(function)
    before = dict(vars(model))
    whole = nn.Sequential(model, nn.Linear(3, 2)) if inside else model
    with pytest.raises(JobError, match=r"the forward reads '(0\.)?(n|seen|state)[^']*', which an"):
        check(whole.double(), [random_input(8)])
    assert dict(vars(model)) == before
    assert not model.seen


def noting(m: Keeping, x: torch.Tensor) -> object:
    m.n += 1
    m.state = m.a(x)
    m.seen.append(m.state)
    return m.b(m.state)


def made_once(m: Keeping, x: torch.Tensor) -> object:
    if m.state is None or m.state.shape[0] != x.shape[1]:
        m.state = torch.arange(x.shape[1])
    return m.b(m.a(x) * m.state)


@pytest.mark.parametrize("function", [noting, made_once])
def test_what_a_forward_only_writes_and_what_it_would_make_again_may_be_kept(
    function: Callable[[Keeping, torch.Tensor], object],
) -> None:
    model = Keeping(function).double()
    check(model, [random_input(8)])


@pytest.mark.filterwarnings("ignore:.*")  # torch's own, of all that stands there
def test_quantisation_aware_training_is_refused() -> None:
    """Its observers change buffers that nobody kept: NaN, blamed on the learning rate."""
    from torch.ao import quantization  # noqa: PLC0415 -- takes a second

    inner = nn.Sequential(quantization.QuantStub(), nn.Linear(8, 3), quantization.DeQuantStub())
    inner.train().qconfig = quantization.get_default_qat_qconfig("x86")
    model = quantization.prepare_qat(inner)
    with pytest.raises(JobError, match=r"the forward changes '.*min_val', a tensor of the model"):
        check(model, [random_input(8, dtype=torch.float32)])


# --- narrow types ---

CASTS: Final[Mapping[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "bfloat16": lambda h: h.to(torch.bfloat16).to(h.dtype),
    "half": lambda h: h.half().to(h.dtype),
    "float8": lambda h: h.to(torch.float8_e4m3fn).to(h.dtype),
    "int": lambda h: h + h.int().to(h.dtype),
    "int8": lambda h: h + (100 * h).int().to(torch.int8).to(h.dtype),
    "uint8": lambda h: h + (1000 * h).long().to(torch.uint8).to(h.dtype),
    "arithmetic in bfloat16": lambda h: (h.bfloat16() * 3.1 + 0.1).to(h.dtype),
    "a view of half": lambda h: h.half().unflatten(1, (2, 4)).mT.flatten(1).to(h.dtype),
    "overflow of int8": lambda h: h + ((50 * h).to(torch.int8) * 3).to(h.dtype),
    "a sum of bfloat16": lambda h: h + h.bfloat16().sum(1, keepdim=True).to(h.dtype),
    "softmax of half": lambda h: h.half().softmax(1).to(h.dtype),
}


@pytest.mark.parametrize("name", CASTS)
def test_casts_to_narrow_types_round(name: str) -> None:
    """They were dropped."""
    check(net(lambda x, a, b: b(CASTS[name](a(x)))), [random_input(8)])


def test_a_layer_in_bfloat16_computes_in_it() -> None:
    def function(x: torch.Tensor, a: nn.Linear, b: nn.Linear) -> object:
        weight, bias = a.weight.bfloat16(), a.bias.bfloat16()
        return b(functional.linear(x.bfloat16(), weight, bias).to(x.dtype))

    check(net(function), [random_input(8)])


# --- samples that mix ---


def places(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(x.shape[0])[:, None]


MIXING: Final[Mapping[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "where": lambda h: torch.where(places(h) < 2, h, 2 * h),
    "masked_fill": lambda h: h.masked_fill(places(h) > 2, 0.0),
    "masked_fill of many": lambda h: h.masked_fill(places(h) > 200, 0.0),
    "mul": lambda h: h * places(h),
    "lerp": lambda h: torch.lerp(h, 2 * h, places(h).to(h.dtype)),
    "index_fill": lambda h: h.index_fill(0, torch.tensor([1]), 0.0),
    "index_fill beyond the noise": lambda h: h.index_fill(0, torch.tensor([3]), 0.0),
    "index_add": lambda h: h.index_add(0, torch.tensor([3]), torch.ones(1, 8).to(h.dtype)),
    "renorm": lambda h: h.renorm(2, 1, 100.0),
    "triu": lambda h: h.triu(-3),
    "index": lambda h: h[(h[:, 0] > 1e9).long()],
    "the batch size": lambda h: h / torch.full((1,), h.shape[0]),
}


@pytest.mark.parametrize("name", MIXING)
def test_samples_that_mix_are_refused(name: str) -> None:
    """Two samples of small noise did not show it: 68 % off."""
    with pytest.raises(JobError, match=r"mixes samples|depends on the batch size"):
        check(net(lambda x, a, b: b(MIXING[name](a(x)))), [random_input(8)])


def test_a_square_of_the_batch_is_computed_whole() -> None:
    def function(x: torch.Tensor, a: nn.Module, b: nn.Module) -> object:
        return b(torch.eye(x.shape[0], dtype=x.dtype) @ a(x))

    check(net(function), [random_input(8)])


def test_a_number_of_each_sample_may_choose_its_own_row() -> None:
    def function(x: torch.Tensor, a: nn.Module, b: nn.Module) -> object:
        h = a(x)
        return b(h[torch.arange(x.shape[0]), x[..., 0].argmax(1)])

    check(net(function), [random_input(5, 8)])


# --- torch's own databases ---

N_NETS: Final = 2  # of each operator and module
RANDOM: Final = re.compile(
    "rand|bernoulli|multinomial|normal|dropout|cauchy|exponential|rrelu|geometric|uniform"
)
# With the batch in front, the example's offsets end beyond it. torch does not look, and reads what
# lies there: each call gives other numbers.
UNCHECKED: Final = {"_segment_reduce_offsets"}


def databases() -> tuple[Sequence[Any], Sequence[Any]]:
    """Return torch's databases of modules and of operators."""
    # torch imports it for tests of its own.
    stub = types.ModuleType("expecttest")
    vars(stub)["TestCase"] = unittest.TestCase
    sys.modules.setdefault("expecttest", stub)
    from torch.testing._internal import common_methods_invocations, common_modules  # noqa: PLC0415 -- takes half a minute

    return common_modules.module_db, common_methods_invocations.op_db


def identity(x: torch.Tensor) -> nn.Linear:
    """Return a layer whose first output is its input: what follows gets valid numbers."""
    layer = nn.Linear(x.shape[-1], x.shape[-1])
    nn.init.eye_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer.double()


class Net(nn.Module):
    """Linear -> a function of samples, or of all -> Linear."""

    def __init__(self, function: Callable[..., object], *inputs: torch.Tensor) -> None:
        super().__init__()
        self.first = identity(inputs[0])
        self.function = function  # a submodule, if it is a module
        self.last: nn.Module = nn.Identity()
        n_features = self(*inputs).shape[1]
        torch.manual_seed(0)
        self.last = nn.Linear(n_features, 3).double()

    @override
    def forward(self, x: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        found = self.function(h, *more)
        found = found[0] if isinstance(found, tuple | list) else found
        assert isinstance(found, torch.Tensor)
        found = found.to(h.dtype)
        if found.dim() and found.shape[0] == x.shape[0]:
            last: torch.Tensor = self.last(found.flatten(1) if found.dim() > 1 else found[:, None])
            return last
        joined: torch.Tensor = self.last(h.flatten(1) * found.mean())
        return joined


Info = types.SimpleNamespace  # an entry of torch's databases


def operated(operator: Info, sample: Info, h: torch.Tensor) -> object:
    return operator.op(h, *sample.args, **sample.kwargs)


def module_of(
    info: Info, made: Info, called: Info, inputs: list[torch.Tensor]
) -> tuple[nn.Module, list[torch.Tensor]]:
    part: nn.Module = info.module_cls(*made.args, **made.kwargs).double()
    return made_of(Called(part, called.kwargs), inputs)


def made_of(
    function: Callable[..., object], inputs: list[torch.Tensor]
) -> tuple[nn.Module, list[torch.Tensor]]:
    return Net(function, *inputs), inputs


def is_sparse(x: torch.Tensor) -> bool:
    return x.layout != torch.strided


def nets_of_operators(operators: Sequence[Any]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Each operator on a stack of samples of its own, with the batch in front."""
    for operator in operators:
        if RANDOM.search(operator.name) or torch.float64 not in operator.dtypes:
            continue
        if operator.formatted_name in UNCHECKED:
            continue
        samples = operator.sample_inputs("cpu", torch.float64)
        dense = (s for s in samples if isinstance(s.input, torch.Tensor) and not is_sparse(s.input))
        plain = (s for s in dense if s.input.numel())
        for number, sample in zip(range(N_NETS), plain, strict=False):  # torch makes them lazily
            x = sample.input.detach()
            x = torch.stack([x] * N_SAMPLES) if x.dim() else x.repeat(N_SAMPLES, 1)
            x = x + 1e-3 * torch.rand(x.shape, generator=torch.Generator().manual_seed(1)).double()
            function = partial(operated, operator, sample)
            yield f"{operator.formatted_name} {number}", partial(made_of, function, [x])


def nets_of_modules(modules: Sequence[Any]) -> Iterator[tuple[str, Callable[[], Any]]]:
    for info in modules:
        found = info.module_inputs_func(
            info, device="cpu", dtype=torch.float64, requires_grad=False, training=True
        )
        for number, given in zip(range(N_NETS), found, strict=False):
            made, called = given.constructor_input, given.forward_input
            if called is None or not called.args or not isinstance(called.args[0], torch.Tensor):
                continue
            x, *more = called.args
            tensors = [t for t in more if isinstance(t, torch.Tensor)]
            if x.dim() < 2 or not x.is_floating_point() or len(tensors) < len(more):
                continue
            rows = torch.arange(N_SAMPLES) % x.shape[0]
            inputs = [t[rows] for t in (x, *tensors) if t.dim() and t.shape[0] == x.shape[0]]
            if len(inputs) < len(called.args):
                continue
            make = partial(module_of, info, made, called, inputs)
            yield f"{info.formatted_name} {number}", make


class Called(nn.Module):
    def __init__(self, part: nn.Module, words: Mapping[str, Any]) -> None:
        super().__init__()
        self.part = part
        self.words = words

    @override
    def forward(self, *inputs: torch.Tensor) -> object:
        return self.part(*inputs, **self.words)


# Why a net is refused, by a part of the sentence.
REFUSED: Final = {
    "mixes samples": "mixes samples",
    "joins samples": "mixes samples",
    "depends on the batch size": "mixes samples",
    "reads memory as it lies": "as_strided",
    "does not depend on its inputs": "no such shape or input",
    "must have the batch as its first dimension": "the batch is not in front",
    "a tensor of the model, in place": "it keeps state",
    "which an earlier call": "it keeps state",
    "averages its statistics over all steps": "it keeps state",
    "keeps running statistics": "it keeps state",
    "takes the batch as its second dimension": "the batch is not in front",
    "cannot be run on": "no such shape or input",
}


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.filterwarnings("ignore")  # of torch, about its own examples
@pytest.mark.parametrize("kind", ["modules", "operators"])
def test_what_torch_lists_is_right_or_refused(kind: str) -> None:
    """The modules that are refused, and why, are listed beside this file."""
    modules, operators = databases()
    nets = nets_of_modules(modules) if kind == "modules" else nets_of_operators(operators)
    right, refused, wrong = set[str](), list[str](), list[str]()
    for name, make in nets:
        try:
            model, inputs = make()
            model(*inputs).sum().backward()
            assert model(*inputs).isfinite().all()
        except Exception:  # noqa: BLE001 -- torch cannot do it with a batch in front
            continue
        try:
            check(model, inputs, tolerance=1e-6)
            right.add(name.rpartition(" ")[0])
        except JobError as error:
            reasons = [reason for part, reason in REFUSED.items() if part in str(error)]
            refused.append(f"{name}: {(*reasons, str(error))[0]}")
        except Exception as error:  # noqa: BLE001 -- a crash, or another result
            wrong.append(f"{name}: {type(error).__name__}: {error}")
    assert not wrong, "\n".join(wrong)
    assert len(right) > {"modules": 60, "operators": 200}[kind]
    assert {line.rpartition(": ")[2] for line in refused} <= {*REFUSED.values()}
    if kind == "modules":
        listed = Path(__file__).with_name("refused_modules.txt").read_text()
        assert refused == listed.splitlines()
