"""The files from which other processes have model and data, beside a run directory.

    runs/digits              the run
    runs/digits.problem      initial.safetensors, train.safetensors

They are read again whenever a replica is started anew. So nobody else may write them
while the run goes on: whoever calls locks them, and takes the next name if they are
somebody's (runs/digits.2, runs/digits.2.problem).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import final

from safetensors.torch import save_file
from torch import nn

from distbelief import files
from distbelief.errors import StorageError
from distbelief.job.directory.run_directory import SIBLINGS_MAX, RunDirectory
from distbelief.runtime.task.local_model import LocalModel
from sandblaster.calling.recipes import recipe_of
from sandblaster.calling.sources import Factory, factory_table
from sandblaster.calling.tensor_files import as_pair, write_pairs


def problem_of(directory: Path) -> Path:
    """Return where the files of a run lie."""
    return directory.with_name(f"{directory.name}.problem").absolute()


@contextmanager
def own_problem(wanted: Path, *, resumes: bool) -> Iterator[Path]:
    """Be the only one who writes the files of a run, in a `with` block.

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
        with RunDirectory.take(_made(problem_of(wanted))):
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
            if not _is_taken(directory):
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


@final
class Problem:
    """The files of one run, and the tables of a job that name them.

    Args:
        directory: Theirs; made if there is any.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def model(self, model: nn.Module | Factory) -> dict[str, object]:
        """Return table [model].

        Raises:
            JobError: it cannot be had in another process.
            StorageError: its file cannot be written.
        """
        if not isinstance(model, nn.Module):
            return factory_table(model, what="model")
        recipe = recipe_of(model)
        named = LocalModel(model).named_tensors()
        tensors = {name: tensor.detach().clone() for name, tensor in named.items()}
        initial = self._directory / "initial.safetensors"
        files.write_by(initial, lambda temporary: save_file(tensors, temporary))
        return {
            "factory": "sandblaster.calling.recipes:build",
            "arguments": recipe,
            "initial": str(initial),
        }

    def data(self, data: object) -> dict[str, object]:
        """Return table [data.train].

        Raises:
            JobError: they cannot be had in another process.
            StorageError: their file cannot be written.
        """
        pair = as_pair(data)
        if pair is None:
            return factory_table(data, what="data")
        file = self._directory / "train.safetensors"
        files.write_by(file, lambda temporary: write_pairs(temporary, pair))
        return {
            "factory": "sandblaster.calling.tensor_files:pairs",
            "arguments": {"path": str(file)},
        }
