import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional
from typing_extensions import override

from distbelief.core.errors import JobError
from distbelief.job.run.summary import DataFacts
from distbelief.task import dry_run
from distbelief.task.data import Batch, read_batch
from distbelief.task.imports import OBJECTS, installed_imports
from distbelief.task.losses import (
    MeanMetric,
    StatefulMetric,
    higher_is_better,
    loss_function,
    own_loss,
)
from distbelief.task.task import (
    DataSpec,
    ModelSpec,
    TaskSpec,
    build_dataset,
    build_metrics,
    build_model,
    metric_names,
)
from distbelief.task.validation import check
from tests.distbelief.examples import HERE, a_sample, f1_object, mean_output


def task(  # each argument is one thing to get wrong
    *,
    model: str = "net",
    train: str = "frames",
    test: str | None = "frames",
    loss: str = "cross_entropy",
    metric: str | tuple[str, ...] | None = None,
    **arguments: object,
) -> TaskSpec:
    return TaskSpec(
        model=ModelSpec(factory=f"{HERE}:{model}", arguments=arguments),
        train=DataSpec(factory=f"{HERE}:{train}"),
        test=None if test is None else DataSpec(factory=f"{HERE}:{test}"),
        loss=loss,
        metric=metric,
    )


def refused(wrong: TaskSpec, *, batch_size: int = 16) -> str:
    with pytest.raises(JobError) as caught:
        check(wrong, batch_size)
    text = str(caught.value)
    assert "\n" not in text.partition("failed")[0]
    return text


def test_a_model_is_tried_with_the_values_that_it_begins_with(tmp_path: Path) -> None:
    """It was tried as its factory leaves it: good values of a file were refused, bad ones not."""
    path = tmp_path / "initial.safetensors"
    right = task(test=None)
    bad = {name: one * np.nan for name, one in build_model(right.model).state_dict().items()}
    save_file(bad, path)
    check(right, 16)
    model = msgspec.structs.replace(right.model, initial=str(path))
    assert "loss cross_entropy is nan" in refused(msgspec.structs.replace(right, model=model))


@pytest.mark.parametrize(
    "right",
    [
        task(),
        task(test=None),
        task(model="everything_net"),
        task(model="dropout_net", metric="top5"),
        task(loss="cross_entropy_loss"),
        task(loss=f"{HERE}:own_loss", metric=f"{HERE}:own_loss"),
    ],
)
def test_valid_tasks_pass_even_if_a_batch_is_larger_than_the_data(right: TaskSpec) -> None:
    check(right, 16)
    check(right, 1000)


def test_one_spec_builds_one_model_anywhere_and_leaves_the_random_state_alone() -> None:
    spec, before = ModelSpec(factory=f"{HERE}:net", seed=3), torch.get_rng_state()
    one, other = build_model(spec), build_model(spec)
    assert torch.equal(before, torch.get_rng_state())
    for name, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[name])


def test_the_tables_of_a_job_file_are_strict() -> None:
    with pytest.raises(msgspec.ValidationError, match="factry"):
        msgspec.convert({"factry": "a:b"}, ModelSpec)
    with pytest.raises(msgspec.ValidationError, match="'zeros'; use 'module', 'seed'"):
        msgspec.convert({"factory": "a:b", "initial": "zeros"}, ModelSpec)
    ModelSpec(factory="a:b", initial="weights.safetensors")


# ------------------------------------------------------------------ factories


def test_a_missing_module_is_named_with_paths_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend("/somewhere/else")
    with pytest.raises(JobError) as caught:
        build_model(ModelSpec(factory="nowhere.models:net"))
    assert str(caught.value).startswith(
        "[model] there is no module 'nowhere' (of 'nowhere.models'); searched: /somewhere/else, "
    )


def test_a_module_that_lacks_another_is_not_itself_missing(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path_factory.mktemp("user")
    (directory / "needs_more.py").write_text("import not_installed_here\n")
    (directory / "breaks.py").write_text("x = 1\ny = x / 0\n")
    (directory / "broken.py").write_text("def net(:\n")
    (directory / "leaves.py").write_text("import sys\nsys.exit(5)\n")
    monkeypatch.syspath_prepend(str(directory))
    (directory / "reads.py").write_text("import sys\njob = sys.argv[1]\n")
    (directory / "trains.py").write_text("import distbelief\ndistbelief.train('job.toml')\n")
    (directory / "minimizes.py").write_text(
        "import sandblaster\nsandblaster.minimize('minimizes:net', 'mse', 'minimizes:data')\n"
    )
    (directory / "serves.py").write_text(
        "import distbelief, torch\nnet = torch.nn.Linear(2, 1)\nrule = distbelief.SGD("
        "learning_rate=0.1)\ndistbelief.ParameterServer(net.parameters(), rule=rule).start()\n"
    )
    for name, claim in [
        # Regression: the process's own arguments were those of the script: "31052: there is no
        # such file"; and a script without a guard was run again by each process.
        ("reads", r"IndexError: .*\(reads.py, line 2\): is it a script\? .*under if __name__ =="),
        ("trains", r"distbelief.train is called while trains is imported.*\(trains.py, line 2\)"),
        ("minimizes", r"sandblaster.minimize is called while minimizes .*under if __name__ =="),
        ("serves", r"ParameterServer.start is called while serves .*under if __name__ =="),
        ("needs_more", "needs_more failed: .*No module named 'not_installed_here'"),
        ("breaks", r"ZeroDivisionError.*\(breaks.py, line 2\)"),
        ("broken", r"broken failed: SyntaxError: .* \(broken.py, line 1"),
        ("leaves", r"importing leaves failed: SystemExit: 5 \(leaves.py"),
    ]:
        with pytest.raises(JobError, match=claim):
            build_model(ModelSpec(factory=f"{name}:net"))


@pytest.mark.parametrize(
    ("factory", "arguments", "claim"),
    [
        ("net", {}, r"^\[model\] 'net' is no import path"),
        (f"{HERE}:conv_nett", {}, r"has no 'conv_nett'. Did you mean 'conv_net'"),
        (f"{HERE}:NOT_CALLABLE", {}, "is of type int, which cannot be called"),
        (
            f"{HERE}:net",
            {"states": 3},
            (
                rf"^\[model.arguments\] {HERE}:net takes width, hidden, n_classes: "
                r"got an unexpected keyword argument 'states'$"
            ),
        ),
        (f"{HERE}:failing", {}, "takes size: missing a required argument: 'size'. Give it"),
        (f"{HERE}:failing", {"size": 5}, r"failing failed: KeyError: 5 \(examples.py, l"),
        (f"{HERE}:exits", {}, r"exits failed: SystemExit: 3 \(examples.py, l"),
        (f"{HERE}:net", {"widht": 4}, "argument 'widht'. Did you mean 'width'"),
        (f"{HERE}:no_module", {}, "returned a list, not an nn.Module"),
        (f"{HERE}:module_class", {}, "returned the class Identity, not an nn.Module: let it r"),
        # Regression: it listed what else is in the program that the process runs.
        ("__main__:net", {}, r"cannot import the main program: write .*'file:net', and put what"),
        (f"{HERE}:lazy_net", {}, "parameter 'weight' has no shape yet"),
    ],
)
def test_a_factory_that_makes_no_model_is_named_with_the_reason(
    factory: str, arguments: dict[str, object], claim: str
) -> None:
    with pytest.raises(JobError, match=claim):
        build_model(ModelSpec(factory=factory, arguments=arguments))


class Still(nn.BatchNorm1d):
    """Keeps its statistics, also in training, as people write it."""

    @override
    def train(self, mode: bool = True) -> "Still":
        return super().train(mode=False)


def test_a_part_in_evaluation_mode_is_refused_unless_it_stays_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A job put it into training mode, without a word, and its statistics changed."""
    made: dict[str, nn.Module] = {"part": nn.BatchNorm1d(2).eval(), "still": Still(2).train()}
    for name, part in made.items():
        monkeypatch.setitem(OBJECTS, name, lambda part=part: nn.Sequential(nn.Linear(2, 2), part))
    with pytest.raises(JobError, match=r"^\[model\] :part: '1' is in evaluation mode"):
        build_model(ModelSpec(factory=":part"))
    assert not build_model(ModelSpec(factory=":still")).train()[1].training  # type: ignore[index]
    monkeypatch.setitem(OBJECTS, "whole", lambda: nn.Sequential(nn.BatchNorm1d(2)).eval())
    assert build_model(ModelSpec(factory=":whole")).train()[0].training  # type: ignore[index]


@pytest.mark.parametrize("part", [False, True])
def test_a_module_that_a_factory_returns_twice_is_refused(
    part: bool,  # noqa: FBT001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Trial steps before the start would have moved it: also if it is a part of a new one."""
    shared = nn.Linear(2, 2)
    monkeypatch.setitem(OBJECTS, "same", lambda: nn.Sequential(shared) if part else shared)
    build_model(ModelSpec(factory=":same"))
    with pytest.raises(JobError, match="that it had returned before: let each call make new"):
        build_model(ModelSpec(factory=":same"))


def test_a_factory_without_data_names_what_it_returned() -> None:
    with pytest.raises(JobError, match=r"\[data.train\] .* returned 7, not a data set"):
        build_dataset(DataSpec(factory=f"{HERE}:no_dataset"))
    with pytest.raises(JobError, match=r"\[data.test\] .* a data set of 0 samples"):
        build_dataset(DataSpec(factory=f"{HERE}:empty"), table="data.test")


def test_installed_modules_are_found_through_the_users_own(tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("")
    (tmp_path / "pack" / "nets.py").write_text(
        "import os, msgspec.json\nfrom torch import nn\nfrom pack import data\n"
        "import nowhere.to.be.found\nimport distbelief.job.trainer\nraise SystemExit(3)\n"
    )
    (tmp_path / "pack" / "data.py").write_text(
        "from pack import nets, broken\nfrom rich.console import Console\ndef f(): import zmq\n"
    )
    (tmp_path / "pack" / "broken.py").write_text("import zmq\ndef net(:\n")
    found = installed_imports(["pack.nets", "nothing"], [str(tmp_path)])
    assert set(found) == {"msgspec.json", "torch", "torch.nn", "rich.console"}


@pytest.mark.parametrize("name", ["", "a..b", "sys", "zmq.no_such_module"])
def test_a_module_that_cannot_be_found_is_left_out(name: str, tmp_path: Path) -> None:
    assert installed_imports([name], [str(tmp_path)]) == ()


def test_a_folder_without_init_ends_the_search_of_its_modules(tmp_path: Path) -> None:
    """Regression: KeyError: 'pack', before the job had begun."""
    (tmp_path / "pack" / "parts").mkdir(parents=True)
    (tmp_path / "pack" / "__init__.py").touch()
    (tmp_path / "pack" / "parts" / "nets.py").write_text("import msgspec\n")
    assert installed_imports(["pack.parts.nets"], [str(tmp_path)]) == ()


# ---------------------------------------------------------------------- check


@pytest.mark.parametrize(
    ("wrong", "claim"),
    [
        (
            task(width=5),
            (
                "layer '0' Linear(in_features=5, out_features=8, bias=True) received "
                "float32 of shape (16, 4) from [data.train]: RuntimeError: mat1 and mat2"
            ),
        ),
        (
            task(train="double_frames"),
            "received float64 of shape (16, 4) from [data.train]: RuntimeError: mat1 and mat2 must",
        ),
        (
            task(train="bad_labels"),
            (
                "[data.train] sample 13 has label 5, but the model has 2 outputs "
                "(labels 0 to 1): give it more outputs, or fix the labels"
            ),
        ),
        (task(test="bad_labels"), "[data.test] sample 13 has label 5, but the model has 2 outputs"),
        (task(train="empty"), "a data set of 0 samples"),
        (task(train="Lost"), "examples:Lost: len() of its data set failed: OSError: no index"),
        (task(train="Damaged"), "ValueError: this sample is damaged"),
        (task(train="float_labels"), "targets are float64 of shape (8,), but loss"),
        (task(train="wide_labels"), "targets are int64 of shape (8, 3), but loss cross_entropy"),
        (task(train="nan_frames"), "[data.train] sample 9 has NaN or infinite inputs"),
        (task(model="nan_net"), "is nan for samples 0, ..., whose inputs and targets"),
        (task(model="nothing_to_train"), "none of its 4 parameters requires grad"),
        (task(model="no_parameters"), "nothing to train: none of its 0 parameters"),
        (task(model="wrapped", kind="tuple"), "the model returned 0, 1: return one, call"),
        (task(model="wrapped", kind="scalar"), "returned float32 of shape () for 16 samples"),
        (task(model="wrapped", kind="detached"), "does not depend on the model's param"),
        (task(model="wrapped", kind="bug"), "bias=True): RuntimeError: a bug of the user's"),
        (task(model="embedding_net", train="tokens"), "0 to 12 from [data.train]: IndexError"),
        (task(model="embedding_net"), "received float32 of shape (16, 4) from [data.train]"),
        (
            task(model="embedding_net", train="tokens", max_norm=1.0),
            "0 is an Embedding with max_norm = 1, which rewrites rows",
        ),
        (
            task(model="embedding_net", train="tokens", n_words=13, sparse=True),
            (
                "gradient of '0.weight' is sparse, and shards take dense ones: "
                "make its nn.Embedding with sparse=False"
            ),
        ),
        (
            task(loss="mse", train="flat_targets"),
            "targets are float32 of shape (8,): let the data set return targets like the outputs",
        ),
        (task(loss="mse"), "use loss = 'cross_entropy' for labels"),
        (
            task(loss="mse", train="double_targets"),
            "targets are float64 of shape (8, 2), but the model",
        ),
        (task(loss="crossentropy"), "there is no loss 'crossentropy'"),
        (task(loss="crossentropy"), "Did you mean 'cross_entropy'?"),
        (task(loss=f"{HERE}:loss_per_sample"), "returned float32 of shape (16,)"),
        (
            task(loss=f"{HERE}:squares", train="narrow_targets"),
            "targets float32 of shape (8, 1): UserWarning: Using a target size",
        ),
        (task(loss=f"{HERE}:listing"), ": it must return a tensor"),
        (task(loss=f"{HERE}:failing_function"), "ValueError: no such thing"),
        (
            task(model="wrapped", kind="root", loss=f"{HERE}:mean_output"),
            "the gradient of 'layer.weight' is NaN",
        ),
        (task(metric="acuracy"), "Did you mean 'accuracy'?"),
        (task(metric=f"{HERE}:loss_per_sample"), "must return one number"),
        (task(metric=f"{HERE}:failing_function"), "metric tests.distbelief.ex"),
    ],
)
def test_each_mistake_gives_one_sentence(wrong: TaskSpec, claim: str) -> None:
    assert claim in refused(wrong)


def test_sparse_inputs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step of the job failed: "nbytes is not defined for sparse tensors"."""
    monkeypatch.setitem(OBJECTS, "frames", lambda: 16 * [(torch.ones(4), 0)])
    rows = torch.eye(16, 4).to_sparse(), torch.zeros(16, dtype=torch.int64)
    monkeypatch.setitem(OBJECTS, "sparse", lambda _: rows)
    train = DataSpec(factory=":frames", collate=":sparse")
    wrong = msgspec.structs.replace(task(test=None), train=train)
    assert "[data.train] inputs is a torch.sparse_coo tensor: give a dense" in refused(wrong)


def train(module: nn.Module, inputs: torch.Tensor) -> None:
    labels = torch.zeros(len(inputs), dtype=torch.int64)
    names = dry_run.Names(model="m", loss="cross_entropy", data="data.train")
    dry_run.train(module, Batch(inputs, labels), loss=nn.functional.cross_entropy, names=names)


class Beside(nn.Linear):
    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :2].clone().requires_grad_()


class Overwritten(nn.Linear):
    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = super().forward(x).exp()
        outputs: torch.Tensor = hidden * 1.0
        hidden.zero_()
        return outputs


@pytest.mark.parametrize(
    ("module", "shape", "claim"),
    [
        (nn.Linear(5, 2), (2, 4), "layer '' Linear(in_features=5, "),
        (nn.Conv2d(3, 2, 1), (2, 1, 5, 5), "received float32 of shape (2, 1, 5, 5) from [data.tr"),
        (nn.GRU(3, 2), (2, 2, 4), "GRU(3, 2) received"),
        (nn.BatchNorm1d(4), (1, 4), "from [data.train]: ValueError: Expected more than"),
        (nn.Embedding(3, 2), (2, 4), "received float32 of shape (2, 4) from [data.train]"),
        (
            nn.Sequential(nn.Linear(4, 3), nn.Linear(5, 2)),
            (2, 4),
            "received float32 of shape (2, 3) from the layers before it",
        ),
        (Beside(4, 2), (2, 4), "no parameter received a gradient"),
        (Overwritten(4, 2), (2, 4), "the backward pass of m failed"),
    ],
)
def test_the_layer_that_fails_is_named_with_what_it_received(
    module: nn.Module, shape: tuple[int, ...], claim: str
) -> None:
    with pytest.raises(JobError, match=re.escape(claim)):
        train(module, torch.zeros(shape))
    assert all(parameter.grad is None for parameter in module.parameters())


@pytest.mark.parametrize("kind", [torch.float64, torch.int64, torch.complex64])
def test_data_of_another_type_are_refused_with_the_type_to_give(kind: torch.dtype) -> None:
    """Regression: torch's words alone, as for arrays of numpy, which are float64; complex numbers
    ended the check itself."""
    claim = r"\[data.train\]: RuntimeError: mat1 and mat2 .*: let the data set return float32$"
    with pytest.raises(JobError, match=claim):
        train(nn.Linear(4, 2), torch.ones(2, 4, dtype=kind))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is")
def test_a_module_of_torchscript_trains() -> None:
    """Of a split job such a module was refused with "use one process", where it failed, too."""
    train(torch.jit.script(nn.Sequential(nn.Linear(4, 2))), torch.ones(2, 4))


def test_a_check_leaves_no_gradient_behind() -> None:
    module = build_model(ModelSpec(factory=f"{HERE}:net"))
    train(module, torch.zeros(2, 4))
    assert all(parameter.grad is None for parameter in module.parameters())


# ------------------------------------------------------ several inputs and outputs


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    @override
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> object:
        return {"logits": self.layer(x * mask), "hidden": x}


@pytest.mark.parametrize(
    ("names", "claim"),
    [
        (["x"], "have inputs.x, targets, but forward of m takes (x, mask): missing a required"),
        (["x", "msk"], "missing a required argument: 'mask'"),
        (["x", "mask", "more"], "got an unexpected keyword argument 'more'"),
    ],
)
def test_arguments_that_forward_lacks_or_rejects_are_named(names: list[str], claim: str) -> None:
    inputs = {name: torch.ones(2, 4) for name in names}
    names_of = dry_run.Names(model="m", loss="cross_entropy", data="data.train", indices=range(2))
    batch = Batch(inputs, torch.zeros(2, dtype=torch.int64))
    with pytest.raises(JobError, match=r"\[data.train\] items .*" + re.escape(claim)):
        dry_run.train(Pair(), batch, loss=loss_function("cross_entropy"), names=names_of)


def test_a_loss_with_a_name_takes_one_tensor_of_each() -> None:
    scores, labels = torch.rand(3, 2), torch.tensor([0, 1, 1])
    loss = loss_function("cross_entropy")
    expected = nn.functional.cross_entropy(scores, labels)
    for outputs in (scores, (scores,), {"hidden": labels, "logits": scores}, [None, scores]):
        assert loss(outputs, labels) == expected
    with pytest.raises(JobError, match=r"the model returned 0, 1: return one, call it logits"):
        loss((scores, scores), labels)
    with pytest.raises(JobError, match=r"the model returned a NoneType without any"):
        loss(None, labels)
    with pytest.raises(JobError, match=r"the data set gives ids, labels: return pairs .*'model'"):
        loss(scores, {"ids": labels, "labels": labels})


def test_the_loss_of_the_model_is_its_field_or_comes_first() -> None:
    loss, value = loss_function("model"), torch.ones(())
    fields = SimpleNamespace(loss=value, logits=torch.ones(3))
    named = {"logits": torch.ones(3), "loss": value}
    for outputs in (named, (value, torch.ones(3)), value, fields):
        assert loss(outputs, None) is value
    with pytest.raises(JobError, match=r"it returned logits: does the data set give the labels"):
        loss({"logits": torch.ones(3), "loss": None}, None)


# -------------------------------------------------------------------- metrics


@pytest.mark.parametrize(
    ("loss", "labels", "name"),
    [
        ("cross_entropy", None, "accuracy"),
        ("cross_entropy", False, "accuracy"),
        ("mse_loss", None, "mse"),
        # Regression: a regression model was reported with an accuracy of 9 %.
        ("a.b:own", True, "accuracy"),
        ("a.b:own", False, "mse"),
        ("model", True, "loss"),
    ],
)
def test_the_usual_metric_goes_with_loss_and_targets(
    loss: str, *, labels: bool | None, name: str
) -> None:
    sample = None
    if labels is not None:
        sample = a_sample((4,), (2,), labels=labels)
    assert metric_names(task(loss=loss), sample) == (name,)
    assert metric_names(task(loss=loss, metric="top5"), sample) == ("top5",)


def the_metric(name: str) -> MeanMetric:
    (metric,) = build_metrics(task(metric=name)).values()
    assert not isinstance(metric, StatefulMetric)
    return metric


def test_metrics_are_means_over_the_samples() -> None:
    outputs = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [1.0, 0.0]])
    accuracy = the_metric("accuracy")
    assert float(accuracy(outputs, torch.tensor([0, 1, 0, 1]))) == 0.5
    assert float(accuracy(outputs, torch.eye(2)[[0, 1, 1, 1]])) == 0.75
    assert float(accuracy(outputs[..., None], torch.tensor([[0], [1], [0], [1]]))) == 0.5
    top5, outputs = the_metric("top5"), torch.arange(10.0).repeat(3, 1)
    assert float(top5(outputs, torch.tensor([9, 5, 4]))) == pytest.approx(2 / 3)
    assert float(top5(outputs[:, :3], torch.tensor([0, 1, 2]))) == 1.0
    mse = the_metric("mse")
    assert float(mse(torch.tensor([[1.0], [3.0]]), torch.tensor([[0.0], [1.0]]))) == 2.5


class Batched:
    """A data set that reads a batch at once, and knows its content."""

    fingerprint = "of 30"

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([float(index)]), index

    def __getitems__(self, indices: list[int]) -> list[tuple[torch.Tensor, int]]:
        return [self[index] for index in indices]


def test_a_limit_leaves_the_first_samples_and_all_else_as_it_was() -> None:
    spec = DataSpec(factory=f"{__name__}:Batched", limit=7)
    few = build_dataset(spec)
    assert len(few) == 7
    targets = read_batch(few, [6, 0]).targets
    assert isinstance(targets, torch.Tensor)
    assert targets.tolist() == [6, 0]
    assert hasattr(few, "__getitems__")
    assert DataFacts.of(few) == DataFacts(n_samples=7, fingerprint="of 30")
    assert len(build_dataset(msgspec.structs.replace(spec, limit=99))) == 30
    plain = build_dataset(DataSpec(factory=f"{HERE}:Numbered", limit=7))
    assert not hasattr(plain, "__getitems__")
    assert spec.source != msgspec.structs.replace(spec, limit=8).source  # no run resumes with it


def test_metrics_are_functions_objects_and_classes() -> None:
    names = ("accuracy", f"{HERE}:f1_object", f"{HERE}:F1", f"{HERE}:f1_of_a_part", "loss")
    found = build_metrics(task(metric=names))
    assert tuple(found) == names
    kinds = [isinstance(metric, StatefulMetric) for metric in found.values()]
    assert kinds == [False, True, True, False, False]
    assert id(found[f"{HERE}:f1_object"]) != id(f1_object)  # of each evaluation its own
    with pytest.raises(JobError, match="of type str, which cannot be called"):
        build_metrics(task(metric=f"{HERE}:__name__"))


def test_a_metric_that_is_no_mean_is_refused_where_data_are_measured_in_parts() -> None:
    """An F1 of 5,000 samples was the mean of five, without a word."""

    def of(metric: str, n_samples: int) -> TaskSpec:
        test = DataSpec(factory=f"{HERE}:frames", arguments={"n_samples": n_samples})
        return msgspec.structs.replace(task(metric=f"{HERE}:{metric}"), test=test)

    with pytest.raises(JobError, match="let it be an object with update"):
        check(of("f1_of_a_part", 2000), 60)
    check(of("f1_of_a_part", 1000), 60)  # in one part
    check(of("F1", 2000), 60)
    check(of("own_accuracy", 2000), 60)


def test_a_metric_function_may_say_if_higher_is_better(monkeypatch: pytest.MonkeyPatch) -> None:
    own = f"{HERE}:mean_output"
    assert higher_is_better("accuracy")
    assert not higher_is_better("mse")
    assert higher_is_better(own)
    monkeypatch.setattr(mean_output, "higher_is_better", False, raising=False)
    assert not higher_is_better(own)


@pytest.mark.parametrize(("label", "is_right"), [(1, True), (2, False), (-1, False), (-100, True)])
def test_labels_are_those_of_the_outputs_or_ignored(label: int, *, is_right: bool) -> None:
    labels = torch.tensor([0, label])
    with (
        nullcontext() if is_right else pytest.raises(JobError, match=f"sample 8 has label {label},")
    ):
        dry_run.check_labels(labels, 2, indices=[7, 8], table="data.train")


def test_the_own_loss_of_a_model_has_one_element() -> None:
    with pytest.raises(JobError, match=r"the model's loss has shape \(3,\): it must have one"):
        own_loss({"loss": torch.ones(3), "logits": torch.ones(3, 2)}, None)


LABELS = torch.arange(12) % 3
ROWS = torch.randn(12, 4, generator=torch.Generator().manual_seed(2))


def tried(
    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    *,
    targets: torch.Tensor = LABELS,
) -> None:
    """Try a loss of scores of three classes, from a net with dropout."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3))
        names = dry_run.Names(model="m:net", loss="m:loss", data="data.train")
        for part in (nn.Sequential(net[0], net[1], net[3]), net):
            dry_run.check_mean(part, Batch(ROWS, targets), loss=function, names=names)


def contrast(rows: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """Each sample against all others of the batch: it grows with their number, and may."""
    return functional.cross_entropy(rows @ rows.T, torch.arange(len(rows)))


def covered(rows: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A mean over the labels that are not ignored."""
    return functional.cross_entropy(rows, torch.where(labels == 0, -100, labels))


def unbiased(rows: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return rows.var(0).sum()


def weighted(rows: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    weight = torch.tensor([1.0, 5.0, 0.1])
    return functional.cross_entropy(rows, labels, weight=weight) - 4.0


@pytest.mark.parametrize("function", [covered, weighted, contrast, unbiased])
def test_means_over_any_count_are_losses(function: Callable[..., torch.Tensor]) -> None:
    tried(function)
    tried(lambda outputs, targets: function(outputs, targets) * 0 + float("nan"))


def of_each(rows: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(rows, labels, reduction="none")


@pytest.mark.parametrize(
    "function",
    [
        lambda rows, labels: of_each(rows, labels).sum(),
        lambda rows, labels: of_each(rows, labels).sum() / 2,
        lambda rows, labels: -of_each(rows, labels).sum(),
        lambda rows, labels: of_each(rows, labels).mean() + 0.1 * rows.square().sum(),
        lambda rows, labels: of_each(rows, labels).sum() / len(rows) ** 0.5,
        lambda rows, labels: of_each(rows, labels).mean() / len(rows),
        lambda rows, labels: of_each(rows, labels).sum() ** 2,
    ],
)
def test_a_loss_that_depends_on_the_number_of_samples_is_refused(
    function: Callable[..., torch.Tensor],
) -> None:
    """It was accepted, and a loss that Sandblaster showed as 2.6 was about 20."""
    with pytest.raises(JobError, match=r"m:loss is .* for 8 samples and .*reduction='mean'"):
        tried(function)


class WithLoss(nn.Module):
    """Returns a loss of its own, which may want groups of some size."""

    def __init__(self, reduction: str, size: int) -> None:
        super().__init__()
        self.layer, self.reduction, self.size = nn.Linear(4, 3), reduction, size

    @override
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        if len(x) != self.size and self.size:
            raise ValueError("another number of samples")
        scores = self.layer(x)
        return {"loss": functional.cross_entropy(scores, labels, reduction=self.reduction)}


def test_a_sum_that_the_model_returns_is_refused() -> None:
    both = {"x": ROWS, "labels": LABELS}
    names = dry_run.Names(model="m:net", loss="model", data="data.train")
    for right in (WithLoss("mean", 0), WithLoss("sum", 8)):  # the other takes no other number
        dry_run.check_mean(right, Batch(both, both), loss=own_loss, names=names)
    with pytest.raises(JobError, match=r"loss model is .* for 8 samples"):
        dry_run.check_mean(WithLoss("sum", 0), Batch(both, both), loss=own_loss, names=names)
