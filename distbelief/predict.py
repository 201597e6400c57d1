"""Prediction with a trained model, for inputs in a file (`distbelief predict`).

If the run has a plan, one process per rank computes its part and reads only its part of
model.safetensors, so a model may be too large for one process. With `whole`, or without a plan,
this process computes everything.
"""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Final, final

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from safetensors.torch import load_file

from distbelief.config.job import Job
from distbelief.config.load import load_job
from distbelief.core import files
from distbelief.core.files import scratch
from distbelief.core.signals import ended_by_signals
from distbelief.errors import JobError, StorageError
from distbelief.graph.graph import GraphError
from distbelief.launch.computation import compute
from distbelief.launch.local import LocalLauncher
from distbelief.launch.preflight import check_device
from distbelief.launch.role_process import import_from
from distbelief.program.plan import Plan, load
from distbelief.run.directory import RunDirectory
from distbelief.run.model_file import check_trained
from distbelief.task.dry_run import shown
from distbelief.task.task import Sample, build_model
from distbelief.worker.computation import OUTPUT, Computation


SUFFIXES: Final = (".npy", ".safetensors")
CHUNK: Final = 256
_KINDS: Final = "fiub"  # numpy kinds of inputs: not complex, not text

Array = NDArray[np.float32 | np.float64 | np.int64]


@final
class Prediction(msgspec.Struct, frozen=True, kw_only=True, rename={"n_machines": "machines"}):
    """Result of a prediction."""

    out: Path  # file of the outputs
    shape: tuple[int, ...]  # of the outputs, samples first
    n_machines: int  # ranks that computed them; 1 without a plan
    seconds: float  # total time, including the start of processes
    # Index of the largest output for the first few samples, if outputs are scores
    labels: tuple[int, ...] = ()


def predict(
    directory: Path,
    source: Path,
    *,
    out: Path | None = None,
    whole: bool = False,
    tell: Callable[[str], None] = lambda _: None,
) -> Prediction:
    """Write the outputs of a run's model for the inputs in `source`.

    Args:
        directory: The run directory.
        source: .npy, or .safetensors with one tensor: (n_samples, *shape).
        out: File to write; by default beside `source`, "NAME.outputs" of the same kind.
        whole: Compute in this process, even with a plan.
        tell: Receives a line when a rank is silent, and when it is back.

    Raises:
        JobError: there is no such run or model, or the inputs do not fit it.
        DistBeliefError: a rank was silent for too long, or died.
        StorageError: a file cannot be read or written.
    """
    begun = time.monotonic()
    run = RunDirectory.open(directory, write=False)
    job = load_job(run.job_file)
    if not run.model_file.is_file():
        writer = run.writer_pid()
        why = f"the run ended too early; resume it: distbelief train --resume {directory}"
        if writer is not None:
            why = f"the run (process {writer}) writes it at its end; wait, or stop it with Ctrl+C"
        raise JobError(f"{run.model_file} does not exist: {why}")
    out = source.with_suffix(f".outputs{source.suffix}") if out is None else out
    for path in (source, out):
        if path.suffix not in SUFFIXES:
            raise JobError(f"{path}: use a file {' or '.join(SUFFIXES)}")
    if not out.parent.is_dir() or not os.access(out.parent, os.W_OK):
        raise StorageError(
            f"cannot write {out}: {out.parent} is not a writable directory: "
            "make it, or choose another one with --out"
        )
    inputs = _read(source)
    import_from(job)
    plan = load(run.plan_file) if run.plan_file.is_file() and not whole else None
    if plan is None:
        outputs = _whole(job, run.model_file, inputs)
    else:
        outputs = _split(job, run, plan, inputs, tell=tell)
    try:
        files.write_by(out, partial(_write, outputs=outputs, is_numpy=out.suffix == ".npy"))
    except SafetensorError as error:
        raise StorageError(f"cannot write {out}: {error}") from error
    scores = outputs.ndim == 2 and outputs.shape[1] > 1
    return Prediction(
        shape=outputs.shape,
        out=out,
        n_machines=1 if plan is None else plan.cluster.n_machines,
        seconds=round(time.monotonic() - begun, 3),
        labels=tuple(int(k) for k in outputs[:10].argmax(axis=1)) if scores else (),
    )


def _whole(job: Job, weights: Path, inputs: Array) -> Array:
    module = build_model(job.model)
    check_trained(module, weights, factory=job.model.factory)
    module.load_state_dict(load_file(weights))
    module.eval()
    found: list[torch.Tensor] = []
    dtype = next((p.dtype for p in module.parameters()), torch.float32)
    with torch.no_grad():
        for begin in range(0, len(inputs), CHUNK):
            batch = torch.from_numpy(np.array(inputs[begin : begin + CHUNK]))
            if batch.is_floating_point():
                batch = batch.to(dtype)
            try:
                found.append(module(batch))
            except (RuntimeError, IndexError) as error:  # an unknown word, for example
                raise JobError(f"the model does not take {shown(batch)}: {error}") from error
    return torch.cat(found).numpy()


def _split(
    job: Job, run: RunDirectory, plan: Plan, inputs: Array, *, tell: Callable[[str], None]
) -> Array:
    graph = plan.captured_graph()
    wanted, is_integer = graph.layers[0], not np.issubdtype(inputs.dtype, np.floating)
    if (inputs.shape[1:], is_integer) != (wanted.shape, wanted.is_integer):
        words = ("floating-point numbers", "integers")
        raise GraphError(
            f"each input sample has shape {list(inputs.shape[1:])} of {words[is_integer]}, and the "
            f"model takes {list(wanted.shape)} of {words[wanted.is_integer]}"
        )
    check_device(job.cluster.device, "use --whole, which needs none")
    with torch.device("meta"):
        module = build_model(job.model)
    check_trained(module, run.model_file, factory=job.model.factory)
    with safe_open(run.model_file, framework="pt") as file:
        kinds = {str(file.get_slice(name).get_dtype()) for name in file.keys()}  # noqa: SIM118
    dtype = "float64" if "F64" in kinds else "float32"
    with ended_by_signals(), closing(LocalLauncher()) as launcher, scratch() as folder:
        launcher.start()  # it imports torch meanwhile
        given = folder / "inputs.npy"
        np.save(given, inputs)
        sample = Sample(
            input_shape=tuple(inputs.shape[1:]),
            input_is_integer=is_integer,
            target_shape=(),
            target_is_integer=False,
        )
        computation = Computation(
            folder=str(folder),
            weights=str(run.model_file.absolute()),
            inputs=str(given),
            n_samples=len(inputs),
            n_steps=-(-len(inputs) // plan.batch),
            dtype=dtype,
        )
        place = computation.path(OUTPUT)
        np.lib.format.open_memmap(
            place,
            mode="w+",
            dtype=np.dtype(computation.dtype),
            shape=(len(inputs), *graph[graph.outputs[0]].shape),
        )
        compute(
            job,
            computation,
            plan=run.plan_file,
            sample=sample,
            n_ranks=plan.cluster.n_machines,
            launcher=launcher,
            tell=tell,
        )
        outputs: Array = np.load(place)
        return outputs


def _read(path: Path) -> Array:
    try:
        if path.suffix == ".npy":
            array: Array = np.load(path, mmap_mode="r", allow_pickle=False)
        else:
            with safe_open(path, framework="numpy") as file:
                names: Sequence[str] = list(file.keys())
                if len(names) != 1:
                    raise JobError(
                        f"{path} has tensors {', '.join(names) or '(none)'}: use a "
                        "file with one, the inputs"
                    )
                array = file.get_tensor(names[0])
    except OSError as error:
        raise files.explained(error, path, doing="read") from error
    except (ValueError, EOFError, SafetensorError) as error:
        raise JobError(f"{path} is not a plain array: {error}") from error
    if array.ndim == 0 or not len(array):
        raise JobError(
            f"{path} has shape {list(array.shape)}: use (n_samples, ...) with at least one sample"
        )
    if array.dtype.kind not in _KINDS:
        raise JobError(f"{path} has type {array.dtype}: use floating-point or whole numbers")
    native: Array = array.astype(array.dtype.newbyteorder("="), copy=False)
    return native


def _write(path: Path, *, outputs: Array, is_numpy: bool) -> None:
    if not is_numpy:
        save_file({"outputs": np.ascontiguousarray(outputs)}, path)
        return
    with path.open("wb") as file:
        np.save(file, outputs, allow_pickle=False)


def text(prediction: Prediction) -> str:
    """Return the result as a line or two of text."""
    shape, n = " x ".join(map(str, prediction.shape)), prediction.n_machines
    by = f"{n} processes" if n > 1 else "one process"
    line = f"{prediction.out}: outputs {shape}, by {by}, in {prediction.seconds:.1f} s"
    if not prediction.labels:
        return line
    more = ", ..." if prediction.shape[0] > len(prediction.labels) else ""
    return f"{line}\nthe largest outputs are of {', '.join(map(str, prediction.labels))}{more}"


def as_json(prediction: Prediction) -> str:
    return msgspec.json.encode(prediction, enc_hook=str).decode()
