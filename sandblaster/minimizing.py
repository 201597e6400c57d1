"""`minimize`: a batch method over replicas and shards, called like scipy's.

    result = sandblaster.minimize(net, "cross_entropy", (x, y), replicas=4, shards=2)
    result.fun, result.nit, result.message         # as of scipy.optimize.minimize

It writes a job, lets `distbelief.train` run it in processes of this machine, and puts
what was learnt back. Model, loss and data get there without pickle (`sources`,
`recipes`, `tensor_files`), which limits what they may be.
"""

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import final

from torch import nn

from distbelief.errors import JobError
from distbelief.job.configuration import toml_text
from distbelief.job.configuration.jobfile import parse_job
from distbelief.job.configuration.sections import Job
from distbelief.job.display.view import SupervisorView
from distbelief.job.training import train
from sandblaster.calling.plain import plain
from sandblaster.calling.problem import Problem, own_problem, problem_of
from sandblaster.calling.result import MinimizeResult, interim_result, result_of
from sandblaster.calling.sources import Factory, import_path
from sandblaster.calling.tensor_files import as_pair
from sandblaster.config import MethodName


Callback = Callable[[MinimizeResult], object]
"""Told of progress; returns True, or raises StopIteration, to end the run."""


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
    show: bool = False,
    **options: object,
) -> MinimizeResult:
    """Minimise the mean loss of a model over data.

    Args:
        model: An nn.Module, which is where the search begins and which holds the best
            point at the end; or the function that makes one: itself, a partial of it,
            or its import path.
        loss: Torch's name of it ("cross_entropy"), or a function (outputs, targets) ->
            mean over the samples, as itself or as an import path.
        data: Inputs and targets, as tensors, arrays or a TensorDataset; or what makes a
            map-style data set: a function, a partial of it, or its import path.
        method: What the coordinator does.
        replicas: Which compute portions of the batch, one process each.
        shards: Processes that hold the parameters and the history.
        partitions: Processes of each replica, which compute the model together: each
            holds its own regions of it.
        threads: Of torch, in each process of a replica.
        callback: Called at most four times a second, if there is a new iteration, with
            an OptimizeResult of what is known then (no x), and with the result if that
            has a newer one. It ends the run by returning True, or by raising
            StopIteration.
        directory: Run directory, kept; if there is one, DIRECTORY.2, and so on. What
            the processes read of model and data lies beside it, in DIRECTORY.problem.
            None: nothing is kept.
        resume: Run directory of an earlier call with the same arguments, to go on with.
        show: Whether to show how it goes, on standard output.
        options: Other keys of [algorithm]: batch_size, history, max_iterations,
            tolerance, l1, l2, portion, warm_start (a dict: Downpour first), ...
            (`sandblaster.config`).

    Returns:
        scipy's result: x (the parameters, flat, in the order of `model.parameters()`),
        success, status, message, fun, jac_norm (largest element of the gradient, by
        size), nit, nfev, njev; and reason, n_wasted (examples computed in vain),
        seconds, model, directory. Interrupted by Ctrl+C, it is of the last point
        accepted.

    Raises:
        JobError: what was given cannot be run, or failed while it ran.
        StorageError: a directory cannot be had.
    """
    module = model if isinstance(model, nn.Module) else None
    with ExitStack() as stack:
        if resume is not None:
            directory = resume
        if directory is None:
            directory = Path(stack.enter_context(TemporaryDirectory())) / "run"
        if module is not None or as_pair(data) is not None:
            run_directory = own_problem(Path(directory), resumes=resume is not None)
            directory = stack.enter_context(run_directory)
        problem = Problem(problem_of(Path(directory)))
        tables = {
            "model": problem.model(model),
            "data": {"train": problem.data(data)},
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
            "output": {"directory": str(directory)},
            "source": {"file": "minimize", "import_paths": _import_paths()},
        }
        job = _job(tables)
        watch = None if callback is None else _Watch(callback)
        run = train(job, resume=resume, show=show, watch=watch)
        result = result_of(run, module=module)
        if watch is not None:
            watch.end(result)
        return result


@final
class _Watch:
    """Calls the user's callback at each new iteration that is seen."""

    def __init__(self, callback: Callback) -> None:
        self._callback = callback
        self._iteration: float | None = None

    def __call__(self, view: SupervisorView) -> bool:
        """Return whether to end."""
        iteration = view.figures.get("iteration")
        if view.phase != "training" or iteration in {None, self._iteration}:
            return False
        self._iteration = iteration
        return self._call(interim_result(view))

    def end(self, result: MinimizeResult) -> None:
        """Tell the last iteration: a short run ends before anybody looks."""
        if result.nit not in {0, self._iteration}:
            self._call(result)

    def _call(self, result: MinimizeResult) -> bool:
        try:
            return self._callback(result) is True
        except StopIteration:
            return True


def _loss_path(loss: Factory) -> str:
    if isinstance(loss, nn.Module):
        raise JobError(
            f"minimize: loss is {loss!r}: give torch's name of it, such as "
            "'cross_entropy', or a function of some module"
        )
    return import_path(loss, what="loss")


def _import_paths() -> list[str]:
    """Return where this process finds its modules, for the others."""
    paths = [Path(path).absolute() for path in sys.path]
    return [str(path) for path in dict.fromkeys(paths) if path.is_dir()]


def _job(tables: dict[str, object]) -> Job:
    written = {name: plain(table) for name, table in tables.items()}
    return parse_job(toml_text.write(written), path="minimize")
