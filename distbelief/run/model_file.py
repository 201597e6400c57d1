"""model.safetensors: writes the trained model from checkpoints, and checks it against the source.

Only a part of one tensor is in memory at a time, so the model may be larger than memory:

    8 bytes       length of the header
    header        JSON: type, shape and offsets of each tensor
    data          tensor after tensor, row-major, little-endian
"""

import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import BinaryIO, Final, final

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from distbelief.config.algorithms import coordinator_of
from distbelief.config.job import Job
from distbelief.core import files
from distbelief.errors import JobError, StorageError
from distbelief.graph.region import Shape
from distbelief.parameter_server.layout import Layout, Segment
from distbelief.run.checkpoints import CheckpointStore, agreed_label
from distbelief.run.directory import RunDirectory
from distbelief.run.metrics_file import read_metrics
from distbelief.task.task import build_model
from distbelief.worker.local_executor import FlatModel


PIECE: Final = 1 << 20  # elements read and written at a time

_WORDS: Final[Mapping[torch.dtype, str]] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ALIGNMENT: Final = 8  # of the data, as in safetensors


@final
class _Place(msgspec.Struct, frozen=True):
    """Type, shape and place of one tensor in the file."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def write_model_file(
    path: Path, layout: Layout, snapshots: Sequence[Path], *, like: nn.Module | None = None
) -> None:
    """Write the model that is in these checkpoints to `path`.

    Args:
        path: A .safetensors file, replaced atomically.
        layout: How the shards hold it.
        snapshots: Intact checkpoints, one per shard, in order.
        like: A module of this kind, without need for values. It tells which tensors have another
            type (BatchNorm's counter), and the other names of shared tensors, which
            `load_state_dict` needs.

    Raises:
        StorageError: a checkpoint cannot be read, or the file not written.
        ValueError: there are not as many checkpoints as shards.
    """
    if len(snapshots) != layout.n_shards:
        raise ValueError(f"got {len(snapshots)} checkpoints of {layout.n_shards} shards")
    model = None if like is None else FlatModel(like)
    types = _types(layout, model)
    # Each name has its own data in a file, so a shared tensor is written twice.
    names = {spec.name: spec.name for spec in layout.tensors}
    names |= {} if model is None else model.aliases()
    try:
        files.write_by(path, lambda temporary: _write(temporary, layout, snapshots, types, names))
    except SafetensorError as error:
        raise StorageError(f"a checkpoint cannot be read: {error}") from error


def _types(layout: Layout, model: FlatModel | None) -> dict[str, torch.dtype]:
    usual = torch.float64 if layout.dtype.itemsize == 8 else torch.float32
    own = {} if model is None else model.named_tensors()
    return {
        spec.name: own[spec.name].dtype if spec.name in own else usual for spec in layout.tensors
    }


def _write(
    path: Path,
    layout: Layout,
    snapshots: Sequence[Path],
    types: Mapping[str, torch.dtype],
    names: Mapping[str, str],
) -> None:
    specs = {spec.name: spec for spec in layout.tensors}
    places: dict[str, _Place] = {}
    end = 0
    # Larger elements first, so that each tensor begins at a multiple of its own.
    order = sorted(names, key=lambda name: (-types[names[name]].itemsize, name))
    for name in order:
        kind = types[names[name]]
        begin, end = end, end + specs[names[name]].n_elements * kind.itemsize
        places[name] = _Place(_WORDS[kind], specs[names[name]].shape, (begin, end))
    parts = _parts(layout)
    with path.open("wb") as file:
        _write_header(file, places)
        for name in order:
            for shard, segment in parts[names[name]]:
                for piece in _read(snapshots[shard], segment):
                    _write_piece(file, piece, types[names[name]])


def _write_header(file: BinaryIO, places: Mapping[str, _Place]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    text = msgspec.json.encode(header | dict(places))
    text += b" " * (-len(text) % _ALIGNMENT)
    file.write(struct.pack("<Q", len(text)))
    file.write(text)


def _parts(layout: Layout) -> dict[str, list[tuple[int, Segment]]]:
    parts: dict[str, list[tuple[int, Segment]]] = {spec.name: [] for spec in layout.tensors}
    for shard in range(layout.n_shards):
        for segment in layout.segments(shard):
            name = layout.tensors[segment.tensor_index].name
            parts[name].append((shard, segment))
    for of_tensor in parts.values():
        of_tensor.sort(key=lambda part: part[1].start)
    return parts


def _read(snapshot: Path, segment: Segment) -> Iterator[torch.Tensor]:
    with safe_open(snapshot, framework="pt") as file:
        values = file.get_slice("values")
        stop = segment.offset + segment.n_elements
        for begin in range(segment.offset, stop, PIECE):
            yield values[begin : min(begin + PIECE, stop)]


def _write_piece(file: BinaryIO, piece: torch.Tensor, kind: torch.dtype) -> None:
    if not kind.is_floating_point:
        piece = piece.round()  # averages of counters are not whole numbers
    converted = piece.to(kind).contiguous()
    file.write(converted.view(torch.uint8).numpy().data)


def write_model(job: Job, run: RunDirectory, *, layout: Layout, store: CheckpointStore) -> None:
    """Write the trained model, from the newest intact checkpoints of all shards.

    Raises:
        StorageError: there are none, or the file cannot be written.
    """
    shards = [f"shard-{k}" for k in range(layout.n_shards)]
    newest = {name: _newest(store, name) for name in shards}
    drives = coordinator_of(job) is not None
    if drives:  # only checkpoints of one label belong to one point
        label = agreed_label(store, shards)
        newest = {name: None if label is None else store.path(name, label) for name in shards}
    snapshots = [path for path in newest.values() if path is not None]
    if len(snapshots) < layout.n_shards:
        names = ", ".join(name for name, found in newest.items() if found is None)
        moment = " of one label" if drives else ""
        why = f"there is no intact checkpoint of {names}{moment} in {store.directory}"
        if run.model_file.is_file():
            why += f", and {run.model_file} is from an earlier session"
        raise StorageError(why)
    with torch.device("meta") if job.cluster.is_split else nullcontext():
        like = build_model(job.model)
    write_model_file(run.model_file, layout, snapshots, like=like)


def draw_curve_of(run: RunDirectory, *, title: str) -> None:
    """Draw curve.png from the run's metrics.

    Raises:
        StorageError: it cannot be written.
    """
    # A late import: matplotlib takes a second.
    from distbelief.run.plot import draw_curve  # noqa: PLC0415 -- seldom

    draw_curve(run.curve_file, read_metrics(run.metrics_file), title=title)


def _newest(store: CheckpointStore, shard: str) -> Path | None:
    snapshot = store.newest(shard)
    return None if snapshot is None else store.path(shard, snapshot.label)


def check_trained(module: nn.Module, weights: Path, *, factory: str) -> None:
    """Compare the names and shapes of a module with those of trained weights.

    Args:
        module: What the source makes today; may be on the meta device.
        weights: model.safetensors.
        factory: Of the module, for messages.

    Raises:
        JobError: the source has changed since.
        StorageError: the file cannot be read, or is damaged.
    """
    made = {
        name: tuple(value.shape)
        for name, value in module.state_dict().items()
        if isinstance(value, torch.Tensor)  # extra state of modules is not saved
    }
    trained = shapes_in(weights)
    for name in sorted(made.keys() | trained.keys()):
        if made.get(name) != trained.get(name):
            raise JobError(
                f"{weights} does not fit {factory}: {name!r} is {_shown(trained.get(name))} in the "
                f"file, {_shown(made.get(name))} in the source: use the source it was trained with"
            )


def shapes_in(weights: Path) -> Mapping[str, Shape]:
    """Return the shape of every tensor in a file.

    Raises:
        StorageError: it cannot be read, or is damaged.
    """
    try:
        with safe_open(weights, framework="pt") as file:
            return {
                name: tuple(file.get_slice(name).get_shape())
                for name in file.keys()  # noqa: SIM118 -- no mapping
            }
    except OSError as error:
        raise files.explained(error, weights, doing="read") from error
    except SafetensorError as error:
        raise StorageError(f"{weights} is damaged: {error}") from error


def _shown(shape: Shape | None) -> str:
    return "absent" if shape is None else f"{list(shape)}"
