"""Whether a trained model is still one of the source that is to compute with it."""

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


# The trained model's file, written tensor by tensor from the snapshots of the shards.
#
# What is in memory at a time is a piece of one tensor, so a model that is larger than
# this machine's memory can be written too. The file is what safetensors writes:
#
#     8 bytes       length of the header
#     header        JSON: of each tensor its type, shape and place
#     data          tensor after tensor, row-major, little-endian

PIECE: Final = 1 << 20
"""Elements read and written at a time."""

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
_ALIGNMENT: Final = 8  # of the data, as safetensors has it


@final
class _Place(msgspec.Struct, frozen=True):
    """Of one tensor in the file."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def write_model_file(
    path: Path, layout: Layout, snapshots: Sequence[Path], *, like: nn.Module | None = None
) -> None:
    """Write the model that is in these snapshots to `path`.

    Args:
        path: A .safetensors file, replaced whole or not at all.
        layout: How the shards hold it.
        snapshots: Of each shard, in order; they have been found whole.
        like: A module of this kind, its values not needed: it tells which tensors have
            another type (BatchNorm's counter), and the second names of shared tensors,
            without which its `load_state_dict` would miss them.

    Raises:
        StorageError: a snapshot cannot be read, or the file not written.
        ValueError: there are not as many snapshots as shards.
    """
    if len(snapshots) != layout.n_shards:
        raise ValueError(f"{len(snapshots)} snapshots of {layout.n_shards} shards")
    model = None if like is None else FlatModel(like)
    types = _types(layout, model)
    # A file holds every name by itself, so what is shared is written twice.
    names = {spec.name: spec.name for spec in layout.tensors}
    names |= {} if model is None else model.aliases()
    try:
        files.write_by(path, lambda temporary: _write(temporary, layout, snapshots, types, names))
    except SafetensorError as error:
        raise StorageError(f"a snapshot cannot be read: {error}") from error


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
    """Write the file.

    Args:
        path: Of it.
        layout: How the shards hold the tensors.
        snapshots: Of each shard.
        types: Of each tensor in the file.
        names: Of each tensor in the file, whose values it has.
    """
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
    """Return of each tensor which shards have which part of it, in order."""
    parts: dict[str, list[tuple[int, Segment]]] = {spec.name: [] for spec in layout.tensors}
    for shard in range(layout.n_shards):
        for segment in layout.segments(shard):
            name = layout.tensors[segment.tensor_index].name
            parts[name].append((shard, segment))
    for of_tensor in parts.values():
        of_tensor.sort(key=lambda part: part[1].start)
    return parts


def _read(snapshot: Path, segment: Segment) -> Iterator[torch.Tensor]:
    """Yield what a shard has of a tensor, piece by piece."""
    with safe_open(snapshot, framework="pt") as file:
        values = file.get_slice("values")
        stop = segment.offset + segment.n_elements
        for begin in range(segment.offset, stop, PIECE):
            yield values[begin : min(begin + PIECE, stop)]


def _write_piece(file: BinaryIO, piece: torch.Tensor, kind: torch.dtype) -> None:
    if not kind.is_floating_point:
        piece = piece.round()  # averages of counts are none
    converted = piece.to(kind).contiguous()
    file.write(converted.view(torch.uint8).numpy().data)


# The files that a run leaves when it ends: its model, and its curve.


def write_model(job: Job, run: RunDirectory, *, layout: Layout, store: CheckpointStore) -> None:
    """Write the trained model, from the newest whole snapshots of all shards.

    Raises:
        StorageError: why there is none.
    """
    shards = [f"shard-{k}" for k in range(layout.n_shards)]
    newest = {name: _newest(store, name) for name in shards}
    drives = coordinator_of(job) is not None
    if drives:  # then only one label is one point
        label = agreed_label(store, shards)
        newest = {name: None if label is None else store.path(name, label) for name in shards}
    snapshots = [path for path in newest.values() if path is not None]
    if len(snapshots) < layout.n_shards:
        names = ", ".join(name for name, found in newest.items() if found is None)
        moment = " of one moment" if drives else ""
        why = f"there is no whole snapshot of {names}{moment} in {store.directory}"
        if run.model_file.is_file():
            why += f", and {run.model_file} is of an earlier life"
        raise StorageError(why)
    with torch.device("meta") if job.cluster.is_split else nullcontext():
        like = build_model(job.model)
    write_model_file(run.model_file, layout, snapshots, like=like)


def draw_curve_of(run: RunDirectory, *, title: str) -> None:
    """Draw the curve of all that was measured.

    Raises:
        StorageError: it cannot be written.
    """
    # Only now: matplotlib takes a second.
    from distbelief.run.plot import draw_curve  # noqa: PLC0415 -- seldom

    draw_curve(run.curve_file, read_metrics(run.metrics_file), title=title)


def _newest(store: CheckpointStore, shard: str) -> Path | None:
    """Return where its newest whole snapshot lies; its values are let go again."""
    snapshot = store.newest(shard)
    return None if snapshot is None else store.path(shard, snapshot.label)


def check_trained(module: nn.Module, weights: Path, *, factory: str) -> None:
    """Compare names and shapes, before anything is read.

    Args:
        module: What the source makes today; may be without memory.
        weights: model.safetensors.
        factory: Of the module, for messages.

    Raises:
        JobError: the source has changed since.
        StorageError: the file cannot be read, or is damaged.
    """
    made = {
        name: tuple(value.shape)
        for name, value in module.state_dict().items()
        if isinstance(value, torch.Tensor)  # other modules' own state is none
    }
    trained = shapes_in(weights)
    for name in sorted(made.keys() | trained.keys()):
        if made.get(name) != trained.get(name):
            raise JobError(
                f"{weights} is of another model than {factory} makes today: {name!r} "
                f"is {_shown(trained.get(name))} there, and {_shown(made.get(name))} "
                "here: use the source that it was trained with"
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
