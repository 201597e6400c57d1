"""`minimize`: a batch method over replicas and shards, with scipy's interface.

    result = sandblaster.minimize(net, "cross_entropy", (x, y), replicas=4, shards=2,
                                  bounds=scipy.optimize.Bounds(0.0), options={"maxiter": 40})
    result.fun, result.nit, result.message         # as of scipy.optimize.minimize

It writes a job, lets `distbelief.train` run it in processes of this computer, and returns
what was learned. Model, loss and data reach them without pickle (`problem_files`).
"""

import inspect
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast, final

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import OptimizeResult
from torch import nn
from torch.nn.utils import parameters_to_vector
from typing_extensions import override

from distbelief.config.job import Job
from distbelief.config.load import job_of, load_job, plain
from distbelief.core.arguments import checked
from distbelief.core.drawing import plot
from distbelief.core.errors import JobError, StorageError
from distbelief.core.files import scratch
from distbelief.core.formatting import nearest
from distbelief.core.frames import frame
from distbelief.job.callbacks import HeldCallback
from distbelief.job.launch.local import LocalLauncher
from distbelief.job.run.directory import RunDirectory
from distbelief.job.run.metrics_file import read_metrics
from distbelief.job.run.model_file import newest_snapshots
from distbelief.job.run.result import Run
from distbelief.job.run.resume import check_same, newest_checkpoint_set, store_of
from distbelief.job.trainer import run_job
from distbelief.parameter_server.layout import Layout
from distbelief.supervisor.view import JobView
from distbelief.task.imports import check_is_no_import
from distbelief.task.task import build_model, check_shapes
from distbelief.worker.local_executor import FlatModel
from sandblaster.optimizers.termination import Reason
from sandblaster.problem_files import Factory, Problem, import_path, own_problem
from sandblaster.settings import MethodName, SandblasterSettings


if TYPE_CHECKING:
    from matplotlib.figure import Figure


@final
class MinimizeResult(OptimizeResult):  # type: ignore[explicit-any] # its stub is so
    """scipy's OptimizeResult, with these fields.

    Attributes:
        x: (n,) parameters, in the order of `model.parameters()`.
        success: Whether the run converged.
        status: Index of the reason in `sandblaster.Reason`.
        message: The reason, for people.
        fun: The loss, penalties included.
        jac: (n,) its gradient there, without the part of `l1`; None if the run ended at a point
            of which the shards have saved none.
        jac_norm: Largest absolute element of it; with bounds of its part that is not blocked.
        nit: Points accepted.
        nfev: Evaluations begun, each of loss and gradient.
        njev: The same.
        reason: Why the run ended; None in `starts` for one that failed, as `message` says.
        n_wasted: Examples computed more than once.
        seconds: Duration of the job.
        model: The model with these parameters.
        directory: The run directory.
        starts: With several starts the result of each, in their order; this one is the best.
        curve: A row for each iteration: nit, fun, jac_norm, nfev and seconds of the job.
    """

    @override
    def __repr__(self) -> str:
        shown = OptimizeResult()
        shown.update(self)
        for name, of in (("curve", "iterations"), ("starts", "results")):
            if name in shown:
                shown[name] = f"<{len(shown[name])} {of}>"
        return repr(shown)

    def to_pandas(self) -> object:
        """Return `curve` as a pandas.DataFrame; JobError without pandas."""
        return frame(self.curve)

    def plot(self) -> "Figure":
        """Return a matplotlib figure of the loss over evaluations."""
        points = [(row["nfev"], row["fun"]) for row in self.curve]
        return plot({"loss": points}, x="evaluations", y="loss", title="")


INTERRUPTED = frozenset({130, 143})
"""Exit codes of runs that a signal ended."""


def interim_result(view: JobView) -> MinimizeResult:
    """Return what is known of a run in progress: no x."""
    figures = view.figures
    return _result(
        fun=view.loss,
        jac_norm=figures.get("gradient_norm"),
        nit=int(figures.get("iteration", 0)),
        nfev=int(figures.get("evaluations", 0)),
        seconds=view.seconds,
    )


def result_of(run: Run, *, module: nn.Module | None) -> MinimizeResult:
    """Return a run's result, and load it into `module`; JobError if it failed or was not saved."""
    summary, reason = run.summary, Reason.STOPPED
    if run.exit_code not in INTERRUPTED:
        found = (one for one in Reason if one.sentence == summary.stop_reason)
        reason = next(found, Reason.STOPPED)
    if summary.error is not None and reason is Reason.STOPPED:
        raise JobError(f"minimize: {summary.error}")
    figures = summary.figures
    trained = None
    with suppress(StorageError):
        trained = run.model
    if trained is None:
        unsaved = summary.error == summary.model_error or figures.get("iteration", 0)
        if summary.model_error is not None and unsaved:
            raise JobError(f"minimize: the result could not be saved: {summary.model_error}")
        # The run ended before it had a point of its own: the result is its start.
        trained = build_model(run.job.model).eval() if module is None else module
    elif module is not None:
        module.load_state_dict(trained.state_dict())
        trained = module
    vector = parameters_to_vector(trained.parameters()).detach().cpu()
    if vector.dtype is torch.bfloat16:  # which numpy has not
        vector = vector.float()
    x = vector.numpy().copy()
    n_evaluations = int(figures.get("evaluations", 0))
    is_stopped = reason is Reason.STOPPED and summary.stop_reason
    return _result(
        x=x,
        success=reason.converged,
        status=list(Reason).index(reason),
        reason=reason,
        message=summary.stop_reason if is_stopped else reason.sentence,
        fun=np.nan if summary.loss is None else summary.loss,
        jac_norm=figures.get("gradient_norm", np.nan),
        nit=int(figures.get("iteration", 0)),
        nfev=n_evaluations,
        njev=n_evaluations,
        jac=_gradient(run, trained),
        curve=_curve(run),
        n_wasted=int(figures.get("wasted", 0)),
        seconds=summary.seconds,
        model=trained,
        directory=Path(run.directory),
    )


def _curve(run: Run) -> list[dict[str, float]]:
    lines = read_metrics(Path(run.directory) / "metrics.jsonl")
    rows = {}
    for line in lines:
        found = line.figures
        if "iteration" in found and line.loss is not None:
            n = int(found["iteration"])
            figures = {"jac_norm": found["gradient_norm"], "nfev": found["evaluations"]}
            rows[n] = {"nit": n, "fun": line.loss, **figures, "seconds": line.time}
    return [*rows.values()]


def _gradient(run: Run, module: nn.Module) -> NDArray[np.float64] | None:
    """Return the gradient of all parameters, as the shards have saved it with the last point."""
    model, n_shards = FlatModel(deepcopy(module)), run.job.cluster.shards
    layout = Layout.of(model.specs(), n_shards=n_shards, dtype=model.element_type)
    flat = {one.name: np.zeros(one.n_elements) for one in layout.tensors}
    try:
        files = RunDirectory(run.directory, lock=None)
        store = store_of(files, newest_checkpoint_set(files)[0], report=lambda _: None)
        snapshots = newest_snapshots(store, n_shards, of_one_label=True)
        for k, snapshot in enumerate(snapshots):
            values = snapshot.array("vector.gradient")
            for part in layout.segments(k):
                if part.offset < len(values):
                    own = flat[layout.tensors[part.tensor_index].name]
                    own[part.start : part.stop] = values[
                        part.offset : part.offset + part.n_elements
                    ]
    except (StorageError, KeyError):
        return None
    return np.concatenate([flat[name] for name, _ in module.named_parameters()])


def _result(**figures: object) -> MinimizeResult:
    result = MinimizeResult()
    result.update(figures)
    return result


_ELSEWHERE = {
    **dict.fromkeys(("workers", "num_workers", "world_size", "n_jobs"), "it is replicas"),
    **dict.fromkeys(
        ("lr", "learning_rate"), "a line search finds each step's length: leave it out"
    ),
    **dict.fromkeys(
        ("epochs", "max_iter", "maxiter", "max_iterations"), 'it is options={"maxiter": 100}'
    ),
    **dict.fromkeys(("maxfun", "max_evaluations"), 'it is options={"maxfun": 100}'),
    **dict.fromkeys(
        ("gtol", "tolerance_grad", "tolerance"), 'it is tol, or options={"gtol": 1e-5}'
    ),
    **dict.fromkeys(
        ("ftol", "tolerance_change", "value_tolerance"), 'it is options={"ftol": 1e-9}'
    ),
    **dict.fromkeys(("maxcor", "history_size", "history"), 'it is options={"maxcor": 10}'),
    "batch_size": "each step is of all the data; portion is what a replica computes at once",
    "optimizer": "it is method",
    "jac": "torch computes the gradient: leave it out",
    "constraints": "it has bounds only",
    "args": "data has what loss takes besides the outputs",
    **dict.fromkeys(("hess", "hessp"), "no method needs one: leave it out"),
}

_OPTIONS = {
    "maxiter": "max_iterations",
    "maxfun": "max_evaluations",
    "gtol": "tolerance",
    "ftol": "value_tolerance",
    "maxcor": "history",
}
"""From scipy's names of options to keys of [algorithm]."""

_CLUSTER = ("replicas", "shards", "partitions", "threads")


class ByName(Protocol):
    """A callback as scipy has it, which may take its argument by name alone."""

    def __call__(self, *, intermediate_result: MinimizeResult) -> object: ...


Callback = Callable[[MinimizeResult], object] | ByName
"""Receives progress; returns True, or raises StopIteration, to end the run."""


@final
class CallbackWatch:
    """Calls the user's callback for each iteration; StopIteration or True ends all searches."""

    def __init__(self, callback: Callback) -> None:
        if not callable(callback):
            raise JobError(f"minimize: callback is {callback!r}; use a function of the result")
        names = list[str]()
        with suppress(TypeError, ValueError):  # some that are built in have no signature
            names = [*inspect.signature(callback).parameters]
        self._has_name = names == ["intermediate_result"]  # scipy's rule
        self._callback = callback
        self._iteration: float | None = None
        self._has_ended_it = False

    @property
    def has_ended_it(self) -> bool:
        """Also of a search that had converged before it could be ended."""
        return self._has_ended_it

    def begin(self) -> None:
        """Count the iterations of the next search."""
        self._iteration = None

    def __call__(self, view: JobView) -> bool:
        iteration = view.figures.get("iteration")
        if view.phase != "training" or not iteration or iteration == self._iteration:
            return self._has_ended_it
        self._iteration = iteration
        return self._call(interim_result(view))

    def end(self, result: MinimizeResult) -> None:
        """Report the last iteration: a short run may end before the first call."""
        if result.nit not in {0, self._iteration}:
            self._call(result)

    def _ask(self, result: MinimizeResult) -> object:
        if self._has_name:
            return cast("ByName", self._callback)(intermediate_result=result)
        return cast("Callable[[MinimizeResult], object]", self._callback)(result)

    def _call(self, result: MinimizeResult) -> bool:
        if not self._has_ended_it:
            try:
                self._has_ended_it = plain(self._ask(result)) is True
            except StopIteration:
                self._has_ended_it = True
        return self._has_ended_it


@checked("minimize", _ELSEWHERE)
def minimize(  # noqa: PLR0913 -- the options of a job, by their names there
    model: nn.Module | Factory,
    loss: Factory,
    data: object,
    *,
    method: MethodName = "l-bfgs",
    x0: object = None,
    bounds: object = None,
    tol: float | None = None,
    options: Mapping[str, object] | None = None,
    replicas: int = 1,
    shards: int = 1,
    partitions: int = 1,
    threads: int = 1,
    callback: Callback | None = None,
    directory: str | os.PathLike[str] | None = None,
    resume: str | os.PathLike[str] | None = None,
    from_scratch: bool = False,
    show: bool = False,
    **others: object,
) -> MinimizeResult:
    """Minimize the mean loss of a model over data.

    The model computes in training mode: BatchNorm by the statistics of each portion, dropout with
    masks that are the same at every point (`seed`). So `fun` is not the loss in evaluation mode.

    Args:
        model: An nn.Module, where the search begins and which holds the best point at the
            end; or the function that makes one: itself, a partial of it, or its import path.
        loss: Torch's name of it ("cross_entropy"), or a function (outputs, targets) ->
            mean over the samples, as itself or as an import path.
        data: Inputs and targets, as tensors, arrays or a TensorDataset; or what makes a
            map-style data set: a function, a partial of it, or its import path.
        method: The optimizer.
        x0: (n,) where to begin, in the order of `model.parameters()`; None: at the model's present
            values. (k, n): k searches, one after the other, of which the best is the result; a
            search that fails leaves the others.
        bounds: n pairs (least, largest), in which None is none, or scipy's `Bounds`, such as
            `Bounds(0.0)` for all parameters. A start out of bounds is moved to the nearest point
            within. Method "l-bfgs" only.
        tol: Ends when no element of the gradient (projected onto the bounds) is larger, and when
            three iterations in a row improve the loss by a smaller share: gtol and ftol of
            `options`, if these are not given.
        options: scipy's names: maxiter, maxfun, gtol (1e-5), ftol (2.2e-9), maxcor (10 pairs).
        replicas: Workers that compute the batch, one process each.
        shards: Processes that hold the parameters and the history.
        partitions: Processes of each replica, which compute the model together.
        threads: Of torch, in each process of a replica.
        callback: Called as callback(intermediate_result) for each iteration, a moment later, with
            an OptimizeResult that has fun, jac_norm, nit and nfev, but no x, which no process
            holds. It ends all searches by returning True or raising StopIteration; any other
            exception also ends the run in good order, and is then raised; after several starts the
            model holds the best point of the searches before.
        directory: Run directory, kept; if it exists, DIRECTORY.2, and so on. Files of model
            and data are beside it, in DIRECTORY.problem. None: nothing is kept.
        resume: Run directory of an earlier call with the same arguments, to continue from
            its last point; the present values of the model do not matter.
        from_scratch: Start again in `resume`, where the search began; what was saved there
            is moved into aside-1 (aside-2, ...), and kept.
        show: Show the progress on standard output.
        others: Other keys of [algorithm]: l1, l2, portion, seed, warm_start (a dict: SGD first),
            ... (`sandblaster.settings`).

    Returns:
        scipy's result (`MinimizeResult`). After Ctrl+C, that of the last accepted point.

    Raises:
        JobError: the arguments cannot be run, or the run failed.
        StorageError: a directory cannot be used.
    """
    check_is_no_import("sandblaster.minimize")
    if isinstance(model, nn.Module):
        check_shapes(model, "minimize")
    known = {*SandblasterSettings.__struct_fields__} - {*_OPTIONS.values()}
    for name in others.keys() - known:
        names = sorted(known | {*inspect.signature(minimize).parameters} - {"others"})
        raise JobError(f"minimize has no option {name!r}. {nearest(name, names)}")
    starts: Sequence[NDArray[np.float64] | None] = [None] if x0 is None else _starts(x0)
    if len(starts) > 1 and resume is not None:
        raise JobError("minimize: resume with several starts: resume the run of one of them")
    tables: dict[str, object] = {
        "algorithm": {
            "name": "sandblaster",
            "loss": loss if isinstance(loss, str) else _loss_path(loss),
            "method": method,
            **_keys(tol, options or {}),
            **others,
        },
        "cluster": {
            "replicas": replicas,
            "shards": shards,
            "partitions": partitions,
            "threads": threads,
        },
    }
    if isinstance(bounds, Iterator):
        bounds = [*bounds]  # each search reads them

    watch = None if callback is None else CallbackWatch(callback)

    def search(own: nn.Module | Factory, start: NDArray[np.float64] | None) -> MinimizeResult:
        problem = Problem(own, data, x0=start, bounds=bounds)
        run = partial(run_job, resume=resume, from_scratch=from_scratch, show=show)
        where = directory if resume is None else resume
        try:
            return _searched(own, problem, tables, where, run, watch)
        except JobError as error:
            error.args = (_by_argument(str(error), tol, options or {}),)
            raise

    if len(starts) == 1:
        return search(model, starts[0])
    return best_of(search, model, starts, watch)


def best_of(
    search: Callable[[nn.Module | Factory, NDArray[np.float64] | None], MinimizeResult],
    model: nn.Module | Factory,
    starts: Sequence[NDArray[np.float64] | None],
    watch: CallbackWatch | None = None,
) -> MinimizeResult:
    """Search from each start; return the best result, and load it into the model."""
    results: list[MinimizeResult] = []
    failed: list[JobError] = []
    ended = ""
    for start in starts:
        try:
            # Each begins with the buffers that the model has now, and has a model of its own.
            results.append(search(deepcopy(model), start))
        except JobError as error:
            failed.append(error)
            results.append(_failed(start, error))
        except KeyboardInterrupt:  # before a search of its own began
            if len(failed) == len(results):
                raise
            ended = f"; Ctrl+C after search {len(results)} of {len(starts)}"
            break
        except BaseException as error:  # of the callback; its search has ended in order
            if len(failed) < len(results):
                best = _best(results, model)
                error.add_note(
                    f"minimize: raised in search {len(results) + 1} of {len(starts)}. The model "
                    f"holds the best point of those before, with loss {best.fun:.6g}"
                )
            raise
        is_ended = watch is not None and watch.has_ended_it
        if is_ended or results[-1].reason is Reason.STOPPED:  # by Ctrl+C
            break
    if len(failed) == len(results):
        raise failed[0]
    best = _best(results, model)
    if failed:
        ended += f"; {len(failed)} of {len(results)} starts failed, as starts say"
    return _result(**{**best, "message": f"{best.message}{ended}", "starts": results})


def _best(results: Sequence[MinimizeResult], model: nn.Module | Factory) -> MinimizeResult:
    """Return the best of these, and load it into the model."""
    best = min(results, key=lambda one: np.inf if np.isnan(one.fun) else one.fun)
    if best.reason is None:  # all others ended without a loss
        best = next(one for one in results if one.reason is not None)
    own: object = best.model
    if isinstance(model, nn.Module) and isinstance(own, nn.Module):
        model.load_state_dict(own.state_dict())
        own = model
    return _result(**{**best, "model": own})


def _failed(start: object, error: JobError) -> MinimizeResult:
    """Return what is known of a search that failed, one of several."""
    none = dict.fromkeys(("reason", "jac", "model", "directory"))
    zero = dict.fromkeys(("nit", "nfev", "njev", "n_wasted", "seconds"), 0)
    unknown = {"status": -1, "fun": np.nan, "jac_norm": np.nan, "curve": []}
    return _result(x=start, success=False, message=str(error), **none, **zero, **unknown)


def _searched(
    model: nn.Module | Factory,
    problem: Problem,
    tables: Mapping[str, object],
    directory: str | os.PathLike[str] | None,
    run: "partial[Run]",  # `run_job`
    callback_watch: CallbackWatch | None,
) -> MinimizeResult:
    """Run one search, and return its result."""
    resumes = run.keywords["resume"] is not None
    if callback_watch is not None:
        callback_watch.begin()
    with ExitStack() as stack:
        if directory is None:
            directory = stack.enter_context(scratch()) / "run"
        directory = Path(directory)
        job = _job(tables, problem, directory)
        if resumes:
            _check_resumes(job, directory)
        # All that can be refused is refused before this line: files are written from here.
        if problem.has_files:
            directory = stack.enter_context(own_problem(directory, resumes=resumes))
            job = _job(tables, problem, directory)
            problem.write(directory, resumes=resumes)
        del problem  # which may hold copies of the data
        with nullcontext() if callback_watch is None else HeldCallback(callback_watch) as watch:
            # Forked from this program, which has imported torch already.
            launcher = LocalLauncher(holds=True)
            done = run(job, launcher=launcher, callbacks=[] if watch is None else [watch])
            result = result_of(done, module=model if isinstance(model, nn.Module) else None)
        if callback_watch is not None:
            callback_watch.end(result)
        return result


def _loss_path(loss: Factory) -> str:
    if isinstance(loss, nn.Module):
        raise JobError(
            f"minimize: loss is {loss!r}: give torch's name of it, such as "
            "'cross_entropy', or a function of a module"
        )
    return import_path(loss, what="loss")


def _job(tables: Mapping[str, object], problem: Problem, directory: Path) -> Job:
    given = {**tables, **problem.tables(directory), "output": {"directory": directory}}
    algorithm = cast("dict[str, object]", given["algorithm"]) | problem.algorithm(directory)
    return job_of({**given, "algorithm": algorithm}, user="minimize")


def _check_resumes(job: Job, directory: Path) -> None:
    # `train` would refuse the same, but only after files were written.
    run = RunDirectory.open(directory, write=False)
    check_same(job, load_job(run.job_file), directory=str(directory))


def _keys(tol: float | None, options: Mapping[str, object]) -> dict[str, object]:
    """Return keys of [algorithm] from options by scipy's names."""
    for name in options:
        if name not in _OPTIONS:
            raise JobError(f"minimize: options has no {name!r}. {nearest(str(name), _OPTIONS)}")
    both = {} if tol is None else {"gtol": tol, "ftol": tol}
    for name, value in {"tol": tol, **options}.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise JobError(f"minimize: {name} is {value}; use a finite number, or leave it out")
    return {_OPTIONS[name]: value for name, value in {**both, **options}.items()}


_GIVEN = {
    "[model] sandblaster.problem_files:build": "model",
    "[data.train] sandblaster.problem_files:pairs": "data",
    "sandblaster.problem_files:build": "model",
    "[model]": "model",
    "[data.train.arguments]": "data",
    "[data.train]": "data",
}
"""What messages call what was given, longer names first."""

_KEYS = re.compile(r"\[(?:algorithm|cluster)\] (\w+)")


def _by_argument(message: str, tol: float | None, options: Mapping[str, object]) -> str:
    """Return a message about keys of a job with the names of the arguments that gave them."""
    fields = (*SandblasterSettings.__struct_fields__, *_CLUSTER)
    own = dict(zip(fields, fields, strict=True))
    for name, key in _OPTIONS.items():
        is_tol = tol is not None and name in {"gtol", "ftol"} and name not in options
        own[key] = "tol" if is_tol else f"options[{name!r}]"
    for given, name in _GIVEN.items():
        message = message.replace(given, name)
    return _KEYS.sub(lambda found: own.get(found[1], found[0]), message)


def _starts(x0: object) -> Sequence[NDArray[np.float64]]:
    use = "use n finite numbers, or k rows of them"
    try:
        given = np.asarray(x0.detach().cpu().double() if isinstance(x0, torch.Tensor) else x0)
        starts = np.atleast_1d(given.astype(np.float64, casting="same_kind"))
    except (TypeError, ValueError, RuntimeError):
        raise JobError(f"minimize: x0 is {' '.join(repr(x0).split())[:60]}: {use}") from None
    if starts.ndim not in {1, 2} or not starts.size:
        raise JobError(f"minimize: x0 has shape {starts.shape}: {use}")
    if not np.isfinite(starts).all():
        raise JobError(f"minimize: x0 has {starts[~np.isfinite(starts)][0]} in it: {use}")
    return [*np.atleast_2d(starts)]
