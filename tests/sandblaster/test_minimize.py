"""`minimize`: how model, loss and data get to other processes; without processes."""

import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from scipy.optimize import Bounds
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from typing_extensions import override

import sandblaster
from distbelief.config.load import plain
from distbelief.core import files
from distbelief.core.errors import JobError, StorageError
from distbelief.job.run.directory import RunDirectory
from distbelief.supervisor.view import JobView
from distbelief.task import tensor_pairs
from distbelief.task.data import read_batch
from distbelief.task.tensor_pairs import TensorPairs
from experiments.digits.digits import images, net
from sandblaster import problem_files as pf
from sandblaster.api import CallbackWatch, MinimizeResult, best_of, minimize
from sandblaster.build import check_bounds


as_pair = partial(tensor_pairs.as_pair, user="minimize")


class Scaled(nn.Module):
    """Keeps what it was made with."""

    def __init__(self, width: int, scale: float = 1.0) -> None:
        super().__init__()
        self.width = width
        self.scale = scale
        self.inner = nn.Linear(width, width)


class Terse(nn.Module):
    """It was refused, as it does not keep its 's'."""

    def __init__(s) -> None:  # noqa: N805 -- tested
        super().__init__()
        s.inner = nn.Linear(2, 2)


class Forgetful(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)


def test_the_package_has_its_names() -> None:
    assert dir(sandblaster) == [
        "Lasso", "LatentDirichletAllocation", "MatrixFactorization", "Reason",
        "SparseLogisticRegression", "minimize", "sparse_path",
    ]  # fmt: skip
    assert sandblaster.minimize is minimize
    with pytest.raises(AttributeError, match="no attribute 'maximize'"):
        _ = sandblaster.maximize


# ------------------------------------------------------------------------- factories


def test_functions_go_by_import_path_and_partials_with_their_arguments() -> None:
    assert pf.factory_table("a:b", what="model") == {"factory": "a:b"}
    assert pf.factory_table(net, what="model") == {"factory": "experiments.digits.digits:net"}
    assert pf.factory_table(partial(net, channels=4), what="model") == {
        "factory": "experiments.digits.digits:net",
        "arguments": {"channels": 4},
    }
    assert pf.import_path(nn.functional.mse_loss, what="loss") == ("torch.nn.functional:mse_loss")


def test_empty_inputs_of_numpy_have_a_fingerprint() -> None:
    """Regression: torch refuses to view zero bytes of numpy's as another type."""
    pair = as_pair((np.zeros((4, 0), np.float32), np.zeros(4, np.float32)))
    assert pair is not None
    assert "(4, 0)" in tensor_pairs.TensorPairs(*pair).fingerprint


def test_what_cannot_be_imported_is_refused_with_what_to_do() -> None:
    def local() -> nn.Module:
        raise NotImplementedError

    with pytest.raises(JobError, match=r"model is .*local.* cannot import: give a f"):
        pf.factory_table(local, what="model")
    with pytest.raises(JobError, match=r"positional arguments \(4,\): give them by ke"):
        pf.factory_table(partial(net, 4), what="model")
    with pytest.raises(JobError, match="data is 7, which other"):
        pf.factory_table(7, what="data")
    local.__module__ = "__main__"
    with pytest.raises(JobError, match="defined in the main program"):
        pf.import_path(local, what="loss")


def test_a_loss_that_is_a_module_is_refused() -> None:
    with pytest.raises(JobError, match=r"loss is CrossEntropyLoss\(\): give torch's"):
        minimize(net, nn.CrossEntropyLoss(), partial(images, part="train"))


def test_an_unknown_option_is_refused_with_the_names_of_others() -> None:
    """Keys of a job were named, some of which `minimize` has by other names."""
    data = torch.zeros(4, 1, 8, 8), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(JobError, match=r"no option 'portin'\. Did you mean 'portion'"):
        minimize(net, "cross_entropy", data, portin=3)
    with pytest.raises(JobError, match=r"no option 'name'\. It knows .*bounds, callback"):
        minimize(net, "cross_entropy", data, name="downpour")
    with pytest.raises(JobError, match="no option 'args': data has"):
        minimize(net, "cross_entropy", data, args=(1,))
    with pytest.raises(JobError, match=r"options has no 'maxitr'\. Did you mean 'maxiter'"):
        minimize(net, "cross_entropy", data, options={"maxitr": 3})
    with pytest.raises(JobError, match="no option 'max_iterations': it is options="):
        minimize(net, "cross_entropy", data, max_iterations=3)


def test_numbers_of_numpy_are_numbers() -> None:
    """They came to the job file as np.float64(0.5), which is no TOML, or not at all."""
    data = np.zeros((4, 3)), np.zeros(4, dtype=np.int64)
    make = partial(net, channels=np.int64(3))  # type: ignore[arg-type] # tested
    with pytest.raises(JobError, match=r"minimize: tol is -0\.5; use a finite number"):
        minimize(make, "cross_entropy", data, tol=np.float64(-0.5))
    with pytest.raises(JobError, match=r"minimize: options\['maxiter'\] is 0; use 1"):
        minimize(make, "cross_entropy", data, options={"maxiter": np.int32(0)})
    assert plain({"a": (np.int8(1), [np.float32(0.5)]), "b": "c"}) == {"a": [1, [0.5]], "b": "c"}


# --------------------------------------------------------------------------- recipes


@pytest.mark.parametrize(
    "module",
    [
        nn.Linear(4, 3),
        nn.Linear(4, 3, bias=False).double(),
        net(channels=3),
        nn.Sequential(OrderedDict(a=nn.Linear(2, 2), b=nn.Sequential(nn.Tanh(), nn.ELU(0.5)))),
        nn.Sequential(nn.Conv1d(2, 4, (3,), padding="same"), nn.BatchNorm1d(4)),
        nn.Sequential(nn.Dropout(0.25), nn.LayerNorm([3, 2]), nn.LeakyReLU(0.2)),
        Scaled(3, scale=0.5),
        Terse(),
    ],
)
def test_a_module_is_rebuilt_from_its_attributes(module: nn.Module) -> None:
    arguments = json.loads(json.dumps(pf.recipe_of(module)))
    resend = pf.build(arguments["recipe"], arguments["dtype"])
    assert repr(resend) == repr(module)
    resend.load_state_dict(module.state_dict())
    assert vars(resend).keys() == vars(module).keys()


def test_a_module_that_forgets_its_arguments_is_refused() -> None:
    with pytest.raises(JobError, match="Forgetful does not keep its 'width'"):
        pf.recipe_of(Forgetful(3))


def test_a_module_that_was_changed_since_is_refused() -> None:
    changed = Scaled(3)
    changed.inner = nn.Linear(3, 4)
    with pytest.raises(JobError, match="built again it differs: Scaled"):
        pf.recipe_of(changed)
    frozen = nn.Linear(2, 2)
    frozen.bias.requires_grad_(False)  # noqa: FBT003 -- torch's
    with pytest.raises(JobError, match="other parameters are trained"):
        pf.recipe_of(frozen)
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    with pytest.raises(JobError, match=r"several types \(torch.float32, torch.float64"):
        pf.recipe_of(mixed)
    odd = nn.Linear(2, 2)
    vars(odd)["extra"] = 3
    with pytest.raises(JobError, match="differs: attribute 'extra' of the module itself"):
        pf.recipe_of(odd)


class Holding(nn.Linear):
    """Keeps an argument under another name, and more than its arguments."""

    def __init__(
        self, act: Callable[..., object] = torch.relu, scales: Sequence[float] = ()
    ) -> None:
        super().__init__(3, 2)
        self._act, self._scales = act, list(scales)
        self._square = lambda x: x**2
        self._table: dict[str, Any] = {
            "a": (torch.ones(2), np.ones(2)),
            "b": partial(torch.add, alpha=2),
        }
        self._own = self.extra_repr
        self.fixed: torch.Tensor
        self.register_buffer("fixed", torch.zeros(2), persistent=False)
        self.mean = torch.zeros(3)


def hooked(module: nn.Module) -> None:
    module.register_forward_hook(lambda *_: None)


def evaluated(module: nn.Module) -> None:
    module.eval()


CHANGES: dict[str, Callable[[Holding], object]] = {
    "attribute '_act'": lambda m: setattr(m, "_act", torch.tanh),
    "attribute '_scales'": lambda m: m._scales.append(2.0),
    "attribute '_square'": lambda m: setattr(m, "_square", lambda x: x**3),
    "attribute '_table'": lambda m: m._table["a"][0].add_(1),
    "attribute 'fixed'": lambda m: m.fixed.add_(1),
    "attribute 'mean'": lambda m: setattr(m, "mean", torch.ones(3)),
    "attribute '_forward_hooks'": hooked,
    "attribute 'forward'": lambda m: setattr(m, "forward", torch.relu),
    "in evaluation mode": evaluated,
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_module_that_another_process_would_not_make_alike_is_refused(what: str) -> None:
    """Another model was minimized, without a word."""
    module = Holding()
    pf.recipe_of(module)
    CHANGES[what](module)
    with pytest.raises(JobError, match=what):
        pf.recipe_of(nn.Sequential(module))


def test_a_module_that_shares_a_tensor_which_its_layers_do_not_is_refused() -> None:
    tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    pf.recipe_of(tied)
    vars(tied[1])["_parameters"]["weight"] = tied[0].weight
    with pytest.raises(JobError, match="other ones are shared"):
        pf.recipe_of(tied)


def test_a_module_made_of_other_modules_is_refused() -> None:
    with pytest.raises(JobError, match="Give the function that made it instead"):
        pf.recipe_of(nn.ModuleList([nn.Linear(2, 2)]))


# ------------------------------------------------------------------------ starts, bounds


def test_bounds_of_numbers_that_a_type_lacks_are_rounded_inwards() -> None:
    """A float32 next to 0.1 is larger: the result was out of its bounds."""
    model = nn.Linear(2, 1)
    found = pf.bounds_of(model, [(None, 0.1), (-0.1, None), (0.5, 0.5)])
    assert 0.1 - 1e-7 < found["upper.weight"][0, 0].double() <= 0.1
    assert -0.1 + 1e-7 > found["lower.weight"][0, 1].double() >= -0.1
    assert found["lower.weight"][0, 0] == -np.inf
    assert found["lower.bias"].tolist() == found["upper.bias"].tolist() == [0.5]
    every = pf.bounds_of(model, Bounds(0.0))
    assert torch.equal(every["lower.weight"], torch.zeros(1, 2))
    assert torch.equal(every["upper.bias"], torch.full((1,), torch.inf))


def test_a_frozen_parameter_out_of_its_bounds_is_refused() -> None:
    model = nn.Linear(2, 1)
    model.get_parameter("bias").requires_grad_(False).fill_(-1.0)  # noqa: FBT003 -- torch's
    assert "lower.bias" not in pf.bounds_of(model, Bounds(-2.0))
    with pytest.raises(JobError, match="bias is frozen out of its bounds"):
        pf.bounds_of(model, Bounds(0.0))


def test_a_start_has_its_parameters_and_the_buffers_of_the_model() -> None:
    model = nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1))
    values = pf.values_of(model, np.arange(5.0))
    assert values["0.weight"].tolist() == [[0.0, 1.0]]
    assert [values[n].item() for n in ("0.bias", "1.weight", "1.bias")] == [2.0, 3.0, 4.0]
    assert values["1.running_var"].item() == 1.0
    assert model.get_parameter("1.weight").item() == 1.0  # the model keeps its own


def test_equal_bounds_fix_an_element_also_at_a_number_that_its_type_lacks() -> None:
    """Rounded inwards, 0.1 and 0.1 cross in float32: they were refused as if they had crossed."""
    found = pf.bounds_of(nn.Linear(1, 1), [(0.1, 0.1), (0.1, 0.1 + 1e-12)])
    for name in ("weight", "bias"):
        assert found[f"lower.{name}"].item() == found[f"upper.{name}"].item() == np.float32(0.1)


def test_a_start_is_within_bounds_before_the_loss_is_tried_there() -> None:
    """The logarithm of a loss was tried at -1, and refused, though all of [0.5, inf) is fine."""
    model = nn.Linear(2, 1)
    bounds = [(0.5, None), (None, None), (None, -0.5)]
    problem = pf.Problem(model, (torch.zeros(1, 2), torch.zeros(1, 1)), x0=-ONES, bounds=bounds)
    assert problem.values is not None
    assert problem.values["weight"].tolist() == [[0.5, -1.0]]
    assert problem.values["bias"].tolist() == [-1.0]


@pytest.mark.parametrize("pair", [(1e300, None), (None, -1e300), (1e300, 1e300)])
def test_bounds_beyond_a_type_are_refused(pair: tuple[float | None, float | None]) -> None:
    """The parameter was moved to infinity."""
    with pytest.raises(JobError, match=r"bounds of 'bias' have -?1e\+300 at \[0\], beyond torch.f"):
        pf.bounds_of(nn.Linear(1, 1), [(-1e300, 1e300), pair])


ONES = np.ones(3)


@pytest.mark.parametrize(
    ("x0", "text"),
    [
        ("ones", "x0 is 'ones': use n finite numbers"),
        ([[1.0, 2.0], [1.0]], r"x0 is \[\[1.0, 2.0\], \[1.0\]\]: use n finite"),
        (ONES * 1j, "x0 is array"),
        ([1.0, np.nan, 1.0], "x0 has nan in it"),
        (np.ones((1, 1, 3)), r"x0 has shape \(1, 1, 3\)"),
        (
            [1.0, 1e39, 1.0],
            r"x0 has numbers that torch.float32 has not: 'weight' has 1e\+39 at \[0, 1\]",
        ),
        (torch.ones(2, requires_grad=True), "x0 has 2 numbers; the model has 3 parameters"),
    ],
)
def test_what_is_no_start_is_refused(x0: object, text: str) -> None:
    """numpy's and torch's own errors came out, and imaginary parts were dropped."""
    data = torch.zeros(1, 2), torch.zeros(1, 1)
    with pytest.raises(JobError, match=text):
        minimize(nn.Linear(2, 1), "mse", data, x0=x0)


def test_options_have_names() -> None:
    with pytest.raises(JobError, match="options has no 3"):
        minimize(nn.Linear(2, 1), "mse", (1, 1), options={3: 1})  # type: ignore[dict-item]


def searched(model: object, start: object) -> MinimizeResult:
    """Search where only 1 is a number, and leave a buffer of its own."""
    assert isinstance(model, nn.BatchNorm1d)
    assert isinstance(start, np.ndarray)
    assert model.running_mean is not None
    if start[0] == 0.0:
        raise JobError("minimize: 0 has no loss")
    assert model.running_mean.item() == 0.0  # each search begins as the first one
    model.running_mean.fill_(start[0])
    result, reason = MinimizeResult(), sandblaster.Reason.CONVERGED_GRADIENT
    result.update(x=start, fun=1.0 / start[0], message="found", model=model, reason=reason)
    return result


def test_a_start_that_fails_leaves_the_results_of_the_others() -> None:
    """An hour of searches was lost with one that began where the loss was NaN.

    And the model had the parameters of the best, with the buffers of the last.
    """
    model = nn.BatchNorm1d(1)
    best = best_of(searched, model, [ONES, ONES * 0, ONES * 2, ONES * 1.5])
    assert [best.fun, best.message] == [0.5, "found; 1 of 4 starts failed, as starts say"]
    assert best.model is model
    assert model.state_dict()["running_mean"].item() == 2.0
    failed, own = best.starts[1], best.starts[3].model
    assert (failed.message, failed.success, failed.reason) == (
        "minimize: 0 has no loss", False, None,
    )  # fmt: skip
    assert own.running_mean.item() == 1.5  # each result has a model of its own

    def interrupted(model: object, start: object) -> MinimizeResult:
        assert isinstance(start, np.ndarray)
        if start[0] == 3.0:
            raise KeyboardInterrupt
        return searched(model, start)

    model = nn.BatchNorm1d(1)
    best = best_of(interrupted, model, [ONES, ONES * 3, ONES])
    assert [best.fun, best.message] == [1.0, "found; Ctrl+C after search 1 of 3"]
    with pytest.raises(KeyboardInterrupt):
        best_of(interrupted, nn.BatchNorm1d(1), [ONES * 0, ONES * 3])
    model = nn.BatchNorm1d(1)
    with pytest.raises(JobError, match="0 has no loss"):
        best_of(searched, model, [ONES * 0, ONES * 0])


def test_what_the_callback_raises_leaves_the_best_of_the_starts_before() -> None:
    """It left the model as it was: all searches before it were lost."""

    def failing(model: object, start: object) -> MinimizeResult:
        assert isinstance(start, np.ndarray)
        if start[0] == 3.0:
            raise KeyError("mine")
        return searched(model, start)

    model = nn.BatchNorm1d(1)
    with pytest.raises(KeyError, match="mine") as raised:
        best_of(failing, model, [ONES, ONES * 2, ONES * 0, ONES * 3])
    assert model.state_dict()["running_mean"].item() == 2.0
    (note,) = raised.value.__notes__
    assert note.startswith("minimize: raised in search 4 of 4. The model holds the best point of")
    assert note.endswith("with loss 0.5")
    with pytest.raises(KeyError) as raised:
        best_of(failing, nn.BatchNorm1d(1), [ONES * 0, ONES * 3])
    assert not hasattr(raised.value, "__notes__")  # nothing was found before


def test_a_callback_ends_all_starts_also_after_a_search_that_has_converged() -> None:
    """A short search had converged before it could be ended, and the next one was begun."""
    watch = CallbackWatch(lambda result: result.nit == 2)

    def ended(model: object, start: object) -> MinimizeResult:
        watch.begin()
        assert isinstance(start, np.ndarray)
        result = searched(model, start)
        result.update(nit=int(start[0]))
        watch.end(result)
        return result

    best = best_of(ended, nn.BatchNorm1d(1), [ONES, ONES * 2, ONES * 3], watch)
    assert [one.nit for one in best.starts] == [1, 2]


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        ({"lower.wight": torch.zeros(1, 2)}, r"has 'lower.wight'.* Did you mean 'weight'"),
        ({"least.weight": torch.zeros(1, 2)}, "use lower.NAME and upper.NAME"),
        ({"lower.weight": torch.zeros(2)}, r"shape \[2\], and the parameter \[1, 2\]"),
        ({"lower.bias": torch.tensor([1.0]), "upper.bias": torch.zeros(1)}, "of 'bias' some el"),
        ({"upper.bias": torch.tensor([torch.nan])}, "of 'bias' some element"),
        (None, "cannot read .*bounds"),
    ],
)
def test_a_file_that_has_no_bounds_of_the_model_is_refused(
    tmp_path: Path, tensors: dict[str, torch.Tensor] | None, text: str
) -> None:
    path = tmp_path / "bounds.safetensors"
    if tensors is not None:
        save_file(tensors, path)
    with pytest.raises(JobError, match=text):
        check_bounds(str(path), nn.Linear(2, 1))


def test_a_result_is_shown_on_one_screen() -> None:
    """A thousand iterations filled many."""
    result = MinimizeResult()
    result.update(fun=1.0, curve=[{"nit": n} for n in range(1000)], starts=[MinimizeResult()])
    shown = " ".join(repr(result).split())
    assert shown == "fun: 1.0 curve: <1000 iterations> starts: <1 results>"


# ------------------------------------------------------------------------------ data


def test_tensors_go_through_a_file(tmp_path: Path) -> None:
    inputs, targets = torch.randn(7, 2), torch.arange(7)
    pair = as_pair(TensorDataset(inputs, targets))
    assert pair is not None
    file = tmp_path / "pairs.safetensors"
    pf.write_pairs(file, pair)
    data = pf.pairs(str(file))
    assert len(data) == 7
    assert torch.equal(data[3][0], inputs[3])
    for indices in ([2, 3, 4], [4, 2, 2], [0]):
        found = read_batch(data, indices).tensors()
        assert torch.equal(found["inputs",], inputs[indices])
        assert torch.equal(found["targets",], targets[indices])
    assert data.fingerprint == pf.pairs(str(file)).fingerprint
    pf.write_pairs(file, (inputs + 1, targets))
    assert data.fingerprint != pf.pairs(str(file)).fingerprint


def test_arrays_are_data_too_and_one_may_be_both(tmp_path: Path) -> None:
    array = np.linspace(0.0, 1.0, 6).reshape(3, 2)
    pair = as_pair([array, array])
    assert pair is not None
    file = tmp_path / "pairs.safetensors"
    pf.write_pairs(file, pair)
    inputs, targets = pf.pairs(str(file))[2]
    assert inputs.tolist() == targets.tolist() == array[2].tolist()


def test_arrays_that_are_no_numbers_are_refused() -> None:
    """It was a TypeError of torch, which did not name the cause."""
    with pytest.raises(JobError, match="data is an array of <U1, which torch does"):
        as_pair((np.array(["a", "b"]), np.zeros(2)))


def test_arrays_of_another_byte_order_are_data_too() -> None:
    """Regression: a bare ValueError of torch."""
    array = np.arange(6, dtype=np.float32).reshape(3, 2)
    pair = as_pair((array.astype(">f4"), array.astype("<i8")))
    assert pair is not None
    assert torch.equal(pair[0], torch.from_numpy(array))


def test_data_that_are_no_pair_of_dense_tensors_are_refused() -> None:
    """Regression: errors of torch, or that other processes cannot import an array."""
    x = torch.ones(3, 2)
    for data in (x.numpy(), (x, x, x), (x, [1, 2, 3]), TensorDataset(x)):
        with pytest.raises(JobError, match=r"data are of .*: give inputs and targets, as two"):
            as_pair(data)
    for wrong in (x.to("meta"), x.to_sparse()):
        with pytest.raises(JobError, match="give a dense tensor"):
            as_pair((wrong, x))


def test_what_is_no_pair_of_tensors_is_left_to_others() -> None:
    assert as_pair("a:b") is None
    assert as_pair((1, 2)) is None
    with pytest.raises(JobError, match=r"shape \(3, 1\) and targets of shape \(2,\)"):
        as_pair((torch.zeros(3, 1), torch.zeros(2)))


class Louder(TensorDataset):
    """A usual way to transform samples."""

    @override
    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        inputs, targets = self.tensors
        return 10.0 * inputs[index], targets[index]


class Shorter(TensorDataset):
    @override
    def __len__(self) -> int:
        return 2


def test_a_tensor_dataset_that_reads_samples_its_own_way_is_no_pair_of_tensors() -> None:
    """Regression: `fit` and `minimize` took its tensors, and its transform never ran."""
    x = torch.ones(3, 2)
    for kind in (Louder, Shorter):
        assert as_pair(kind(x, x)) is None
    with pytest.raises(JobError, match="which other processes cannot import"):
        minimize(nn.Linear(2, 2), "mse", Louder(x, x))


def test_a_batch_is_a_copy_of_the_data_also_of_samples_in_a_row() -> None:
    """Regression: a model that changes its inputs in place changed the data of later steps."""
    data = TensorPairs(torch.ones(4, 2), torch.ones(4))
    for indices in ([1, 2], [3], [2, 0]):
        for part in read_batch(data, indices).tensors().values():
            part.mul_(2.0)
    assert all(bool((part == 1.0).all()) for part in data.tensors)


# ------------------------------------------------------------------------------ files


def test_two_calls_with_one_directory_have_files_of_their_own(tmp_path: Path) -> None:
    """The second wrote its data into the first one's file, which was still read."""
    wanted = tmp_path / "digits"
    with pf.own_problem(wanted, resumes=False) as first:
        pf.Problem(net, (torch.zeros(2), torch.zeros(2))).write(first, resumes=False)
        first_data = pf.pairs(str(pf.problem_of(first) / "train.safetensors"))
        assert first == wanted
        with pf.own_problem(wanted, resumes=False) as second:
            assert second == tmp_path / "digits.2"
            pf.Problem(net, (torch.ones(3),) * 2).write(second, resumes=False)
        assert len(first_data) == 2
        (first / "job.toml").parent.mkdir()
        (first / "job.toml").touch()  # it runs by now
        with (
            pytest.raises(StorageError, match="is still running"),
            pf.own_problem(wanted, resumes=True),
        ):
            pass
    with pf.own_problem(wanted, resumes=False) as third:  # its files are there already
        assert third == tmp_path / "digits.2"
    with pf.own_problem(wanted, resumes=True) as resumed:
        assert resumed == wanted


def test_files_that_cannot_be_written_are_reported(tmp_path: Path) -> None:
    (tmp_path / "digits.problem").touch()
    with (
        pytest.raises(StorageError, match=r"cannot make .*digits\.problem"),
        pf.own_problem(tmp_path / "digits", resumes=False),
    ):
        pass


def test_a_refused_call_leaves_nothing(tmp_path: Path) -> None:
    """It left both files: they were written before the options were looked at."""
    model, data = nn.Linear(3, 2), (torch.zeros(4, 3), torch.zeros(4))
    for options, text in (
        ({"method": "lbfgs"}, "Did you mean 'l-bfgs'"),
        ({"l2_": 0.1}, r"no option 'l2_'\. Did you mean 'l2'"),
        ({"x0": np.zeros(7)}, "x0 has 7 numbers; the model has 8 parameters"),
        ({"x0": np.full(8, np.nan)}, "x0 has nan in it: use n finite numbers"),
        ({"tol": float("nan")}, "minimize: tol is nan; use a finite number"),
        ({"options": {"gtol": np.inf}}, "minimize: gtol is inf; use a finite number"),
        ({"bounds": [(0, 1)] * 3}, "bounds has 3 pairs; the model has 8 parameters"),
        ({"bounds": 3.0}, r"bounds are not 8 pairs \(least, largest\)"),
        ({"bounds": Bounds(1.0, 0.0)}, "bounds of parameter 0 are 1.0, 0.0: use least"),
        ({"bounds": Bounds(0.0), "method": "owl-qn", "l1": 1.0}, 'use method = "l-bfgs"'),
        ({"x0": np.zeros((2, 8)), "resume": tmp_path / "run"}, "resume with several starts"),
        ({"replicas": 0}, "replicas = 0: wants"),
        ({"resume": tmp_path / "run"}, "run: there is no such directory"),
    ):
        given = {"directory": tmp_path / "run"} | options
        with pytest.raises(JobError, match=text):
            minimize(model, "mse", data, **given)
    with pytest.raises(JobError, match="loss is MSELoss"):
        minimize(model, nn.MSELoss(), data, directory=tmp_path / "run")
    assert not list(tmp_path.iterdir())


def fail(wanted: Path, *, resumes: bool, begins: bool) -> None:
    """Have a run that fails: when it is tried out, or when it has begun."""
    problem = pf.Problem(nn.Linear(3, 2), (torch.zeros(4, 3), torch.zeros(4)))
    with pf.own_problem(wanted, resumes=resumes) as directory:
        problem.write(directory, resumes=resumes)
        if begins:
            directory.mkdir(exist_ok=True)
            files.write(directory / "job.toml", b"")
        raise JobError("it cannot go on")


def test_a_run_that_was_not_begun_leaves_nothing_new(tmp_path: Path) -> None:
    """Of what only a trial of the job shows, such as an unknown loss."""
    wanted = tmp_path / "run"

    def refused(*, resumes: bool = False) -> None:
        with pytest.raises(JobError, match="it cannot go on"):
            fail(wanted, resumes=resumes, begins=False)

    refused()
    assert not list(tmp_path.iterdir())
    pf.problem_of(wanted).mkdir()
    mine = pf.problem_of(wanted) / "mine.txt"
    mine.touch()
    refused()
    assert mine.exists()
    assert not (pf.problem_of(wanted) / "train.safetensors").exists()
    mine.unlink()
    wanted.mkdir()
    (wanted / "job.toml").touch()  # a run whose files are lost
    refused(resumes=True)
    assert list(tmp_path.iterdir()) == [wanted]


def test_a_run_that_has_begun_keeps_its_files(tmp_path: Path) -> None:
    wanted = tmp_path / "run"
    for resumes in (False, True):
        with pytest.raises(JobError, match="it cannot go on"):
            fail(wanted, resumes=resumes, begins=True)
        names = sorted(path.name for path in pf.problem_of(wanted).iterdir())
        assert names == ["initial.safetensors", "lock", "train.safetensors"]


def test_a_resumed_run_keeps_its_files(tmp_path: Path) -> None:
    """Other data were written over its own before anybody looked, then refused."""
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    wanted = tmp_path / "run"
    with pf.own_problem(wanted, resumes=False):
        pf.Problem(model, (x, x)).write(wanted, resumes=False)
    kept = {path: path.read_bytes() for path in pf.problem_of(wanted).iterdir()}
    with torch.no_grad():
        model.weight += 1.0
    with pf.own_problem(wanted, resumes=True):
        pf.Problem(model, (x.numpy(), x)).write(wanted, resumes=True)
        with pytest.raises(JobError, match=r"on other data: they were crc32 .*, now th"):
            pf.Problem(model, (x + 1.0, x)).write(wanted, resumes=True)
        with pytest.raises(JobError, match=r"float32 \(4, 3\).*\(3, 3\)\. Give the same"):
            pf.Problem(model, (x[1:], x[1:])).write(wanted, resumes=True)
    assert kept == {path: path.read_bytes() for path in kept}


def test_what_a_run_has_lost_is_written_again(tmp_path: Path) -> None:
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    problem = pf.Problem(model, (x.t(), x.t()))
    initial, train = (
        pf.problem_of(tmp_path / "run") / f"{name}.safetensors" for name in ("initial", "train")
    )
    for content in (None, b"", b"no tensors at all"):
        with pf.own_problem(tmp_path / "run", resumes=True):
            if content is not None:
                initial.write_bytes(content)
                train.write_bytes(content)
            problem.write(tmp_path / "run", resumes=True)
            assert torch.equal(pf.pairs(str(train)).tensors[0], x.t())
            assert initial.stat().st_size > 20


def test_the_lock_of_a_removed_file_is_none(tmp_path: Path) -> None:
    """A refused call removes it while another may be waiting for it."""
    with pytest.MonkeyPatch.context() as patch:
        take = RunDirectory.take
        taken: list[Path] = []

        def late(path: Path) -> RunDirectory:
            lock = take(path)
            if not taken:
                (path / "lock").unlink()
            taken.append(path)
            return lock

        patch.setattr(RunDirectory, "take", late)
        with pf.own_problem(tmp_path / "run", resumes=False) as directory:
            assert directory == tmp_path / "run.2"


# ---------------------------------------------------------------------------- callback


def result_at(iteration: int) -> MinimizeResult:
    result = MinimizeResult()
    result.update(nit=iteration)
    return result


@pytest.mark.parametrize("how", [True, np.True_, StopIteration])
def test_a_callback_that_ends_the_run_is_not_called_again(how: object) -> None:
    """By StopIteration, as scipy's; a True of numpy ended nothing."""
    seen: list[float] = []

    def stop(result: MinimizeResult) -> object:
        seen.append(result.nit)
        if how is StopIteration:
            raise StopIteration
        return how

    watch = CallbackWatch(stop)
    assert not watch(JobView(phase="training"))
    for phase in ("training", "stopping"):
        for iteration in (3.0, 4.0):
            view = JobView(phase=phase, figures={"iteration": iteration})
            assert watch(view)
    watch.end(result_at(5))
    assert seen == [3]


def test_a_callback_may_take_its_argument_by_name_alone() -> None:
    """As scipy's; it failed in the first iteration."""
    seen: list[float] = []

    def by_name(*, intermediate_result: MinimizeResult) -> None:
        seen.append(intermediate_result.nit)

    CallbackWatch(by_name).end(result_at(3))
    assert seen == [3]


def test_a_callback_is_called_once_per_iteration() -> None:
    seen: list[float] = []
    watch = CallbackWatch(lambda result: seen.append(result.nit))
    for iteration in (1.0, 1.0, 2.0):
        view = JobView(phase="training", figures={"iteration": iteration})
        assert not watch(view)
    watch.end(result_at(2))
    assert seen == [1, 2]
    watch.end(result_at(3))
    assert seen == [1, 2, 3]
