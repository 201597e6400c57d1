"""What `fit` refuses before anything starts, and what a copy of a model must be."""

import io
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

import distbelief
from distbelief.core.errors import JobError
from distbelief.job.fit import _loss, _named
from distbelief.job.given import copy_of, given
from distbelief.task.imports import OBJECTS, named


X, Y = torch.randn(12, 4), torch.zeros(12, dtype=torch.int64)
RULE = {"name": "sgd", "learning_rate": 0.1}


class Frame(dict[str, object]):
    """As far as `fit` looks, a frame of pandas."""


Frame.__module__ = "pandas.core.frame"


class Learns(nn.Module):
    """A loss with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))


class Counts(nn.Linear):
    """Has a state beside its tensors."""

    @override
    def get_extra_state(self) -> object:
        return {"n": 0}


net = nn.Linear(4, 2)


def with_the_net(outputs: Tensor, _targets: Tensor) -> Tensor:
    return torch.add(outputs.mean(), net.weight.norm())


def by_another(outputs: Tensor, targets: Tensor) -> Tensor:
    return with_the_net(outputs, targets)


class Trainer:
    """As a program has it that trains its model by itself."""

    def __init__(self) -> None:
        self.parts = {"model": net}
        self.by_closure = lambda outputs, _: outputs.mean() + self.weight.norm()

    @property
    def weight(self) -> Tensor:
        return self.parts["model"].weight

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.mse_loss(outputs, targets) + self.penalty()

    def penalty(self) -> Tensor:
        return cast("Tensor", self.weight.norm())

    def plain(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.mse_loss(outputs, targets)


class Penalised(nn.Module):
    """A loss that knows the model by way of another object."""

    def __init__(self) -> None:
        super().__init__()
        self.of = Trainer()

    @override
    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.of.loss(outputs, targets)


def half_evaluating() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 2), nn.Dropout())
    module[1].eval()
    return module


def with_one_memory(view: Callable[[Tensor], Tensor]) -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[1].weight.data = view(cast("Tensor", module[0].weight.data))
    return module


def with_itself(make: Callable[[nn.Sequential], object]) -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 2))
    module.extra = make(module)  # type: ignore[assignment] # as users do
    return module


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"model": nn.Linear}, "model is the class Linear, not an nn.Module: call it"),
        ({"model": "nets:make"}, "not an nn.Module: give the module itself"),
        ({"model": nn.LazyLinear(2)}, "has no shape yet"),
        ({"model": nn.Linear(4, 2, device="meta")}, "'weight' of the model is on the meta device"),
        ({"model": half_evaluating()}, "'1' is in evaluation mode"),
        ({"model": with_itself(lambda m: lambda: m[0])}, "attribute 'extra' of the model refers"),
        ({"model": with_itself(lambda m: partial(lambda: m[0]))}, "'extra' of the model refers"),
        ({"model": with_itself(lambda m: partial(print, m[0].weight))}, None),
        ({"model": with_itself(lambda m: [m[0], {"all": m}])}, None),
        ({"model": nn.LSTM(4, 2)}, None),
        ({"model": Counts(4, 2)}, "'the model' has an extra state"),
        ({"model": with_one_memory(lambda w: w)}, "'0.weight' and '1.weight' have the same memory"),
        ({"model": with_one_memory(Tensor.t)}, "have the same memory"),
        ({"model": with_itself(lambda _: io.StringIO().readline)}, None),
        ({"model": with_itself(lambda _: (n for n in range(3)))}, "the model cannot be copied"),
        ({"data": Frame()}, r"data is .*: give arrays, as \(frame\[columns\].to_numpy"),
        ({"data": {"x": X}}, "or a data set whose items are dictionaries"),
        ({"data": (n for n in range(3))}, r"data is a generator: give \(x, y\)"),
        ({"data": "frames.csv"}, r"data is .*: give \(x, y\)"),
        ({"data": (X, Y[:5])}, r"shape \(12, 4\) and targets of shape \(5,\): give as many"),
        ({"data": X}, "data are of Tensor: give inputs and targets"),
        ({"data": (X, np.array(["a"] * 12))}, "an array of <U1"),
        ({"test": (X, Y[:5])}, "fit, test: data are inputs of shape"),
        ({"loss": nn.MSELoss}, "loss is the class MSELoss: give a name"),
        ({"loss": Learns()}, "loss has parameters, which nobody trains"),
        ({"loss": with_the_net}, "loss refers to the model itself"),
        ({"loss": by_another}, "loss refers to the model itself"),
        ({"loss": lambda out, _: with_the_net(out, out)}, "loss refers to the model itself"),
        ({"loss": net.forward}, "loss refers to the model itself"),
        ({"loss": Trainer().loss}, "loss refers to the model itself"),
        ({"loss": Trainer().by_closure}, "loss refers to the model itself"),
        ({"loss": Penalised()}, "loss refers to the model itself"),
        ({"loss": Trainer().plain}, None),
        ({"metrics": [3]}, "a metric is 3: give a name, a function or an object"),
        ({"metrics": with_the_net}, "a metric refers to the model itself"),
        ({"rule": None}, "has neither rule nor preset"),
        ({"accumulate_grad_batches": 4}, 'give overrides={"algorithm.accumulate": 4}'),
        ({"fast_dev_run": 2}, 'in samples: give overrides={"data.train.limit": 64}'),
        ({"max_time": 60}, 'give overrides={"stop.seconds": "10 min"}'),
        ({"precision": "bf16-mixed"}, "let forward compute under torch.autocast"),
        ({"rule": torch.optim.SGD}, "rule is the class SGD: give its name and options"),
        (
            {"rule": torch.optim.SGD(net.parameters(), lr=1)},
            "rule is .*: give its name and options",
        ),
        ({"rule": {"name": "adagrd"}}, "Did you mean 'adagrad'"),
        ({"preset": "dilocco"}, "Did you mean 'diloco'"),
        ({"lr": 0.1}, "fit has no option 'lr': it is rule="),
        ({"patience": 3}, 'overrides={"stop.patience": 5}'),
        ({"overrides": {"stop.epoch": 3}}, "overrides, 'stop.epoch': .* Did you mean 'epochs'"),
        ({"overrides": {"cluster.partitions": 2}}, "no option 'partitions'.* hold whole models"),
        ({"device": "cuda"}, 'overrides={"cluster.device": "cuda"}'),
        ({"batch_size": "8"}, r'batch_size = "8": wants a whole number'),
        ({"replicas": 0}, "replicas = 0"),
        ({"callbacks": [3]}, "callback 3 has none of them"),
    ],
)
def test_it_refuses_in_one_sentence_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, changed: Mapping[str, Any], why: str | None
) -> None:
    class NoLauncher:
        def __init__(self, **_options: object) -> None:
            if why != "callback 3 has none of them":
                raise AssertionError

        def __enter__(self) -> None:
            pass

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr("distbelief.job.fit.LocalLauncher", NoLauncher)
    arguments: dict[str, Any] = {"loss": "mse", "batch_size": 4, "rule": RULE, **changed}
    model, data = arguments.pop("model", net), arguments.pop("data", (X, Y))
    with pytest.raises(JobError if why else AssertionError, match=why) as raised:
        distbelief.fit(model, data, show=False, **arguments)
    assert "\n" not in str(raised.value)
    assert not OBJECTS


def test_what_is_missing_is_named() -> None:
    with pytest.raises(JobError, match="fit: missing a required argument: 'loss'"):
        distbelief.fit(net, (X, Y), batch_size=3)  # type: ignore[call-arg] # so it says


def test_a_copy_has_the_values_and_trains_whatever_the_given_one_does() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    module.named = len  # type: ignore[assignment] # a function that refers to nothing
    first = cast("Any", module[0])
    first.method = first.extra_repr
    first.parts = [first, partial(print, first.weight)]
    copy = cast("Any", copy_of(module, user="fit"))
    assert all(part.training for part in copy.modules())
    assert not any(part.training for part in module.modules())
    for one, other in zip(module.parameters(), copy.parameters(), strict=True):
        assert torch.equal(one, other)
        assert one is not other
    assert copy[0].method.__self__ is copy[0]
    itself, called = copy[0].parts
    assert itself is copy[0]
    assert called.args[0] is copy[0].weight


def test_a_name_without_a_module_is_an_object_of_the_program_while_that_runs_its_job() -> None:
    with given({"model": net}):
        assert named(":model", table="model") is net
        with (
            pytest.raises(JobError, match="another fit is running in this program"),
            given({"model": net}),
        ):
            pass
        assert named(":model", table="model") is net
    with pytest.raises(JobError, match=r"object of the program that called distbelief\.fit"):
        named(":model", table="model")


def test_a_program_that_has_used_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distbelief.job.launch.forkserver.has_gpu", lambda: True)
    with pytest.raises(JobError, match="has used a GPU"), given({}):
        pass


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    return torch.eq(outputs.argmax(1), targets).float().mean()


class F1:
    def update(self, outputs: Tensor, targets: Tensor) -> None: ...


def test_results_name_metrics_by_class_or_function_and_none_twice() -> None:
    objects: dict[str, object] = {}
    taken = {"loss", "accuracy"}
    names = [_named(each, net, objects, taken) for each in ("accuracy", F1(), F1(), accuracy)]
    assert names == ["accuracy", ":F1", ":F11", ":accuracy1"]
    assert [*objects] == ["F1", "F11", "accuracy1"]


def test_a_loss_is_named_by_what_it_does() -> None:
    """So a run that is resumed with another one says so."""
    cross_entropy = nn.functional.cross_entropy
    losses = [
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(label_smoothing=0.1),
        cross_entropy,
        partial(cross_entropy, label_smoothing=0.1),
        lambda outputs, targets: 3 * cross_entropy(outputs, targets),
        lambda outputs, targets: 2 * cross_entropy(outputs, targets),
    ]
    names = [_loss(loss, net, {}) for loss in losses]
    assert len({*names}) == len(names)
    assert names == [_loss(loss, net, {}) for loss in losses]
    assert names[3] == ":cross_entropy[label_smoothing=0.1]"
