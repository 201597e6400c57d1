"""Dense layers as factors: what a model's layers give, and that no use of a weight goes wrong.

Each push is decoded as its shards do it, and compared with the gradients to the bit.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import msgspec
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset
from typing_extensions import override

from distbelief.config.job import ClusterTable, StopTable
from distbelief.config.presets import expand
from distbelief.core.errors import JobError
from distbelief.parameter_server.client.factored import N_TRIES, FactoredPushes
from distbelief.parameter_server.codecs import Auto, Factors, factors
from distbelief.parameter_server.layout import Layout, PartialView
from distbelief.parameter_server.policy import ExchangePolicy, Round
from distbelief.parameter_server.rules import SGD, Adagrad, UpdateRule
from distbelief.parameter_server.tensor_copies import Pushed
from distbelief.serve.address import exchange_policy
from distbelief.simulation.faults import Kill
from distbelief.task.task import DataSpec, ModelSpec, TaskSpec
from distbelief.worker.downpour import DOWNPOUR
from distbelief.worker.downpour_settings import DownpourSettings, LockFree
from distbelief.worker.factors import LayerFactors
from distbelief.worker.local_executor import FlatModel
from distbelief.worker.member import JobMember
from sandblaster.settings import SandblasterSettings
from tests.simulation.jobs import JobCluster
from tests.simulation.test_downpour import Cluster


WIDTH = 160
WEIGHT = ("first.weight",)


class Net(nn.Module):
    """A dense layer, from which each test departs; all of its tensors have gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, 300)
        self.last = nn.Linear(300, 3)  # too small for factors of 8 samples

    @override
    def forward(self, given: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(torch.relu(self.first(given)))
        return out


@dataclass(eq=False)
class Worker:
    """One worker, its shards, and what they read of its pushes."""

    module: nn.Module
    n_shards: int = 1
    codec: Factors | Auto = field(default_factory=Factors)
    workers: int = 1
    n_samples: int = 8
    width: int = WIDTH
    n_calls: int = 1

    def __post_init__(self) -> None:
        self.model = FlatModel(self.module)
        self.layout = Layout.of(self.model.specs(), n_shards=self.n_shards)
        self.view = PartialView(self.layout, frozen=self.model.frozen)
        source = LayerFactors(
            self.module, self.model.named_tensors(), workers=self.workers, n_calls=self.n_calls
        )
        self.pushes = FactoredPushes(self.codec, self.view, source)
        self.n_pushed = 0
        self.n_words: dict[int, int] = {}

    def inputs(self, seed: int = 0) -> torch.Tensor:
        return torch.randn(
            self.n_samples, self.width, generator=torch.Generator().manual_seed(seed)
        )

    def compute(self, run: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        self.module.zero_grad()
        (run or self.module)(self.inputs(self.n_pushed)).square().sum().backward()

    def push(self) -> tuple[str, ...]:
        """Push the gradients; return the names of tensors that went as factors, of any shard."""
        for k in self.view.shards:
            copier, vector = self.view.copier(k, compact=True), self.pushes.staging(k)
            for item, gradient in enumerate(self.model.gradients):
                value = self.model.values[item]
                is_parameter = self.view.tensors[item].kind == "parameter"
                copier.put(item, gradient if is_parameter else value, vector)
            copier.zero_padding(vector)
        self.n_pushed += 1
        encoded = self.pushes.encode(self.n_pushed, is_last=False, touched=None)
        assert not isinstance(encoded, list)
        names: set[str] = set()
        for k, words in encoded.words.items():
            held = self.view.slices[k]
            self.n_words[k] = len(words)
            n = held.n_parameters
            layers, _ = factors._read(words[: len(words) - held.n_elements + n], n)
            names |= {self._name_at(k, layer.first) for layer in layers}
            # E8: the very bits, read by pieces, and at once.
            pushed, dense = Pushed.of(words, held, encoded.form), self.pushes.staging(k)
            assert pushed.dense().tobytes() == dense.tobytes()
            pieces = [pushed.gradient[i : i + 4096] for i in range(0, n, 4096)]
            for i, piece in zip(range(0, n, 4096), pieces, strict=True):
                assert len(piece) == min(4096, n - i)
            read = [pushed.gradient[i : i + 4096].tobytes() for i in range(0, n, 4096)]
            assert b"".join(read) == dense[:n].tobytes()
        return tuple(sorted(names))

    def _name_at(self, k: int, first: int) -> str:
        found = [
            self.view.tensors[tensor].name
            for tensor, shard, places in self.view.placed_parameters()
            if shard == k and any(place.start == first for place in places)
        ]
        return found[0]


def pushed(module: nn.Module, *, n_shards: int = 1, n_samples: int = 8) -> tuple[str, ...]:
    worker = Worker(module, n_shards, n_samples=n_samples)
    worker.compute()
    return worker.push()


# --- what goes as factors ---


@pytest.mark.parametrize("n_shards", [1, 2, 3])
def test_po_3_ad_5_the_shards_rebuild_the_gradient_to_the_bit(n_shards: int) -> None:
    """E11: wherever a tensor is cut."""
    worker = Worker(Net(), n_shards)
    for _ in range(3):
        worker.compute()
        assert worker.push() == WEIGHT


@pytest.mark.each_value
@pytest.mark.parametrize("n_threads", [1, 2])
@pytest.mark.parametrize(
    "shape", [(129, 65), (300, 17), (255, 100), (257, 333), (64, 64), (640, 9)]
)
def test_e_8_any_shape_has_the_bits_of_the_gradient(shape: tuple[int, int], n_threads: int) -> None:
    m, n = shape
    before = torch.get_num_threads()
    torch.set_num_threads(n_threads)
    try:
        for k in (1, 2, 3, 7):
            for n_shards in (1, 3):
                layer = nn.Sequential(nn.Linear(n, m), nn.Tanh())
                worker = Worker(layer, n_shards)
                worker.n_samples, worker.width = k, n
                worker.compute()
                found = worker.push()
                expected = ("0.weight",) if k * (m + n) < m * n else ()
                # Two threads may sum in another order, which `push` has found if so.
                assert found == expected or (n_threads > 1 and not found)
    finally:
        torch.set_num_threads(before)


def test_rows_are_counted_over_all_leading_dimensions() -> None:
    worker = Worker(Net(), n_samples=24)
    worker.compute(lambda given: worker.module(given.view(2, 12, WIDTH)))
    assert worker.push() == WEIGHT


@pytest.mark.parametrize("n_shards", [1, 2])
def test_x_3_bytes_are_those_of_the_formula(n_shards: int) -> None:
    worker = Worker(nn.Sequential(nn.Linear(WIDTH, 512, bias=False), nn.Tanh()), n_shards)
    worker.compute()
    assert worker.push() == ("0.weight",)
    k, n, rows = 8, WIDTH, 512 // n_shards
    assert worker.n_words == dict.fromkeys(range(n_shards), k * (rows + n) + 7)


def test_ad_6_more_samples_than_pay_go_as_they_are() -> None:
    most = 300 * WIDTH // (300 + WIDTH)
    assert pushed(Net(), n_samples=most - 1) == WEIGHT
    assert pushed(Net(), n_samples=most + 1) == ()


def test_po_4_only_weights_of_dense_layers_go_as_factors() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(500, WIDTH)
            self.conv = nn.Conv1d(WIDTH, 200, 1)
            self.lstm = nn.LSTM(WIDTH, WIDTH)
            self.attention = nn.MultiheadAttention(WIDTH, 2)
            self.twice = nn.Bilinear(WIDTH, 3, 80)
            self.norm = nn.BatchNorm1d(WIDTH)
            self.dense = nn.Linear(WIDTH, 300)

        @override
        def forward(self, given: torch.Tensor) -> torch.Tensor:
            x = self.norm(given) + self.words(torch.arange(len(given)))
            x, _ = self.lstm(x)
            x, _ = self.attention(x, x, x)
            y = self.conv(x.unsqueeze(-1)).sum() + self.twice(x, x[:, :3]).sum()
            out: torch.Tensor = self.dense(x) + y
            return out

    assert pushed(Mixed(), n_shards=2) == ("dense.weight",)


def test_models_of_transformers_and_of_images_go_as_factors_where_they_are_dense() -> None:
    encoder = nn.TransformerEncoderLayer(WIDTH, 2, 640, dropout=0.1, batch_first=True)
    worker = Worker(nn.TransformerEncoder(encoder, 2, enable_nested_tensor=False))
    worker.compute(lambda given: worker.module(given.view(2, 4, WIDTH)))
    found = worker.push()
    layers = [f"layers.{i}.linear{j}.weight" for i in range(2) for j in (1, 2)]
    # The attention's own projection uses its parameters without a layer.
    assert found == tuple(layers)
    images = nn.Sequential(
        nn.Unflatten(1, (1, 10, 16)),
        nn.Conv2d(1, 8, 3),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(),
        nn.Linear(8 * 4 * 7, 256),
        nn.ReLU(inplace=True),
        nn.Linear(256, 128),
    )
    assert pushed(images) == ("6.weight", "8.weight")


def test_frozen_weights_are_not_pushed() -> None:
    net = Net()
    net.first.weight.requires_grad = False
    assert pushed(net) == ()


# --- what else a weight may be used for ---


def test_a_tied_weight_goes_as_it_is() -> None:
    class Tied(Net):
        def __init__(self) -> None:
            super().__init__()
            self.back = nn.Linear(300, WIDTH)
            self.words = nn.Embedding(300, WIDTH)
            self.words.weight = self.first.weight

        @override
        def forward(self, given: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.back(self.first(given + self.words(torch.arange(len(given)))))
            return out

    assert pushed(Tied()) == ("back.weight",)


def test_a_layer_that_is_used_twice_goes_as_it_is() -> None:
    net = Net()
    worker = Worker(net)
    worker.compute(lambda given: net(given) + net.first(given.flip(0)).sum())
    assert worker.push() == ()
    worker.compute()
    assert worker.push() == WEIGHT


@pytest.mark.parametrize("scale", [1.0, 1e-7])
def test_a_weight_that_is_also_used_outside_its_layer_goes_as_it_is(scale: float) -> None:
    net = Net()
    worker = Worker(net)
    other = torch.randn(3, WIDTH)
    worker.compute(
        lambda given: net(given) + scale * functional.linear(other, net.first.weight).sum()
    )
    assert worker.push() == ()


def test_one_element_of_another_use_is_found() -> None:
    net = Net()
    worker = Worker(net, 2)
    worker.compute(lambda given: net(given) + net.first.weight[299, WIDTH - 1])
    assert worker.push() in {(), WEIGHT}  # the shard with that element gets numbers; bits are equal


def test_layers_that_compute_otherwise_go_as_they_are() -> None:
    class Doubled(nn.Linear):
        @override
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2.0 * super().forward(input)

    own = Net()
    own.first = Doubled(WIDTH, 300)
    assert pushed(own) == ()
    normed = Net()
    parametrizations.weight_norm(normed.first)
    assert pushed(normed) == ()
    pruned = Net()
    prune.random_unstructured(pruned.first, "weight", amount=0.5)
    assert pushed(pruned) == ()
    patched = Net()
    layer = patched.first
    vars(layer)["forward"] = lambda given: functional.linear(given * 2, layer.weight)
    assert pushed(patched) == ()


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm`:FutureWarning")
def test_the_older_weight_norm_goes_as_it_is() -> None:
    net = Net()
    nn.utils.weight_norm(net.first)
    assert pushed(net) == ()


def test_hooks_that_change_outputs_or_gradients_cannot_spoil_a_push() -> None:
    def times(factor: float) -> Callable[..., torch.Tensor]:
        return lambda *given: given[-1] * factor

    on_weight = Net()
    on_weight.first.weight.register_hook(times(3.0))
    assert pushed(on_weight) == ()
    on_output = Net()
    on_output.first.register_forward_hook(times(3.0))
    assert pushed(on_output) == ()
    accumulated = Net()

    def halve(weight: torch.Tensor) -> None:
        assert weight.grad is not None
        weight.grad /= 2.5

    accumulated.first.weight.register_post_accumulate_grad_hook(halve)
    assert pushed(accumulated) == ()


def test_checkpointed_layers_go_as_they_are_or_right() -> None:
    for reentrant in (False, True):
        net = Net()
        worker = Worker(net)

        def run(
            given: torch.Tensor, *, net: Net = net, reentrant: bool = reentrant
        ) -> torch.Tensor:
            out = checkpoint(net, given.requires_grad_(), use_reentrant=reentrant)
            assert isinstance(out, torch.Tensor)
            return out

        worker.compute(run)
        worker.push()  # compares


def test_gradients_of_two_passes_go_as_they_are() -> None:
    worker = Worker(Net())
    worker.compute()
    worker.module(worker.inputs(5)).sum().backward()
    assert worker.push() == ()
    loss = worker.module(worker.inputs(6)).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert worker.push() == ()


def test_a_gradient_penalty_goes_as_it_is() -> None:
    net = Net()
    worker = Worker(net)

    def run(given: torch.Tensor) -> torch.Tensor:
        out = net(given.requires_grad_())
        (slope,) = torch.autograd.grad(out.sum(), given, create_graph=True)
        penalised: torch.Tensor = out + slope.square().sum()
        return penalised

    worker.compute(run)
    assert worker.push() == ()


def test_a_skipped_step_leaves_nothing_that_a_later_push_would_send() -> None:
    worker = Worker(Net())
    worker.compute()  # and not pushed: its gradient was not finite, say
    worker.compute()
    assert worker.push() == ()
    worker.compute()
    assert worker.push() == WEIGHT


def test_other_numbers_than_float32_go_as_they_are() -> None:
    net = Net()
    worker = Worker(net)

    def run(given: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out = net(given)
        assert isinstance(out, torch.Tensor)
        return out.float()

    worker.compute(run)
    assert worker.push() == ()


def test_inputs_that_are_overwritten_meanwhile_are_not_sent() -> None:
    net = Net()
    worker = Worker(net)
    given = worker.inputs()
    worker.compute(lambda _: net(given))
    given.zero_()  # as a loader that uses its memory again
    assert worker.push() == ()


def test_functional_calls_and_vmap_go_as_they_are_or_right() -> None:
    net = Net()
    worker = Worker(net)
    weights = {name: 2 * one for name, one in net.named_parameters()}
    worker.compute(lambda given: torch.func.functional_call(net, weights, (given,)))
    worker.push()
    worker.compute(torch.func.vmap(net))
    worker.push()


def test_zeros_keep_their_signs() -> None:
    worker = Worker(Net(), 2)
    worker.compute()
    worker.push()
    for parameter in worker.module.parameters():
        assert parameter.grad is not None
        parameter.grad.fill_(-0.0)
    worker.push()


# --- what the log says ---


def test_what_goes_as_factors_is_told_once() -> None:
    worker = Worker(Net())
    worker.compute()
    worker.push()
    assert worker.pushes.news == "factors for first.weight; 3 others as they are"


def test_a_weight_whose_factors_never_fit_is_tried_a_few_times_and_named() -> None:
    net = Net()
    net.first.weight.register_hook(lambda gradient: gradient * 3)
    worker = Worker(net)
    for _ in range(N_TRIES):
        worker.compute()
        worker.push()
    assert "first.weight goes as it is" in (worker.pushes.news or "")
    net.first.weight._backward_hooks = None  # it would fit now, and is not tried
    worker.compute()
    assert worker.push() == ()


def test_po_5_many_workers_on_a_fast_link_choose_numbers() -> None:
    slow, fast = Auto(gbits=0.1), Auto(gbits=1000.0, gflops=1.0)
    assert [Worker(Net(), codec=codec).codec for codec in (slow, fast)] == [slow, fast]
    for codec, expected in ((slow, WEIGHT), (fast, ()), (Auto(), WEIGHT)):
        worker = Worker(Net(), codec=codec, workers=8)
        worker.compute()
        assert worker.push() == expected
    told = "no factors; 4 others as they are"
    worker = Worker(Net(), codec=fast, workers=8)
    worker.compute()
    worker.push()
    assert worker.pushes.news == told


# --- what is refused ---


def settled(cluster: dict[str, object] | None = None, **algorithm: object) -> DownpourSettings:
    table = {"loss": "cross_entropy", "batch_size": 8, **expand({"preset": "poseidon"})}
    config = msgspec.convert(table | algorithm, DownpourSettings)
    return DOWNPOUR.settled(config, msgspec.convert(cluster or {}, ClusterTable))


@pytest.mark.parametrize("codec", ["factors", "auto"])
@pytest.mark.parametrize(
    "keys",
    [{"send": "delta", "weight": "mean"}, {"durable": True}, {"route": "ring", "weight": "mean"}],
)
def test_v_8_exchanges_of_anything_but_gradients_are_refused(
    codec: str, keys: dict[str, object]
) -> None:
    table = {"staleness": 0, "round": {}, "push": {"codec": codec}, **keys}
    with pytest.raises(msgspec.ValidationError, match=r"use |leave "):
        msgspec.convert(table, ExchangePolicy)


def test_the_preset_is_one_mean_gradient_a_step() -> None:
    policy = settled().exchange
    assert policy == ExchangePolicy(staleness=0, round=Round(), weight="mean", push=Auto())
    assert settled().rule.name == "sgd"


@pytest.mark.parametrize(
    ("cluster", "algorithm"),
    [
        ({}, {"clip_norm": 1.0}),
        ({"partitions": 2}, {}),
        ({"device": "cuda"}, {}),
        ({"rounding": "any"}, {}),
    ],
)
def test_what_has_no_factors_or_other_bits_is_refused_with_a_way_out(
    cluster: dict[str, object], algorithm: dict[str, object]
) -> None:
    settled()
    with pytest.raises(JobError, match=r'"auto", and \[.*: (leave|use) .*or use push = '):
        settled(cluster, **algorithm)


def test_loops_of_ones_own_know_no_layers() -> None:
    for codec in ("factors", "auto"):
        with pytest.raises(JobError, match="not layers: use push="):
            exchange_policy("ParameterServer", {}, None, push={"codec": codec})
    preset = exchange_policy("ParameterServer", {}, "poseidon")
    assert preset == ExchangePolicy(staleness=0, round=Round(), weight="mean")


def test_a_batch_method_has_no_pushes_to_choose_for() -> None:
    assert "exchange" not in SandblasterSettings.__struct_fields__


# --- jobs ---


def net() -> nn.Module:
    return Net()


def samples() -> TensorDataset:
    stream = torch.Generator().manual_seed(3)
    inputs = torch.randn(96, WIDTH, generator=stream)
    return TensorDataset(inputs, torch.randint(0, 3, (96,), generator=stream))


HERE = "tests.distbelief.worker.test_factors"
TASK = TaskSpec(
    model=ModelSpec(factory=f"{HERE}:net", initial="seed"),
    train=DataSpec(factory=f"{HERE}:samples"),
    loss="cross_entropy",
)


def trained(
    exchange: ExchangePolicy,
    rule: UpdateRule,
    *,
    n_shards: int = 2,
    lockfree: LockFree | None = None,
) -> tuple[dict[str, torch.Tensor], float]:
    """Return the values of a job of two replicas, and the bytes that these pushed."""
    settings = DownpourSettings(
        loss="cross_entropy",
        batch_size=8,
        rule=rule,
        max_steps=6,
        exchange=exchange,
        lockfree=lockfree,
    )
    cluster = Cluster(TASK, settings, n_replicas=2, n_shards=n_shards)
    cluster.run()
    roles = [cluster.replica(name) for name in cluster.replicas]
    return cluster.values(), sum(role.status()[1]["bytes_out"] for role in roles)


ROUNDS = ExchangePolicy(staleness=0, round=Round(), weight="mean")


@pytest.mark.each_value
@pytest.mark.parametrize("rule", [SGD(learning_rate=0.1), Adagrad(learning_rate=0.05)])
@pytest.mark.parametrize("codec", [Factors(), Auto()])
def test_ad_5_a_job_with_factors_has_the_values_of_one_without(
    codec: Factors | Auto, rule: UpdateRule
) -> None:
    dense, n_dense = trained(ROUNDS, rule)
    for n_shards in (1, 2):
        exchange = ExchangePolicy(staleness=0, round=Round(), weight="mean", push=codec)
        values, n_bytes = trained(exchange, rule, n_shards=n_shards)
        for name, value in dense.items():
            assert value.numpy().tobytes() == values[name].numpy().tobytes()
        assert n_bytes < n_dense / 6


@pytest.mark.parametrize("lockfree", [None, LockFree(threads=2), LockFree(threads=2, samples=2)])
def test_ad_5_factors_of_several_gradients_have_their_sum_as_their_product(
    lockfree: LockFree | None,
) -> None:
    """Of three steps, and of threads without locks: the same values but for rounding."""
    rule = SGD(learning_rate=0.05)
    dense, n_dense = trained(ExchangePolicy(every=3), rule, lockfree=lockfree)
    values, n_bytes = trained(ExchangePolicy(every=3, push=Factors()), rule, lockfree=lockfree)
    for name, value in dense.items():
        torch.testing.assert_close(values[name], value, rtol=1e-5, atol=1e-6)
    assert n_bytes < n_dense / 2


def test_sums_that_are_not_the_product_of_what_was_collected_go_as_they_are() -> None:
    """A hook changes the gradient of the second of two passes by a thousandth."""
    worker = Worker(net(), n_calls=2)
    weight = cast("Net", worker.module).first.weight
    worker.compute()
    first = [one.grad for one in worker.module.parameters()]
    weight.register_hook(lambda gradient: gradient * 1.001)
    worker.compute()
    for one, before in zip(worker.module.parameters(), first, strict=True):
        assert one.grad is not None
        assert before is not None
        one.grad = one.grad + before
    assert worker.push() == ()


def has_clock(shard: JobMember, clock: int) -> bool:
    return shard.status()[1]["clock"] >= clock


@pytest.mark.parametrize("after", [1, 5, 10])
def test_e_12_a_takeover_goes_on_from_words_of_factors_with_the_same_bits(after: int) -> None:
    """Pushes under way are sent again as they were encoded; the backup has rebuilt the others."""
    settings = settled(seed=1, order="parts", max_steps=12)
    dense = msgspec.structs.replace(
        settings, exchange=msgspec.structs.replace(settings.exchange, push=None)
    )
    values = []
    for one, dies in ((dense, False), (settings, False), (settings, True)):
        cluster = JobCluster(
            stop=StopTable(), task=TASK, settings=one, shard_copies=2, host="", seed=7
        )
        cluster.cluster.run_until(cluster.is_paired)
        if dies:
            primary = cluster.copy_that_is("primary", 1)
            is_there = partial(has_clock, cluster.member(primary), after)
            cluster.cluster.run_until(is_there)
            cluster.cluster.inject(Kill(at=cluster.now, role=primary, after_actions=2))
        assert cluster.run() is None
        values.append(cluster.saved())
        assert cluster.n_samples == 2 * 12 * 8
    for name, value in values[0].items():
        for other in values[1:]:
            assert value.numpy().tobytes() == other[name].numpy().tobytes()
