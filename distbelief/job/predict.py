"""Prediction with a trained model, for inputs in a file (`distbelief predict`).

If the run has a plan, one process per rank computes its part and reads only its part of
model.safetensors, so a model may be too large for one process. With `whole`, or without a plan,
this process computes everything.

A file with one tensor has the input; one with several has the arguments of the model's forward, by
name. Several outputs are written by name too, those with a row for each sample.
"""

import os
import time
import warnings
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, final
from zipfile import BadZipFile

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file as load_arrays, save_file
from safetensors.torch import load_file

from distbelief.config.job import Job
from distbelief.config.load import load_job
from distbelief.core import files
from distbelief.core.errors import JobError, StorageError
from distbelief.core.files import scratch
from distbelief.core.signals import ended_by_signals
from distbelief.graph.graph import INPUT, GraphError
from distbelief.job.launch.computation import compute
from distbelief.job.launch.local import LocalLauncher
from distbelief.job.launch.preflight import check_device
from distbelief.job.launch.role_process import import_from
from distbelief.job.run.directory import RunDirectory
from distbelief.job.run.model_file import check_trained
from distbelief.plans.placement import Placement
from distbelief.plans.plan import Plan, load, packed
from distbelief.task.data import Batch, n_samples_of, shown_path, tensors_of
from distbelief.task.dry_run import check_arguments, shown
from distbelief.task.forward import Sample, input_specs
from distbelief.task.initializers import lost
from distbelief.task.task import build_model, forward_graph
from distbelief.worker.computation import Computation, output_name


SUFFIXES: Final = (".npy", ".npz", ".safetensors")
CHUNK: Final = 256
_KINDS: Final = "fiub"  # numpy kinds of inputs: not complex, not text

Array = NDArray[np.float32 | np.float64 | np.int64]
Outputs = dict[str, Array]  # (n_samples, *shape), by name


@final
class Prediction(msgspec.Struct, frozen=True, kw_only=True, rename={"n_machines": "machines"}):
    out: Path  # file of the outputs
    shape: tuple[int, ...]  # of the outputs, samples first
    n_machines: int  # ranks that computed them; 1 without a plan
    seconds: float  # total time, including the start of processes
    # Index of the largest output for the first few samples, if outputs are scores
    labels: tuple[int, ...] = ()
    outputs: dict[str, tuple[int, ...]] = {}  # shapes by name, if there are several


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
        source: .npy, .npz or .safetensors with one tensor: (n_samples, *shape), or several.
        out: File to write; by default beside `source`, "NAME.outputs" of the same kind (.npz for
            several outputs, if `source` is .npy).
        whole: Compute in this process, even with a plan.
        tell: Receives a line when a rank is silent, and when it is back.

    JobError if there is no such run or model, or the inputs do not fit it. DistBeliefError if a
    rank was silent for too long, or died. StorageError if a file cannot be read or written.
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
    chosen, out = out, out or source.with_suffix(f".outputs{source.suffix}")
    for path in (source, out):
        if path.suffix not in SUFFIXES:
            raise JobError(f"{path}: use a file {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}")
    if not out.parent.is_dir() or not os.access(out.parent, os.W_OK):
        raise StorageError(
            f"cannot write {out}: {out.parent} is not a writable directory: "
            "make it, or choose another one with --out"
        )
    batch = _read(source)
    import_from(job)
    plan = load(run.plan_file) if run.plan_file.is_file() and not whole else None
    if plan is None:
        outputs = _whole(job, run.model_file, batch)
    else:
        outputs = _split(job, run, plan, batch, tell=tell)
    if len(outputs) > 1 and out.suffix == ".npy":
        if chosen is not None:
            raise JobError(
                f"{out} holds one array, and the model returns {', '.join(outputs)}: use .npz or "
                ".safetensors"
            )
        out = out.with_suffix(".npz")
    try:
        files.write_by(out, partial(_write, outputs=outputs, suffix=out.suffix))
    except SafetensorError as error:
        raise StorageError(f"cannot write {out}: {error}") from error
    first = outputs.get("logits", next(iter(outputs.values())))
    scores = first.ndim == 2 and first.shape[1] > 1
    return Prediction(
        shape=first.shape,
        out=out,
        n_machines=1 if plan is None else plan.cluster.n_machines,
        seconds=round(time.monotonic() - begun, 3),
        labels=tuple(int(k) for k in first[:10].argmax(axis=1)) if scores else (),
        outputs={name: o.shape for name, o in outputs.items()} if len(outputs) > 1 else {},
    )


def _whole(job: Job, weights: Path, inputs: Batch) -> Outputs:
    module = build_model(job.model)
    check_trained(module, weights, factory=job.model.factory)
    module.load_state_dict(load_file(weights))
    module.eval()
    check_arguments(module, inputs, model=job.model.factory, table="predict")
    found: dict[str, list[torch.Tensor]] = {}
    dtype = next((p.dtype for p in module.parameters()), torch.float32)
    _check_range(inputs, dtype)
    given = inputs.tensors()
    with torch.no_grad():
        for begin in range(0, n_samples_of(inputs.inputs), CHUNK):
            parts = {path: tensor[begin : begin + CHUNK] for path, tensor in given.items()}
            parts = {
                path: part.to(dtype) if part.is_floating_point() else part.clone()
                for path, part in parts.items()
            }
            batch = Batch.of(parts)
            try:
                outputs = tensors_of(batch.run(module))
            except Exception as error:  # of the user's model: an unknown word, for example
                raise JobError(f"the model does not take {shown(batch.inputs)}: {error}") from error
            n = n_samples_of(batch.inputs)
            for path, tensor in outputs.items():
                if tensor.shape[:1] == (n,):
                    found.setdefault(output_name(path), []).append(tensor)
    if not found:
        raise JobError(f"[model] {job.model.factory} returns no tensor with a row for each sample")
    return {name: torch.cat(parts).numpy() for name, parts in found.items()}


def _split(
    job: Job, run: RunDirectory, plan: Plan, inputs: Batch, *, tell: Callable[[str], None]
) -> Outputs:
    check_device(job.cluster.device, "use --whole, which needs none")
    with torch.device("meta"):
        module = build_model(job.model)
    check_trained(module, run.model_file, factory=job.model.factory)
    sample = Sample.of(inputs)
    check_arguments(module, inputs, model=job.model.factory, table="predict")
    trained = plan.captured_graph()
    words = ("floating-point numbers", "integers")
    for name, spec in input_specs(module, sample.inputs).items():
        wanted = trained.by_name.get(name, spec)
        if (spec.shape, spec.is_integer) != (wanted.shape, wanted.is_integer):
            raise GraphError(
                f"each input sample has shape {list(spec.shape)} of {words[spec.is_integer]}, and "
                f"the model takes {list(wanted.shape)} of {words[wanted.is_integer]}"
            )
    if len(sample.inputs) == 1 and trained.fields == ((),):  # all that the model has and returns
        graph = replace(trained.only(trained.outputs[:-1]), fields=trained.fields)
    else:
        graph = forward_graph(module, sample)
    # The plan may lack what the loss does not need.
    places = {
        layer.name: plan.placements.get(layer.name, Placement.whole(len(layer.shape), 0))
        for layer in graph.layers
        if layer.kind != INPUT
    }
    plan = msgspec.structs.replace(
        plan, graph=graph.fingerprint, captured=packed(graph), placements=places, micro_batches=1
    )
    with safe_open(run.model_file, framework="pt") as file:
        kinds = {str(file.get_slice(name).get_dtype()) for name in file.keys()}  # noqa: SIM118
    dtype = "float64" if "F64" in kinds else "float32"
    _check_range(inputs, torch.float64 if dtype == "float64" else torch.float32)
    n_samples = n_samples_of(inputs.inputs)
    with ended_by_signals(), closing(LocalLauncher()) as launcher, scratch() as folder:
        launcher.start()  # it imports torch meanwhile
        computation = Computation(
            folder=str(folder),
            weights=str(run.model_file.absolute()),
            n_samples=n_samples,
            n_steps=-(-n_samples // plan.batch),
            dtype=dtype,
        )
        outputs, _ = compute(
            job, computation, plan=plan, inputs=inputs, launcher=launcher, tell=tell
        )
        return {name: output.numpy() for name, output in outputs.items()}


def _check_range(inputs: Batch, dtype: torch.dtype) -> None:
    """Refuse numbers that become infinite in the type in which the model computes."""
    for path, tensor in inputs.tensors().items():
        if tensor.is_floating_point() and (what := lost(tensor, tensor.to(dtype))):
            raise JobError(f"{shown_path(path)} have {what}, beyond {dtype}: scale them")


def _read(path: Path) -> Batch:
    arrays: dict[str, Array]
    try:
        if path.suffix == ".npy":
            arrays = {"": np.load(path, mmap_mode="r", allow_pickle=False)}
        elif path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as file:
                arrays = dict(file)
        else:
            arrays = dict(load_arrays(path))
    except OSError as error:
        raise files.explained(error, path, doing="read") from error
    except (ValueError, EOFError, BadZipFile, SafetensorError) as error:
        raise JobError(f"{path} is not a plain array: {error}") from error
    if not arrays:
        raise JobError(f"{path} has no tensors: use a file with the inputs")
    tensors: dict[str, torch.Tensor] = {}
    for name, array in sorted(arrays.items()):
        what = f"{path} has {name!r} of" if len(arrays) > 1 else f"{path} has"
        if array.ndim == 0 or not len(array) or len(array) != len(next(iter(arrays.values()))):
            raise JobError(
                f"{what} shape {list(array.shape)}: use (n_samples, ...) with at least one sample"
            )
        if array.dtype.kind not in _KINDS:
            raise JobError(f"{what} type {array.dtype}: use floating-point or whole numbers")
        with warnings.catch_warnings(action="ignore"):  # a file is not writable
            native = array.astype(array.dtype.newbyteorder("="), copy=False)
            tensors[name] = torch.from_numpy(native)
    if len(tensors) == 1:
        return Batch(next(iter(tensors.values())), None)
    return Batch(tensors, None)


def _write(path: Path, *, outputs: Outputs, suffix: str) -> None:
    if suffix == ".safetensors":
        save_file({name: np.ascontiguousarray(array) for name, array in outputs.items()}, path)
        return
    with path.open("wb") as file:
        if suffix == ".npz":
            np.savez(file, allow_pickle=False, **outputs)
        else:
            np.save(file, next(iter(outputs.values())), allow_pickle=False)


def text(prediction: Prediction) -> str:
    shape, n = " x ".join(map(str, prediction.shape)), prediction.n_machines
    by = f"{n} processes" if n > 1 else "one process"
    several = [f"{o} {' x '.join(map(str, s))}" for o, s in prediction.outputs.items()]
    what = ", ".join(several) or f"outputs {shape}"
    line = f"{prediction.out}: {what}, by {by}, in {prediction.seconds:.1f} s"
    if not prediction.labels:
        return line
    more = ", ..." if prediction.shape[0] > len(prediction.labels) else ""
    return f"{line}\nthe largest outputs are of {', '.join(map(str, prediction.labels))}{more}"


def as_json(prediction: Prediction) -> str:
    return msgspec.json.encode(prediction, enc_hook=str).decode()
