"""`minimize`: a batch method over replicas and shards, with scipy's interface.

    result = sandblaster.minimize(net, "cross_entropy", (x, y), replicas=4, shards=2)
    result.fun, result.nit, result.message         # as of scipy.optimize.minimize

It writes a job, lets `distbelief.train` run it in processes of this computer, and returns
what was learned. Model, loss and data reach them without pickle (`problem_files`).
"""

import os
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from typing import final

import numpy as np
from scipy.optimize import OptimizeResult
from torch import nn
from torch.nn.utils import parameters_to_vector

from distbelief.config.job import Job
from distbelief.config.load import job_of, load_job, plain
from distbelief.core.arguments import checked
from distbelief.core.errors import JobError, StorageError
from distbelief.core.files import scratch
from distbelief.job.callbacks import HeldCallback
from distbelief.job.run.directory import RunDirectory
from distbelief.job.run.result import Run
from distbelief.job.run.resume import check_same
from distbelief.job.trainer import run_job
from distbelief.supervisor.view import JobView
from distbelief.task.imports import check_is_no_import, places
from distbelief.task.task import build_model, check_shapes
from sandblaster.optimizers.termination import Reason
from sandblaster.problem_files import Factory, Problem, import_path, own_problem
from sandblaster.settings import MethodName


@final
class MinimizeResult(OptimizeResult):  # type: ignore[explicit-any] # its stub is so
    """scipy's OptimizeResult, with these fields.

    Attributes:
        x: (n,) parameters, in the order of `model.parameters()`.
        success: Whether the run converged.
        status: Index of the reason in `sandblaster.Reason`.
        message: The reason, for people.
        fun: The loss, penalties included.
        jac_norm: Largest absolute element of its gradient.
        nit: Points accepted.
        nfev: Evaluations begun, each of loss and gradient.
        njev: The same.
        reason: Why the run ended.
        n_wasted: Examples computed more than once.
        seconds: Duration of the job.
        model: The model with these parameters.
        directory: The run directory.
    """


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
    x = parameters_to_vector(trained.parameters()).detach().cpu().numpy().copy()
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
        n_wasted=int(figures.get("wasted", 0)),
        seconds=summary.seconds,
        model=trained,
        directory=Path(run.directory),
    )


def _result(**figures: object) -> MinimizeResult:
    result = MinimizeResult()
    result.update(figures)
    return result


_ELSEWHERE = {
    **dict.fromkeys(("workers", "num_workers", "world_size", "n_jobs"), "it is replicas"),
    **dict.fromkeys(
        ("lr", "learning_rate"), "a line search finds each step's length: leave it out"
    ),
    **dict.fromkeys(("epochs", "max_iter", "maxiter"), "it is max_iterations"),
    **dict.fromkeys(("gtol", "tolerance_grad"), "it is tolerance"),
    **dict.fromkeys(("ftol", "tolerance_change"), "it is value_tolerance"),
    **dict.fromkeys(("maxcor", "history_size"), "it is history"),
    "batch_size": "each step is of all the data; portion is what a replica computes at once",
    "optimizer": "it is method",
    "jac": "torch computes the gradient: leave it out",
    "x0": "the search begins at the model's present values: leave it out",
}

Callback = Callable[[MinimizeResult], object]
"""Receives progress; returns True, or raises StopIteration, to end the run."""


@final
class CallbackWatch:
    """Calls the user's callback for each iteration; StopIteration or True ends the run."""

    def __init__(self, callback: Callback) -> None:
        if not callable(callback):
            raise JobError(f"minimize: callback is {callback!r}; use a function of the result")
        self._callback = callback
        self._iteration: float | None = None
        self._has_ended_it = False

    def __call__(self, view: JobView) -> bool:
        iteration = view.figures.get("iteration")
        if view.phase != "training" or iteration in {None, self._iteration}:
            return self._has_ended_it
        self._iteration = iteration
        return self._call(interim_result(view))

    def end(self, result: MinimizeResult) -> None:
        """Report the last iteration: a short run may end before the first call."""
        if result.nit not in {0, self._iteration}:
            self._call(result)

    def _call(self, result: MinimizeResult) -> bool:
        if not self._has_ended_it:
            try:
                self._has_ended_it = plain(self._callback(result)) is True
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
    replicas: int = 1,
    shards: int = 1,
    partitions: int = 1,
    threads: int = 1,
    callback: Callback | None = None,
    directory: str | os.PathLike[str] | None = None,
    resume: str | os.PathLike[str] | None = None,
    from_scratch: bool = False,
    show: bool = False,
    **options: object,
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
        replicas: Workers that compute the batch, one process each.
        shards: Processes that hold the parameters and the history.
        partitions: Processes of each replica, which compute the model together.
        threads: Of torch, in each process of a replica.
        callback: Called at most four times a second, if there is a new iteration, with the
            interim OptimizeResult (no x), and once with the final one. It ends the run by
            returning True or raising StopIteration; any other exception also ends the run
            in good order, and is then raised.
        directory: Run directory, kept; if it exists, DIRECTORY.2, and so on. Files of model
            and data are beside it, in DIRECTORY.problem. None: nothing is kept.
        resume: Run directory of an earlier call with the same arguments, to continue from
            its last point; the present values of the model do not matter.
        from_scratch: Start again in `resume`, where the search began; what was saved there
            is moved into aside-1 (aside-2, ...), and kept.
        show: Show the progress on standard output.
        options: Other keys of [algorithm]: history, max_iterations, tolerance,
            l1, l2, portion, warm_start (a dict: SGD first), ... (`sandblaster.settings`).

    Returns:
        scipy's result (`MinimizeResult`). After Ctrl+C, that of the last accepted point.

    Raises:
        JobError: the arguments cannot be run, or the run failed.
        StorageError: a directory cannot be used.
    """
    check_is_no_import("sandblaster.minimize")
    if isinstance(model, nn.Module):
        check_shapes(model, "minimize")
    problem = Problem(model, data)
    others: dict[str, object] = {
        "algorithm": {
            "name": "sandblaster",
            "loss": loss if isinstance(loss, str) else _loss_path(loss),
            "method": method,
            **options,
        },
        "cluster": {
            "replicas": replicas,
            "shards": shards,
            "partitions": partitions,
            "threads": threads,
        },
        "source": {"file": "minimize", "import_paths": places()},
    }
    callback_watch = None if callback is None else CallbackWatch(callback)
    with ExitStack() as stack:
        if resume is not None:
            directory = resume
        if directory is None:
            directory = stack.enter_context(scratch()) / "run"
        directory = Path(directory)
        job = _job(others | problem.tables(directory), directory)
        if resume is not None:
            _check_resumes(job, directory)
        # All that can be refused is refused before this line: files are written from here.
        if problem.has_files:
            run_directory = own_problem(directory, resumes=resume is not None)
            directory = stack.enter_context(run_directory)
            job = _job(others | problem.tables(directory), directory)
            problem.write(directory, resumes=resume is not None)
        del problem  # which may hold copies of the data
        with nullcontext() if callback_watch is None else HeldCallback(callback_watch) as watch:
            run = run_job(
                job,
                resume=resume,
                from_scratch=from_scratch,
                show=show,
                callbacks=[] if watch is None else [watch],
            )
            module = model if isinstance(model, nn.Module) else None
            result = result_of(run, module=module)
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


def _job(tables: dict[str, object], directory: Path) -> Job:
    return job_of(tables | {"output": {"directory": directory}}, user="minimize")


def _check_resumes(job: Job, directory: Path) -> None:
    # `train` would refuse the same, but only after files were written.
    run = RunDirectory.open(directory, write=False)
    check_same(job, load_job(run.job_file), directory=str(directory))
