"""Processes that read the samples of one role: `num_workers` of [data.train] and [data.test].

    role                                     reader, forked while the role had one thread
      | Wanted, for each of the next batches -->  |   read in this order
      | <------ Answer, and the memory of a batch |

The role decides which samples are read, and from which streams they draw; so any process reads the
same bits. The tensors of a batch lie in memory without a name (memfd), which is free as soon as
nobody has them: however processes end, nothing is left in /dev/shm, and its size does not matter.
Readers end with their role, if need be by the kernel.

torch's DataLoader would do this for an order that is known ahead. Here samples are dealt, and
generations end; and its processes are forked late, and their ends interrupt the main thread.
"""

import mmap
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Final, NoReturn, Self, cast, final

import msgspec
import numpy as np
import torch

from distbelief.core.errors import DistBeliefError, JobError
from distbelief.job.launch.children import end_with_parent, run_child
from distbelief.task.data import Batch, Dataset, Path, Wanted, shown_path
from distbelief.worker.batches import BatchIndices, BatchReader


N_AHEAD_EACH: Final = 2  # batches for each reader, as torch's prefetch_factor
_ALIGNMENT: Final = 64  # bytes, as torch's own memory


class _Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where a tensor lies in the memory of its batch."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    n_elements: int  # from its first to its last, with those between
    start: int  # of bytes


class _Answer(msgspec.Struct, frozen=True, kw_only=True):
    error: str | None = None  # of a JobError; then there is no memory
    places: tuple[_Place, ...] = ()


@final
@dataclass(frozen=True, eq=False)
class _Reader:
    pid: int
    link: "Connection[bytes, bytes]"
    asked: deque[Wanted] = field(default_factory=deque)  # answers to come, in this order


@final
class ReaderProcesses:
    """Implements `task.data.Readers`, for one thread at a time."""

    def __init__(self, table: str) -> None:
        self.table = table
        self._readers: list[_Reader] = []
        self._asked: dict[Wanted, _Reader] = {}  # batches that will be read, in this order
        self._found: dict[Wanted, Batch | JobError] = {}

    def fork(self, n_readers: int, build: Callable[[], Dataset]) -> None:
        """Start so many readers, which build the data set at once; this process has one thread."""
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        parent = os.getpid()
        for _ in range(n_readers):
            ours, theirs = Pipe()
            pid = os.fork()
            if pid == 0:
                for link in (ours, *(reader.link for reader in self._readers)):
                    link.close()
                _run(theirs, build, self.table, parent=parent)
            theirs.close()
            self._readers.append(_Reader(pid, ours))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        while self._readers:
            self._end(self._readers[-1])

    @property
    def pids(self) -> list[int]:
        return [reader.pid for reader in self._readers]

    @property
    def n_ahead(self) -> int:
        return N_AHEAD_EACH * len(self._readers)

    def read(self, wanted: Wanted, ahead: Sequence[Wanted]) -> Batch:
        # Batches are asked for in the order in which they are read. So those before this one are of
        # a generation that has ended.
        for one in list(self._asked):
            if one == wanted:
                break
            del self._asked[one]
            self._found.pop(one, None)
        for one in (wanted, *ahead):
            if one not in self._asked:
                self._ask(one)
        reader = self._asked[wanted]
        while wanted not in self._found:
            self._receive(reader)
        del self._asked[wanted]
        found = self._found.pop(wanted)
        if isinstance(found, JobError):
            raise found
        return found

    def _ask(self, wanted: Wanted) -> None:
        for reader in self._readers:
            while reader.asked and reader.link.poll():
                self._receive(reader)
        reader = min(self._readers, key=lambda reader: len(reader.asked))
        try:
            reader.link.send_bytes(msgspec.msgpack.encode(wanted))
        except OSError:
            raise self._lost(reader) from None
        reader.asked.append(wanted)
        self._asked[wanted] = reader

    def _receive(self, reader: _Reader) -> None:
        found: Batch | JobError
        try:
            answer = msgspec.msgpack.decode(reader.link.recv_bytes(), type=_Answer)
            if answer.error is None:
                found = _unpacked(answer, recv_handle(reader.link))
            else:
                found = JobError(answer.error)
        except (EOFError, OSError):
            raise self._lost(reader) from None
        wanted = reader.asked.popleft()
        if wanted in self._asked:
            self._found[wanted] = found

    def _lost(self, reader: _Reader) -> DistBeliefError:
        code = self._end(reader)
        how = f"with status {code} (see the log of this role)"
        if code < 0:
            how = f"by signal {signal.Signals(-code).name}"
            how += " (out of memory?)" if code == -signal.SIGKILL else ""
        return DistBeliefError(
            f"process {reader.pid}, which reads [{self.table}], was ended {how}: if it happens "
            f"again, use a smaller num_workers in [{self.table}]"
        )

    def _end(self, reader: _Reader) -> int:
        """End a reader, and return how it ended: its status, or minus a signal."""
        self._readers.remove(reader)
        reader.link.close()
        os.kill(reader.pid, signal.SIGKILL)  # not reaped yet, so the pid is still valid
        return os.waitstatus_to_exitcode(os.waitpid(reader.pid, 0)[1])


def _run(
    link: "Connection[bytes, bytes]", build: Callable[[], Dataset], table: str, *, parent: int
) -> NoReturn:
    def read() -> int:
        end_with_parent(parent, signal.SIGKILL)
        dataset, readers = build(), dict[int, BatchReader]()
        while True:
            try:
                wanted = msgspec.msgpack.decode(link.recv_bytes(), type=Wanted)
            except EOFError:
                return 0
            indices = np.frombuffer(wanted.indices, np.int64)
            samples = BatchIndices(position=0, indices=indices, epoch=wanted.epoch)
            new = BatchReader(dataset, seed=wanted.seed, table=table)
            try:
                batch = readers.setdefault(wanted.seed, new).read(samples)
                answer, memory = _packed(batch, table)
            except JobError as error:
                link.send_bytes(msgspec.msgpack.encode(_Answer(error=str(error))))
                continue
            link.send_bytes(msgspec.msgpack.encode(answer))
            send_handle(link, memory, None)
            os.close(memory)

    run_child(read)


def _packed(batch: Batch, table: str) -> tuple[_Answer, int]:
    """Return where tensors lie in the memory of this descriptor."""
    tensors = {path: _plain(one, shown_path(path), table) for path, one in batch.tensors().items()}
    memory, places, start = os.memfd_create("batch"), list[_Place](), 0
    with os.fdopen(memory, "wb", closefd=False) as file:
        for path, tensor in tensors.items():
            # With the same strides, or kernels would add in another order.
            shape, stride = tuple(tensor.shape), tensor.stride()
            n = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
            if tensor.numel():
                whole = tensor.as_strided((n,), (1,)).resolve_conj().resolve_neg()
                file.seek(start)
                file.write(whole.view(torch.uint8).numpy().data)
            n, dtype = max(n, 1), str(tensor.dtype).removeprefix("torch.")
            places.append(
                _Place(
                    path=path, dtype=dtype, shape=shape, stride=stride, n_elements=n, start=start
                )
            )
            start += -(-n * tensor.itemsize // _ALIGNMENT) * _ALIGNMENT
    os.ftruncate(memory, max(start, 1))
    return _Answer(places=tuple(places)), memory


def _plain(tensor: torch.Tensor, name: str, table: str) -> torch.Tensor:
    kind = str(tensor.layout).removeprefix("torch.")
    if type(tensor) is not torch.Tensor:
        kind = type(tensor).__name__
    elif tensor.is_quantized or tensor.device.type != "cpu":
        kind = f"{tensor.dtype} on {tensor.device}"
    if kind != "strided":
        raise JobError(
            f"[{table}] {name} is {kind}, which processes cannot hand over: return a dense tensor "
            f"of the CPU, or leave num_workers out of [{table}]"
        )
    return tensor.detach()


def _unpacked(answer: _Answer, descriptor: int) -> Batch:
    # MAP_POPULATE fills the page tables at once: no page faults in the step.
    memory = mmap.mmap(descriptor, 0, mmap.MAP_SHARED | mmap.MAP_POPULATE)
    os.close(descriptor)
    tensors: dict[Path, torch.Tensor] = {}
    for place in answer.places:
        dtype = cast("torch.dtype", getattr(torch, place.dtype))
        n, start = place.n_elements, place.start
        whole = torch.frombuffer(memory, dtype=dtype, count=n, offset=start)
        tensors[place.path] = whole.as_strided(place.shape, place.stride)
    return Batch.of(tensors)
