"""The files from which other processes have model and data, beside a run directory.

    runs/digits              the run
    runs/digits.problem      initial.safetensors, train.safetensors

They are read again whenever a replica is started anew. So nobody else may write them
while the run goes on: whoever calls locks them, and takes the next name if they are
somebody's (runs/digits.2, runs/digits.2.problem).

A run that goes on keeps the files it has, and a job that is refused leaves none that
were not there before.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, final

from safetensors.torch import save_file
from torch import Tensor, nn

from distbelief import files
from distbelief.errors import JobError, StorageError
from distbelief.job.directory.run_directory import SIBLINGS_MAX, RunDirectory
from distbelief.runtime.task.local_model import LocalModel
from sandblaster.calling.recipes import recipe_of
from sandblaster.calling.sources import Factory, factory_table
from sandblaster.calling.tensor_files import TensorPairs, as_pair, tensors_in, write_pairs


_INITIAL: Final = "initial.safetensors"
_TRAIN: Final = "train.safetensors"
_FILES: Final = (_INITIAL, _TRAIN)
_LOCK: Final = "lock"


def problem_of(directory: Path) -> Path:
    """Return where the files of a run lie."""
    return directory.with_name(f"{directory.name}.problem").absolute()


@contextmanager
def own_problem(wanted: Path, *, resumes: bool) -> Iterator[Path]:
    """Be the only one who writes the files of a run, in a `with` block.

    If the block ends by an exception before the run has begun, what was written there
    is removed.

    Args:
        wanted: Run directory.
        resumes: Go on with the run that is there. Otherwise it gets a new directory:
            this one, or the next free one of that name.

    Yields:
        The run directory.

    Raises:
        StorageError: the run that is to go on is running; or there is no free name.
    """
    if resumes:
        with RunDirectory.take(_made(problem_of(wanted))), _nothing_if_refused(wanted):
            yield wanted
        return
    for number in range(1, SIBLINGS_MAX):
        suffix = "" if number == 1 else f".{number}"
        directory = wanted.with_name(f"{wanted.name}{suffix}")
        if _is_taken(directory):
            continue
        problem = _made(problem_of(directory))
        try:
            lock = RunDirectory.take(problem)
        except StorageError:
            continue  # another call is about to begin there
        with lock:
            # Whoever was refused has removed its lock: then this is of a removed file.
            if lock.writer_pid() == os.getpid() and not _is_taken(directory):
                with _nothing_if_refused(directory):
                    yield directory
                return
    raise StorageError(f"{wanted} and {SIBLINGS_MAX} siblings exist: remove some")


def _is_taken(directory: Path) -> bool:
    is_new = not directory.exists()
    return not is_new and (not directory.is_dir() or any(directory.iterdir()))


def _made(problem: Path) -> Path:
    try:
        problem.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise files.explained(error, problem, doing="make") from error
    return problem


@contextmanager
def _nothing_if_refused(directory: Path) -> Iterator[None]:
    """Remove what is new among the files of a run that did not begin.

    It has begun once its job file is written: until then the job is only tried out.
    """
    problem = problem_of(directory)
    new = [file for name in _FILES if not (file := problem / name).exists()]
    before = _job_written(directory)
    try:
        yield
    except BaseException:
        if _job_written(directory) == before:
            with suppress(OSError):  # there is an error to be told already
                for file in new:
                    file.unlink(missing_ok=True)
                if [file.name for file in problem.iterdir()] == [_LOCK]:
                    (problem / _LOCK).unlink()
                    problem.rmdir()
        raise


def _job_written(directory: Path) -> tuple[int, int] | None:
    """Return what changes whenever the job file of a run is replaced."""
    try:
        found = RunDirectory(directory, lock=None).job_file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


@final
class Problem:
    """Model and data of one run, as tables of its job and as the files those name.

    Args:
        model: What `minimize` is given.
        data: Likewise.

    Raises:
        JobError: one of them cannot be had in another process.
    """

    def __init__(self, model: nn.Module | Factory, data: object) -> None:
        self._module = model if isinstance(model, nn.Module) else None
        self._pair = as_pair(data)
        self._model: dict[str, object]
        if isinstance(model, nn.Module):
            self._model = {
                "factory": "sandblaster.calling.recipes:build",
                "arguments": recipe_of(model),
            }
        else:
            self._model = factory_table(model, what="model")
        self._data = {} if self._pair else factory_table(data, what="data")

    @property
    def has_files(self) -> bool:
        """Whether there is anything to write."""
        return self._module is not None or self._pair is not None

    def tables(self, directory: Path) -> dict[str, object]:
        """Return tables [model] and [data] of a job with this run directory."""
        model, train = self._model, self._data
        if self._module is not None:
            model = model | {"initial": str(problem_of(directory) / _INITIAL)}
        if self._pair is not None:
            train = {
                "factory": "sandblaster.calling.tensor_files:pairs",
                "arguments": {"path": str(problem_of(directory) / _TRAIN)},
            }
        return {"model": model, "data": {"train": train}}

    def write(self, directory: Path, *, resumes: bool) -> None:
        """Write the files of the run in this directory.

        Args:
            directory: Of the run, whose files are locked.
            resumes: Whether it goes on: then what it has stays as it is.

        Raises:
            JobError: the run cannot go on, since it began with other data.
            StorageError: a file cannot be written.
        """
        problem = problem_of(directory)
        initial, train = problem / _INITIAL, problem / _TRAIN
        if self._module is not None and not (resumes and tensors_in(initial)):
            named = LocalModel(self._module).named_tensors()
            tensors = {name: tensor.detach().clone() for name, tensor in named.items()}
            files.write_by(initial, lambda temporary: save_file(tensors, temporary))
        if (pair := self._pair) is None:
            return
        if resumes and (kept := tensors_in(train)):
            _check_same(kept, pair, directory=directory)
        else:
            files.write_by(train, lambda temporary: write_pairs(temporary, pair))


def _check_same(kept: dict[str, Tensor], pair: tuple[Tensor, Tensor], *, directory: Path) -> None:
    """Refuse data other than those a run has."""
    was = TensorPairs(kept["inputs"], kept["targets"]).fingerprint
    now = TensorPairs(*pair).fingerprint
    if was != now:
        raise JobError(
            f"minimize: resume is {directory}, a run on other data: they were {was}, "
            f"now they are {now}. Give those it began with, or begin a new run, with "
            "a directory of its own"
        )
