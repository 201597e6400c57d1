"""`minimize`: a batch method over replicas and shards, called like scipy's.

    result = sandblaster.minimize(net, "cross_entropy", (x, y), replicas=4, shards=2)
    result.fun, result.nit, result.message         # as of scipy.optimize.minimize

It writes a job, lets `distbelief.train` run it in processes of this machine, and puts
what was learnt back. Model, loss and data get there without pickle (`sources`,
`recipes`, `tensor_files`), which limits what they may be.
"""

import os
import sys
from contextlib import ExitStack, nullcontext
from pathlib import Path

from torch import nn

from distbelief.errors import JobError
from distbelief.job.configuration import toml_text
from distbelief.job.configuration.jobfile import load_job, parse_job
from distbelief.job.configuration.sections import Job
from distbelief.job.directory.run_directory import RunDirectory
from distbelief.job.resuming.resuming import check_same
from distbelief.job.training import train
from distbelief.job.watching import HeldBack
from distbelief.scratch import scratch
from sandblaster.calling.callback import Callback, CallbackWatch
from sandblaster.calling.plain import plain
from sandblaster.calling.problem import Problem, own_problem
from sandblaster.calling.result import MinimizeResult, result_of
from sandblaster.calling.sources import Factory, import_path
from sandblaster.config import MethodName


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
            StopIteration; whatever else it raises ends the run, too, and is raised
            when that has ended in good order. Then it is not called again.
        directory: Run directory, kept; if there is one, DIRECTORY.2, and so on. What
            the processes read of model and data lies beside it, in DIRECTORY.problem.
            None: nothing is kept.
        resume: Run directory of an earlier call with the same arguments, to go on
            with: from its own last point, so the model may have other values by now.
        from_scratch: Whether to begin anew in `resume`, where the search began; what
            was saved there is moved into aside-1 (aside-2, ...), and kept.
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
        "source": {"file": "minimize", "import_paths": _import_paths()},
    }
    told = None if callback is None else CallbackWatch(callback)
    with ExitStack() as stack:
        if resume is not None:
            directory = resume
        if directory is None:
            directory = stack.enter_context(scratch()) / "run"
        directory = Path(directory)
        job = _job(others | problem.tables(directory), directory)
        if resume is not None:
            _check_resumes(job, directory)
        # From here on files are written.
        if problem.has_files:
            run_directory = own_problem(directory, resumes=resume is not None)
            directory = stack.enter_context(run_directory)
            job = _job(others | problem.tables(directory), directory)
            problem.write(directory, resumes=resume is not None)
        del problem  # which may hold copies of the data
        with nullcontext() if told is None else HeldBack(told) as watch:
            run = train(job, resume=resume, from_scratch=from_scratch, show=show, watch=watch)
            module = model if isinstance(model, nn.Module) else None
            result = result_of(run, module=module)
        if told is not None:
            told.end(result)
        return result


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


def _job(tables: dict[str, object], directory: Path) -> Job:
    tables = tables | {"output": {"directory": str(directory)}}
    written = {name: plain(table) for name, table in tables.items()}
    return parse_job(toml_text.write(written), path="minimize")


def _check_resumes(job: Job, directory: Path) -> None:
    """Refuse what `train` would refuse once the files were written."""
    run = RunDirectory.open(directory, write=False)
    check_same(job, load_job(run.job_file), directory=str(directory))
