"""Update rules against torch.optim, against the papers' formulas, and on several shards."""

import math
import sys
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Literal

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray
from torch.optim import Optimizer
from typing_extensions import override

from distbelief.core.vectors import Vector
from distbelief.parameter_server import rules
from distbelief.parameter_server.layout import Layout, TensorSpec
from distbelief.parameter_server.rules import (
    SGD,
    Adagrad,
    Adam,
    DelayedNesterov,
    Momentum,
    RMSprop,
    State,
    UpdateRule,
)
from distbelief.parameter_server.schedules import Constant, Cosine, InverseTime, Step
from tests.distbelief.parameter_server.pair import gather, scatter
from tests.elsewhere import answers


ElementType = Literal["float32", "float64"]
Parameter = torch.nn.Parameter
FloatVector = NDArray[np.float64]
DTYPES: tuple[ElementType, ...] = ("float32", "float64")

# Each rule, and torch's optimiser of the same kernel or the same operations.
PAIRS: list[tuple[UpdateRule, Callable[[list[Parameter]], Optimizer]]] = [
    (SGD(learning_rate=0.1), lambda w: torch.optim.SGD(w, lr=0.1, fused=True)),
    (
        SGD(learning_rate=0.1, weight_decay=0.2),
        lambda w: torch.optim.SGD(w, lr=0.1, weight_decay=0.2, fused=True),
    ),
    (
        Momentum(learning_rate=0.1, weight_decay=0.1),
        lambda w: torch.optim.SGD(w, lr=0.1, momentum=0.9, weight_decay=0.1, fused=True),
    ),
    (
        Momentum(learning_rate=0.1, momentum=0.5, dampening=0.3),
        lambda w: torch.optim.SGD(w, lr=0.1, momentum=0.5, dampening=0.3, fused=True),
    ),
    (
        Momentum(learning_rate=0.1, momentum=0.8, nesterov=True),
        lambda w: torch.optim.SGD(w, lr=0.1, momentum=0.8, nesterov=True, fused=True),
    ),
    (Adagrad(learning_rate=0.1), lambda w: torch.optim.Adagrad(w, lr=0.1, fused=True)),
    (
        Adagrad(learning_rate=0.1, weight_decay=0.1, initial_accumulator=0.5),
        lambda w: torch.optim.Adagrad(
            w, lr=0.1, weight_decay=0.1, initial_accumulator_value=0.5, fused=True
        ),
    ),
    (RMSprop(learning_rate=0.01), lambda w: torch.optim.RMSprop(w, lr=0.01, foreach=False)),
    (
        RMSprop(learning_rate=0.01, smoothing=0.9, momentum=0.5, weight_decay=0.1),
        lambda w: torch.optim.RMSprop(
            w, lr=0.01, alpha=0.9, momentum=0.5, weight_decay=0.1, foreach=False
        ),
    ),
    (Adam(learning_rate=0.01), lambda w: torch.optim.Adam(w, lr=0.01, fused=True)),
    (
        Adam(learning_rate=0.01, beta1=0.8, beta2=0.9, weight_decay=0.1),
        lambda w: torch.optim.Adam(w, lr=0.01, betas=(0.8, 0.9), weight_decay=0.1, fused=True),
    ),
    (
        Adam(learning_rate=0.01, weight_decay=0.1, decoupled_weight_decay=True),
        lambda w: torch.optim.AdamW(w, lr=0.01, weight_decay=0.1, fused=True),
    ),
]
RULES: list[UpdateRule] = [
    *(rule for rule, _ in PAIRS),
    DelayedNesterov(learning_rate=0.1, n_pushes=3, weight_decay=0.1),
]
# Classes of torch.optim by name: those with numbers in their state, with vectors that do not begin
# as zeros, with a first step of another kind, with fused kernels.
TABLES: list[tuple[str, dict[str, object]]] = [
    ("ASGD", {"lr": 0.1, "t0": 2.0, "lambd": 0.1}),
    ("Adadelta", {"weight_decay": 0.1}),
    ("Adagrad", {"lr": 0.1, "initial_accumulator_value": 0.5, "lr_decay": 0.1}),
    ("AdamW", {"lr": 0.01, "betas": (0.8, 0.9), "amsgrad": True}),
    ("AdamW", {"lr": 0.01, "fused": True}),
    ("Adamax", {"lr": 0.01}),
    ("NAdam", {"lr": 0.01, "decoupled_weight_decay": True, "weight_decay": 0.1}),
    ("RAdam", {"lr": 0.01, "betas": (0.5, 0.6)}),
    ("RMSprop", {"centered": True, "momentum": 0.5}),
    ("Rprop", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
]
OF_TORCH: list[UpdateRule] = [
    msgspec.convert({"name": name, **keywords}, UpdateRule) for name, keywords in TABLES
]
PAIRS += [
    (rule, partial(getattr(torch.optim, name), **keywords))
    for rule, (name, keywords) in zip(OF_TORCH, TABLES, strict=True)
]
SETTINGS: list[dict[str, object]] = [
    {},
    {"weight_decay": 0.05},
    {"clip_value": 0.5},
    {"clip_value": 0.5, "weight_decay": 0.05, "schedule": Cosine(n_pushes=5, n_warm_up=2)},
    {"schedule": Step(n_pushes=2, decay=0.5)},
]


def with_settings(rule: UpdateRule, chosen: dict[str, object]) -> UpdateRule:
    """Return the rule with those of the settings that it has."""
    known = {key: value for key, value in chosen.items() if hasattr(rule, key)}
    return msgspec.structs.replace(rule, **known)


def claim(rule: UpdateRule) -> str:
    return rule.name


def gradients(n: int, *, n_pushes: int = 7) -> list[FloatVector]:
    """Return pushes of all magnitudes, about a third of the elements zero."""
    return [push.copy() for push in drawn(n, n_pushes)]


@lru_cache(maxsize=16)
def drawn(n: int, n_pushes: int) -> list[FloatVector]:
    generator = np.random.default_rng(n)
    pushes = []
    for _ in range(n_pushes):
        gradient = generator.normal(size=n) * 10.0 ** generator.integers(-9, 3, n)
        gradient[generator.random(n) < 0.3] = 0.0
        pushes.append(gradient)
    return pushes


def trained(rule: UpdateRule, start: Vector, pushes: Sequence[Vector]) -> Vector:
    values = start.copy()
    state = rule.state(len(values), values.dtype)
    for clock, gradient in enumerate(pushes):
        rule.apply(values, gradient.astype(values.dtype), state, clock=clock)
    return values


def start_of(n: int, dtype: ElementType) -> Vector:
    return np.random.default_rng(n + 1).normal(size=n).astype(dtype)


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("n", "dtype", "clip_value"),
    [
        (640, "float32", None),
        (640, "float64", None),
        (640, "float32", 0.5),
        ((1 << 19) + 64, "float32", 0.5),  # three pieces
    ],
)
@pytest.mark.parametrize(("rule", "optimizer_of"), PAIRS)
def test_a_rule_gives_the_bits_of_torch_optim(
    rule: UpdateRule,
    optimizer_of: Callable[[list[Parameter]], Optimizer],
    n: int,
    dtype: ElementType,
    clip_value: float | None,
) -> None:
    schedule = Constant() if clip_value is None else InverseTime(n_pushes=2, n_warm_up=1)
    rule = msgspec.structs.replace(rule, clip_value=clip_value, schedule=schedule)
    start = start_of(n, "float32").astype(dtype)
    weights = Parameter(torch.from_numpy(start.copy()))
    optimizer = optimizer_of([weights])
    pushes = gradients(n, n_pushes=7 if clip_value is None else 3)
    for clock, gradient in enumerate(pushes):
        weights.grad = torch.from_numpy(gradient.astype(dtype))
        torch.nn.utils.clip_grad_value_([weights], clip_value or math.inf)
        optimizer.param_groups[0]["lr"] = rule.learning_rate * schedule.factor(clock)
        optimizer.step()
    expected = weights.detach().numpy()
    np.testing.assert_array_equal(trained(rule, start, pushes), expected)


@pytest.mark.parametrize("rule", [*RULES, *OF_TORCH], ids=claim)
def test_a_worker_thread_gives_the_bits_of_the_main_thread(rule: UpdateRule) -> None:
    n = 64 * 1001
    start = start_of(n, "float32")
    pushes = gradients(n, n_pushes=2)
    results: list[Vector] = []
    thread = threading.Thread(target=lambda: results.append(trained(rule, start, pushes)))
    thread.start()
    expected = trained(rule, start, pushes)
    thread.join()
    assert results[0].tobytes() == expected.tobytes()


def test_adagrad_without_epsilon_is_the_formula_of_the_paper() -> None:
    """Dean et al. 2012, section 4.1: eta_i,K = gamma / sqrt(sum_j dw_i,j^2)."""
    gamma = 0.1
    n = 640
    start = start_of(n, "float64").astype(np.float64)
    expected = start.copy()
    sums = np.zeros(n)
    for gradient in gradients(n):
        sums += gradient**2
        seen = sums > 0.0
        expected[seen] -= gamma / np.sqrt(sums[seen]) * gradient[seen]
    rule = Adagrad(learning_rate=gamma, epsilon=0.0)
    np.testing.assert_allclose(trained(rule, start, gradients(n)), expected, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("n_pushes", [1, 4])
def test_delayed_nesterov_is_nesterov_of_the_mean_of_its_pushes(n_pushes: int) -> None:
    """Liu et al. 2024, section 5 (c = 0): the sum over N pushes is one step of torch's rule."""
    n = 640
    start = start_of(n, "float64").astype(np.float64)
    weights = Parameter(torch.from_numpy(start.copy()))
    optimizer = torch.optim.SGD([weights], lr=0.1, momentum=0.9, nesterov=True)
    pushes = gradients(n, n_pushes=5 * n_pushes)
    for first in range(0, len(pushes), n_pushes):
        weights.grad = torch.from_numpy(np.mean(pushes[first : first + n_pushes], axis=0))
        optimizer.step()
    rule = DelayedNesterov(learning_rate=0.1, n_pushes=n_pushes)
    expected = weights.detach().numpy()
    np.testing.assert_allclose(trained(rule, start, pushes), expected, rtol=1e-9, atol=1e-9)


def test_between_two_moves_of_the_velocity_a_push_moves_by_its_share_alone() -> None:
    rule = DelayedNesterov(learning_rate=1.0, n_pushes=4, momentum=0.5)
    one = np.ones(64)
    moved = [0.0, *(-trained(rule, np.zeros(64), [one] * n)[0] for n in range(1, 9))]
    # A quarter of each; half the velocity, which is 1 and then 1.5, with each fourth.
    assert np.diff(moved).tolist() == [0.25, 0.25, 0.25, 0.75, 0.25, 0.25, 0.25, 1.0]


def test_adam_is_algorithm_1_of_its_paper() -> None:
    n = 640
    start = start_of(n, "float64").astype(np.float64)
    w, m, v = start.copy(), np.zeros(n), np.zeros(n)
    for t, g in enumerate(gradients(n), start=1):
        m = 0.9 * m + 0.1 * g
        v = 0.999 * v + 0.001 * g**2
        w -= 0.01 * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
    np.testing.assert_allclose(
        trained(Adam(learning_rate=0.01), start, gradients(n)), w, rtol=1e-12
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "rule",
    [
        *RULES,
        Adagrad(learning_rate=0.1, epsilon=0.0),
        RMSprop(learning_rate=0.1, epsilon=0.0),
        RMSprop(learning_rate=0.1, epsilon=0.0, momentum=0.9),
        Adam(learning_rate=0.1, epsilon=0.0),
        Adam(learning_rate=0.1, epsilon=0.0, beta1=0.0, beta2=0.0),
    ],
    ids=claim,
)
def test_zero_gradients_leave_parameters_alone(rule: UpdateRule, dtype: ElementType) -> None:
    rule = msgspec.structs.replace(rule, weight_decay=0.0)
    start = start_of(128, dtype)
    assert trained(rule, start, [np.zeros(128)] * 3).tobytes() == start.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("settings_", SETTINGS)
@pytest.mark.parametrize("rule", [*RULES, Adagrad(learning_rate=0.1, epsilon=0.0)], ids=claim)
def test_padding_stays_zero(
    rule: UpdateRule, settings_: dict[str, object], dtype: ElementType
) -> None:
    rule = with_settings(rule, settings_)
    start = start_of(128, dtype)
    pushes = gradients(128)
    start[100:] = 0.0
    for gradient in pushes:
        gradient[100:] = 0.0
    values = trained(rule, start, pushes)
    assert np.isfinite(values).all()
    assert values[100:].tobytes() == bytes(28 * values.itemsize)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "rule",
    [
        Adagrad(learning_rate=0.1, epsilon=0.0),
        RMSprop(learning_rate=0.1, epsilon=0.0),
        Adam(learning_rate=0.1, epsilon=0.0),
    ],
    ids=claim,
)
def test_gradients_whose_squares_vanish_move_parameters_by_little(
    rule: UpdateRule, dtype: ElementType
) -> None:
    """x/0 is as bad as 0/0: 1e-30 squared is zero in float32, 1e-200 in float64."""
    tiny = 1e-30 if dtype == "float32" else 1e-200
    start = np.zeros(64, dtype)
    assert np.abs(trained(rule, start, [np.full(64, tiny)])).max() < 1e-3


@given(exponent=st.integers(-11, 8))
def test_the_guard_changes_no_bit_of_adagrad_where_squares_do_not_vanish(exponent: int) -> None:
    """With one gradient the formula is gamma * sign(g), at any scale."""
    rule = Adagrad(learning_rate=0.5, epsilon=0.0)
    gradient = np.full(64, -(10.0**exponent))
    values = trained(rule, np.zeros(64, np.float32), [gradient])
    np.testing.assert_array_max_ulp(values, np.full(64, 0.5, np.float32), maxulp=1)


@st.composite
def nets(draw: st.DrawFn) -> list[TensorSpec]:
    shape = st.one_of(
        st.just(()),
        st.tuples(st.integers(0, 700)),
        st.tuples(st.integers(1, 40), st.integers(1, 40)),
    )
    shapes = draw(st.lists(shape, min_size=1, max_size=5))
    return [
        TensorSpec(
            name=f"t{i}",
            shape=shape,
            kind="buffer" if draw(st.integers(0, 4)) == 4 else "parameter",
        )
        for i, shape in enumerate(shapes)
    ]


def trained_on_shards(
    rule: UpdateRule, specs: Sequence[TensorSpec], *, n_shards: int, dtype: ElementType
) -> list[torch.Tensor]:
    """Return all tensors after a few pushes, each applied shard by shard."""
    layout = Layout.of(specs, n_shards=n_shards, dtype=dtype)
    sizes = [spec.n_elements for spec in layout.tensors]
    values = [torch.from_numpy(start_of(n, dtype)) for n in sizes]
    pushes = [gradients(n, n_pushes=4) for n in sizes]
    vectors = [np.full(layout.shard_size(k), np.nan, layout.dtype) for k in range(n_shards)]
    states: list[State] = [rule.state(layout.n_gradient(k), layout.dtype) for k in range(n_shards)]
    for k, vector in enumerate(vectors):
        gather(layout, k, values, vector)
    for clock in range(4):
        pushed = [
            torch.from_numpy(push[clock]) if spec.kind == "parameter" else None
            for spec, push in zip(layout.tensors, pushes, strict=True)
        ]
        for k, vector in enumerate(vectors):
            slot = np.full(len(vector), np.nan, layout.dtype)
            gather(layout, k, pushed, slot)
            n = layout.n_gradient(k)
            rule.apply(vector[:n], slot[:n], states[k], clock=clock)
    results = [torch.full_like(tensor, math.nan) for tensor in values]
    for k, vector in enumerate(vectors):
        scatter(layout, k, vector, results)
    return results


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", [*RULES, *OF_TORCH], ids=claim)
@settings(max_examples=12)
@given(specs=nets(), n_shards=st.integers(2, 7), settings_=st.sampled_from(SETTINGS))
def test_any_number_of_shards_gives_the_same_bits(
    rule: UpdateRule,
    dtype: ElementType,
    specs: list[TensorSpec],
    n_shards: int,
    settings_: dict[str, object],
) -> None:
    """DB-13, for Adagrad and for every other rule."""
    rule = with_settings(rule, settings_)
    whole = trained_on_shards(rule, specs, n_shards=1, dtype=dtype)
    cut = trained_on_shards(rule, specs, n_shards=n_shards, dtype=dtype)
    for one, other in zip(whole, cut, strict=True):
        assert one.numpy().tobytes() == other.numpy().tobytes()


@pytest.mark.each_value
@pytest.mark.parametrize("n_shards", [1, 5])
@pytest.mark.parametrize("rule", [*RULES, *OF_TORCH], ids=claim)
def test_shards_of_megabytes_give_the_same_bits_in_pieces_too(
    rule: UpdateRule, n_shards: int
) -> None:
    """DB-13, with shards longer and shorter than the pieces rules work in."""
    rule = msgspec.structs.replace(rule, clip_value=0.5)
    specs = [TensorSpec(name="w", shape=(701, 811)), TensorSpec(name="b", shape=(701,))]
    pieces = trained_on_shards(rule, specs, n_shards=n_shards, dtype="float32")
    [biases, weights] = [
        trained(
            rule,
            np.pad(start_of(n, "float32"), (0, -n % 64)),
            [np.pad(push, (0, -n % 64)) for push in gradients(n, n_pushes=4)],
        )[:n]
        for n in (701, 701 * 811)
    ]
    assert pieces[0].numpy().tobytes() == biases.tobytes()
    assert pieces[1].numpy().tobytes() == weights.tobytes()


@pytest.mark.parametrize("settings_", SETTINGS)
@pytest.mark.parametrize("rule", [*RULES, *OF_TORCH], ids=claim)
def test_the_gradient_is_left_as_it_was_pushed(
    rule: UpdateRule, settings_: dict[str, object]
) -> None:
    rule = with_settings(rule, settings_)
    gradient = gradients(128)[0]
    pushed = gradient.copy()
    values = np.ones(128)
    rule.apply(values, gradient, rule.state(128, np.float64), clock=3)
    assert gradient.tobytes() == pushed.tobytes()


@pytest.mark.parametrize("rule", [*RULES, *OF_TORCH], ids=claim)
def test_a_rule_continues_from_its_saved_state(rule: UpdateRule) -> None:
    """A shard restored from a snapshot gives the bits of one that never died."""
    start = start_of(128, "float32")
    pushes = [push.astype(np.float32) for push in gradients(128)]
    values = start.copy()
    state = rule.state(128, values.dtype)
    for clock, gradient in enumerate(pushes):
        if clock == 4:
            state = {name: vector.copy() for name, vector in state.items()}
            rule = msgspec.convert(msgspec.to_builtins(rule), UpdateRule)
        rule.apply(values, gradient, state, clock=clock)
    assert values.tobytes() == trained(rule, start, pushes).tobytes()


def test_a_rule_of_torch_has_the_bits_of_its_class_where_elements_differ_in_their_clocks() -> None:
    """As ranks push: each call applies one element's steps, at clocks that rise and fall."""
    nadam: UpdateRule = msgspec.convert({"name": "NAdam", "lr": 0.1}, UpdateRule)
    start, pushes = start_of(64, "float32"), gradients(64, n_pushes=20)
    early, late = start.copy(), start.copy()
    states = [nadam.state(64, "float32") for _ in range(2)]
    for clock, gradient in enumerate(pushes):
        nadam.apply(early, gradient.astype("float32"), states[0], clock=clock)
        if clock >= 15:
            again = clock - 15
            nadam.apply(late, pushes[again].astype("float32"), states[1], clock=again)
    assert early.tobytes() == trained(nadam, start, pushes).tobytes()
    assert late.tobytes() == trained(nadam, start, pushes[:5]).tobytes()


class ByNorm(Optimizer):
    """As a class that torch may get: its step divides by the norm of a tensor."""

    def __init__(self, params: list[Parameter], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @override
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(parameter.grad / parameter.grad.norm())


def test_a_rule_whose_steps_depend_on_whole_tensors_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.optim, "ByNorm", ByNorm, raising=False)
    kind = rules._torch_rule("ByNorm", ByNorm)
    with pytest.raises(ValueError, match=r"'ByNorm': its steps depend on whole tensors, .* as 'A"):
        kind(learning_rate=0.1)


def compilers_after_a_first_update() -> list[str]:
    """Return the modules of torch's compiler that a shard has imported."""
    rule: UpdateRule = msgspec.convert({"name": "AdamW"}, UpdateRule)
    w = np.zeros(64, np.float32)
    rule.apply(w, w, rule.state(64, "float32"), clock=0)
    return sorted({"torch._dynamo", "torch._inductor"} & {*sys.modules})


def test_a_rule_of_torch_does_not_import_torchs_compiler() -> None:
    """It takes six seconds of every process."""
    module = "tests.distbelief.parameter_server.test_rules"
    assert answers(module, "t.compilers_after_a_first_update()") == []


def test_a_rule_of_torch_has_the_vectors_of_its_class() -> None:
    names = [(rule.name, sorted(rule.state(0, "f"))) for rule in OF_TORCH]
    assert names == [
        ("ASGD", ["ax"]),
        ("Adadelta", ["acc_delta", "square_avg"]),
        ("Adagrad", ["sum"]),
        ("AdamW", ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]),
        ("AdamW", ["exp_avg", "exp_avg_sq"]),
        ("Adamax", ["exp_avg", "exp_inf"]),
        ("NAdam", ["exp_avg", "exp_avg_sq"]),
        ("RAdam", ["exp_avg", "exp_avg_sq"]),
        ("RMSprop", ["grad_avg", "momentum_buffer", "square_avg"]),
        ("Rprop", ["prev", "step_size"]),
        ("SGD", ["momentum_buffer"]),
        ("SGD", ["momentum_buffer"]),
    ]


def test_rules_know_whether_each_element_has_a_rate_of_its_own() -> None:
    assert {rule.name: rule.adaptive for rule in RULES} == {
        "sgd": False,
        "momentum": False,
        "delayed_nesterov": False,
        "adagrad": True,
        "rmsprop": True,
        "adam": True,
    }


@pytest.mark.parametrize("rule", [*RULES, *OF_TORCH], ids=claim)
def test_a_rule_survives_the_job_file(rule: UpdateRule) -> None:
    table = msgspec.to_builtins(rule)
    assert table["name"] == rule.name
    assert msgspec.convert(table, UpdateRule) == rule


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"name": "adagrd", "learning_rate": 1}, r"'adagrd' - at `\$.name`"),
        ({"name": "sgd"}, "missing required field `learning_rate`"),
        ({"name": "sgd", "learning_rat": 1}, "unknown field `learning_rat`"),
        ({"name": "sgd", "learning_rate": -1}, "'sgd': learning_rate is -1.0; use"),
        ({"name": "sgd", "learning_rate": math.inf}, "learning_rate is inf; use"),
        ({"name": "sgd", "learning_rate": math.nan}, "learning_rate is nan; use"),
        ({"name": "adam", "learning_rate": 1, "beta1": 1.0}, "beta1 is 1.0; use"),
        ({"name": "adam", "learning_rate": 1, "beta2": -0.1}, "beta2 is -0.1; use"),
        ({"name": "adam", "learning_rate": 1, "epsilon": -1}, "epsilon is -1.0; use"),
        (
            {"name": "adagrad", "learning_rate": 1, "initial_accumulator": -1},
            "'adagrad': initial_accumulator is -1.0; use",
        ),
        (
            {"name": "rmsprop", "learning_rate": 1, "smoothing": 1},
            "'rmsprop': smoothing is 1.0; use",
        ),
        (
            {"name": "delayed_nesterov", "learning_rate": 1, "n_pushes": 0},
            "n_pushes is 0; use 1 or more, such as the number of workers",
        ),
        (
            {"name": "sgd", "learning_rate": 1, "groups": {"b": {"name": "sgd"}}},
            r"missing required field `learning_rate` - at `\$.groups",
        ),
        (
            {"name": "momentum", "learning_rate": 1, "momentum": 1},
            "'momentum': momentum is 1.0; use",
        ),
        (
            {"name": "momentum", "learning_rate": 1, "dampening": 1.5},
            "dampening is 1.5; use a number from 0 to 1",
        ),
        (
            {"name": "momentum", "learning_rate": 1, "nesterov": True, "dampening": 0.5},
            "nesterov is true with momentum 0.9 and dampening 0.5; it needs",
        ),
        ({"name": "sgd", "learning_rate": 1, "weight_decay": -1}, "weight_decay is -1.0; use"),
        (
            {"name": "sgd", "learning_rate": 1, "clip_value": 0},
            "clip_value is 0.0; use a number above 0, or leave it out",
        ),
        (
            {"name": "sgd", "learning_rate": 1, "schedule": {"name": "cosin"}},
            r"'cosin' - at `\$.schedule.name`",
        ),
        ({"name": "SGD", "lr": 0.1, "maximize": True}, "maximize is true: leave it out"),
    ],
)
def test_a_wrong_rule_is_refused_by_name_and_value(table: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        msgspec.convert(table, UpdateRule)


def test_a_rate_in_quotes_is_refused_as_any_other_wrong_rate() -> None:
    with pytest.raises(ValueError, match=r"rule 'sgd': learning_rate is '0.1'; use a finite num"):
        SGD(learning_rate="0.1")  # type: ignore[arg-type]


def test_a_schedule_by_its_name_alone_is_refused() -> None:
    with pytest.raises(ValueError, match=r"schedule is 'cosine'; use one of .*Cosine"):
        SGD(learning_rate=1.0, schedule="cosine")  # type: ignore[arg-type]


@pytest.mark.parametrize("gradient", [np.zeros(64), np.zeros(128, np.float32)])
def test_vectors_that_do_not_fit_are_a_bug(gradient: Vector) -> None:
    rule = Adagrad(learning_rate=0.1)
    values = np.zeros(64, np.float32)
    with pytest.raises(AssertionError):
        rule.apply(values, gradient, rule.state(64, np.float32), clock=0)
    with pytest.raises(AssertionError):
        rule.apply(values, values.copy(), rule.state(128, np.float32), clock=0)


def test_a_vector_that_is_not_aligned_is_refused() -> None:
    """Its last elements would be rounded otherwise than on another shard."""
    values = np.zeros(65, np.float32)
    with pytest.raises(AssertionError):
        SGD(learning_rate=0.1).apply(values, values.copy(), {}, clock=0)
