"""model.safetensors: writes the trained model from checkpoints, and checks it against the source.

Only a part of one tensor is in memory at a time, so the model may be larger than memory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from distbelief.config.algorithms import coordinator_of, facts_of
from distbelief.config.job import Job
from distbelief.core import files
from distbelief.core.errors import JobError, StorageError
from distbelief.core.tensor_files import DamagedError, TensorFile, header_of
from distbelief.job.run.checkpoints import CheckpointStore, agreed_label
from distbelief.job.run.directory import RunDirectory
from distbelief.parameter_server.layout import Layout, Segment
from distbelief.parameter_server.rules import EMA
from distbelief.worker.evaluator import Kept, kept_in
from distbelief.worker.group import EVALUATORS


PIECE: Final = 1 << 20  # elements read and written at a time

TYPES: Final[Mapping[str, tuple[torch.dtype, str]]] = {
    "float64": (torch.float64, "F64"),
    "float32": (torch.float32, "F32"),
    "float16": (torch.float16, "F16"),
    "bfloat16": (torch.bfloat16, "BF16"),
    "int64": (torch.int64, "I64"),
    "int32": (torch.int32, "I32"),
    "int16": (torch.int16, "I16"),
    "int8": (torch.int8, "I8"),
    "uint8": (torch.uint8, "U8"),
    "bool": (torch.bool, "BOOL"),
    "complex64": (torch.float32, "C64"),  # shards have pairs of floats
}  # by torch's name: the type, and the word of safetensors for it


def write_model_file(
    path: Path,
    layout: Layout,
    snapshots: Sequence[TensorFile],
    *,
    dtypes: Mapping[str, str] | None = None,
    names: Mapping[str, str] | None = None,
    averaged: bool = False,
) -> None:
    """Write the model that is in these checkpoints, one per shard, to `path`, replaced atomically.

    If `averaged`, the parameters are the running averages that a rule with `ema` keeps.

    `dtypes` are torch's names of types that are not that of the shards. `names` are those of the
    file, with the names in the layout; by default the same. Tensors that are shared have several,
    as `load_state_dict` needs them: each name has its own data in the file.
    """
    usual = "float64" if layout.dtype.itemsize == 8 else "float32"
    kinds = {t.name: TYPES[(dtypes or {}).get(t.name, usual)] for t in layout.tensors}
    if names is None:
        names = {t.name: t.name for t in layout.tensors}
    try:
        files.write_by(path, lambda draft: _write(draft, layout, snapshots, kinds, names, averaged))
    except DamagedError as error:
        raise StorageError(f"a checkpoint cannot be read: {error}") from error


def _write(
    path: Path,
    layout: Layout,
    snapshots: Sequence[TensorFile],
    kinds: Mapping[str, tuple[torch.dtype, str]],
    names: Mapping[str, str],
    averaged: bool,  # noqa: FBT001 -- of `write_model_file`, by name there
) -> None:
    specs = {spec.name: spec for spec in layout.tensors}
    sizes = {n: kinds[own][0].itemsize * (1 + (kinds[own][1] == "C64")) for n, own in names.items()}
    # Larger elements first, so that each tensor begins at a multiple of its own.
    order = sorted(names, key=lambda name: (-sizes[name], name))
    tensors = [(n, kinds[names[n]], specs[names[n]]) for n in order]
    header = header_of(
        (
            (n, word, t.shape[:-1] if word == "C64" else t.shape, t.n_elements * dtype.itemsize)
            for n, (dtype, word), t in tensors
        ),
        {"format": "pt"},
    )
    parts = _parts(layout)
    with path.open("wb") as file:
        file.write(header)
        for name in order:
            dtype, _ = kinds[names[name]]
            is_average = averaged and specs[names[name]].kind == "parameter"
            array = f"state.{EMA}" if is_average else "values"
            for shard, segment in parts[names[name]]:
                stop = segment.offset + segment.n_elements
                for start in range(segment.offset, stop, PIECE):
                    values = snapshots[shard].array(array, start, min(start + PIECE, stop))
                    piece = torch.from_numpy(values)
                    if not dtype.is_floating_point:
                        piece = piece.round()  # averages of counters are not whole numbers
                    file.write(piece.to(dtype).view(torch.uint8).numpy().data)


def _parts(layout: Layout) -> dict[str, list[tuple[int, Segment]]]:
    parts: dict[str, list[tuple[int, Segment]]] = {spec.name: [] for spec in layout.tensors}
    for shard in range(layout.n_shards):
        for segment in layout.segments(shard):
            parts[layout.tensors[segment.tensor_index].name].append((shard, segment))
    for of_tensor in parts.values():
        of_tensor.sort(key=lambda part: part[1].start)
    return parts


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """Where the values of a run's model are; see `write_model_file`."""

    layout: Layout
    store: CheckpointStore
    dtypes: Mapping[str, str]
    aliases: Mapping[str, str]

    def write(
        self, path: Path, layout: Layout, snapshots: Sequence[TensorFile], *, averaged: bool = False
    ) -> None:
        names = {t.name: t.name for t in layout.tensors} | dict(self.aliases)
        write_model_file(
            path, layout, snapshots, dtypes=self.dtypes, names=names, averaged=averaged
        )


def newest_snapshots(
    store: CheckpointStore, n_shards: int, *, of_one_label: bool = False
) -> list[TensorFile]:
    """Return the newest intact checkpoint of each shard, or raise StorageError.

    Under a coordinator only checkpoints `of_one_label` belong to one point.
    """
    shards = [f"shard-{k}" for k in range(n_shards)]
    labels: dict[str, str | None] = {}
    for name in shards:
        snapshot = store.newest(name)  # it reports damaged ones
        labels[name] = None if snapshot is None else snapshot.label
    if of_one_label:
        labels = dict.fromkeys(shards, agreed_label(store, shards))
    snapshots = [store.file(name, label) for name, label in labels.items() if label is not None]
    if len(snapshots) < n_shards:
        names = ", ".join(name for name, label in labels.items() if label is None)
        moment = " of one label" if of_one_label else ""
        raise StorageError(f"there is no intact checkpoint of {names}{moment} in {store.place}")
    return snapshots


def write_model(job: Job, run: RunDirectory, source: ModelSource) -> None:
    """Write the trained model, from the newest intact checkpoints of all shards.

    If the rule averages the values, also that model.
    """
    layout, drives = source.layout, coordinator_of(job) is not None
    try:
        snapshots = newest_snapshots(source.store, layout.n_shards, of_one_label=drives)
    except StorageError as error:
        if run.model_file.is_file():
            raise StorageError(
                f"{error}, and {run.model_file} is from an earlier session"
            ) from None
        raise
    source.write(run.model_file, layout, snapshots)
    rule = facts_of(job).rule
    if rule is not None and rule.ema is not None:
        source.write(run.ema_file, layout, snapshots, averaged=True)


def write_best(run: RunDirectory, source: ModelSource) -> list[Kept]:
    """Write the values of the best evaluation, if they were kept; return what was measured."""
    snapshot = source.store.newest(EVALUATORS)
    if snapshot is None:
        return []
    one = Layout.of(source.layout.tensors, n_shards=1, dtype=source.layout.spec.dtype)
    source.write(run.best_file, one, [source.store.file(EVALUATORS, snapshot.label)])
    return [kept_in(snapshot)]


def check_trained(module: nn.Module, weights: Path, *, factory: str) -> None:
    """Compare the names and shapes of a module, maybe on the meta device, with trained weights.

    JobError if the source, whose `factory` made the module, has changed since; StorageError if the
    file cannot be read, or is damaged.
    """
    made = {
        name: list(value.shape)
        for name, value in module.state_dict().items()
        if isinstance(value, torch.Tensor)  # extra state of modules is not saved
    }
    try:
        with safe_open(weights, framework="pt") as file:
            names = file.keys()
            trained = {name: list(file.get_slice(name).get_shape()) for name in names}
    except OSError as error:
        raise files.explained(error, weights, doing="read") from error
    except SafetensorError as error:
        raise StorageError(f"{weights} is damaged: {error}") from error
    for name in sorted(made.keys() | trained.keys()):
        if made.get(name) != trained.get(name):
            raise JobError(
                f"{weights} does not fit {factory}: {name!r} is {trained.get(name, 'absent')} in "
                f"the file, {made.get(name, 'absent')} in the source: use the source it was "
                "trained with"
            )
