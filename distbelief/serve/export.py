"""model.safetensors of a parameter server's directory, or of a run that has not ended."""

from collections.abc import Callable
from pathlib import Path

from distbelief.config.algorithms import coordinator_of
from distbelief.config.load import load_job
from distbelief.core import files
from distbelief.core.errors import JobError
from distbelief.job.launch.role_process import import_from
from distbelief.job.run.checkpoints import CheckpointStore
from distbelief.job.run.directory import RunDirectory
from distbelief.job.run.model_file import ModelSource, newest_snapshots, write_model_file
from distbelief.job.run.resume import newest_checkpoint_set, store_of
from distbelief.parameter_server.layout import Layout
from distbelief.serve.server_process import read_request
from distbelief.task.task import build_model
from distbelief.worker.local_executor import FlatModel


def export(directory: Path, out: Path, *, report: Callable[[str], None]) -> int:
    """Write the values in the newest checkpoints to a safetensors file; return their number.

    Args:
        directory: Of a parameter server, or of a run; either may be running.
        out: The file. Where a server was given no names, they are positions: "0", "1" ...
        report: Gets a line for each damaged checkpoint that is skipped.

    Raises:
        JobError: it is neither, or the model of a run cannot be built.
        StorageError: a file cannot be read or written, or a shard has no intact checkpoint.
    """
    if out.suffix != ".safetensors":
        raise JobError(f"{out}: use a file .safetensors")
    with files.explaining(directory, doing="read"):
        is_server = (directory / "request.json").is_file()
    return (_server if is_server else _run)(directory, out, report)


def _server(directory: Path, out: Path, report: Callable[[str], None]) -> int:
    request = read_request(directory / "request.json")
    layout = Layout.of(request.tensors, n_shards=request.n_shards)
    store = CheckpointStore(RunDirectory(directory, lock=None).snapshots, report=report)
    own = [spec.name for spec in request.tensors]
    names = dict(zip(request.names or map(str, range(len(own))), own, strict=True))
    write_model_file(out, layout, newest_snapshots(store, layout.n_shards), names=names)
    return sum(spec.n_elements for spec in layout.tensors)


def _run(directory: Path, out: Path, report: Callable[[str], None]) -> int:
    run = RunDirectory.open(directory, write=False)
    job = load_job(run.job_file)
    place, cut = newest_checkpoint_set(run)
    if cut is None:
        raise JobError(f"{directory} is not the directory of a run or of a parameter server")
    import_from(job)
    model = FlatModel(build_model(job.model))
    layout = Layout.of(model.specs(), n_shards=cut.n_shards, dtype=model.element_type)
    source = ModelSource(
        layout=layout,
        store=store_of(run, place, report=report),
        dtypes={n: str(t.dtype).removeprefix("torch.") for n, t in model.named_tensors().items()},
        aliases=model.aliases(),
    )
    drives = coordinator_of(job) is not None
    source.write(out, layout, newest_snapshots(source.store, cut.n_shards, of_one_label=drives))
    return sum(spec.n_elements for spec in layout.tensors)
