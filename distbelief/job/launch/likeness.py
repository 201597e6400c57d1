"""What a host that joins must have in common with the supervisor's: code, data, arithmetic.

A host whose loss had another constant trained with the job, and nobody was told. So both compute
the loss and the gradient of the first samples, in one process, with values drawn for each tensor,
and hash the sources of the job's modules. What differs is named, and the host refused.
"""

import hashlib
import math
import platform
import sys
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, final

import msgspec
import torch

from distbelief.config.job import Job
from distbelief.core.errors import JobError
from distbelief.core.pieces import Pieces
from distbelief.task import task as tasks
from distbelief.task.data import Batch, are_alike, first_of, marks_of, pieces_of, read_batch
from distbelief.worker.local_executor import FlatModel


N_SAMPLES: Final = 16
TOLERANCE: Final = 1e-3  # relative: what rounding makes of float32 in a deep model
_OURS: Final = frozenset({"distbelief", "sandblaster", "__main__", "__mp_main__"})
_OF_ALL: Final = frozenset({"site-packages", "dist-packages"})


@final
class Likeness(msgspec.Struct, frozen=True, kw_only=True):
    build: str  # of what computes: "torch 2.9.0, AVX2, 1 thread"
    sources: dict[str, str]  # hash of each module of the job
    marks: tuple[float, ...] | None = None  # of some samples; None: they differ each time
    pieces: Pieces | None = None  # of the data, if they are in some
    n_samples: int = 0  # whose loss was computed
    loss: float | None = None  # None: not computed, or it differs each time
    gradients: dict[str, float] = {}  # norm of each tensor's
    bits: str = ""  # hash of loss and gradients

    def check(self, other: "Likeness", *, may_round: bool) -> None:
        """Raise JobError unless this host, `other`, does what the supervisor's does.

        With `may_round`, loss and gradients need only be equal but for rounding.
        """
        for name, source in self.sources.items():
            if other.sources.get(name, source) != source:
                raise JobError(
                    f"module {name} has another source here than where the job began: "
                    "use the same code on all hosts"
                )
        if not are_alike(self.marks, other.marks):
            raise JobError(
                "[data.train] has other samples here than where the job began: "
                "use the same data on all hosts"
            )
        if self.loss is None or other.loss is None or self.bits == other.bits:
            return
        what = f"the loss of the first {self.n_samples} samples", self.loss, other.loss
        pairs = [what, *self._gradients(other)]
        for name, there, here in pairs:
            if not math.isclose(there, here, rel_tol=TOLERANCE, abs_tol=TOLERANCE * 1e-3):
                raise JobError(
                    f"{name} is {here:.7g} here and {there:.7g} where the job began, with the same "
                    f"values: use the same code and data ({self._builds(other)})"
                )
        if not may_round:
            raise JobError(
                f"this host rounds otherwise than the job's ({self._builds(other)}): use the same "
                'there, or allow it: [cluster] rounding = "any"'
            )

    def _gradients(self, other: "Likeness") -> Iterator[tuple[str, float, float]]:
        # Of a gradient that is nearly 0 beside the others, all may be rounding.
        floor = TOLERANCE * max(self.gradients.values(), default=0.0)
        for name, norm in self.gradients.items():
            there, here = max(norm, floor), max(other.gradients.get(name, 0.0), floor)
            yield f"the gradient of {name}", there, here

    def _builds(self, other: "Likeness") -> str:
        return f"here {other.build}; there {self.build}"


def likeness_of(job: Job, modules: Sequence[str]) -> Likeness:
    """Compute the likeness of this host; `modules` are those that the job names."""
    dataset = tasks.build_dataset(job.task.train)
    marks, numbers = marks_of(dataset), Likeness(build="", sources={})
    # The parts of a split model may be too large for one process; GPUs of one kind round alike,
    # and are not compared.
    if marks is not None and not (job.cluster.is_split or job.cluster.is_on_device):
        n_samples = min(job.batch_size, N_SAMPLES, len(dataset))
        batch = read_batch(dataset, first_of(dataset, n_samples))
        first, second = (_computed(job, batch) for _ in range(2))
        if first.bits == second.bits:
            numbers = msgspec.structs.replace(first, n_samples=n_samples)
    return msgspec.structs.replace(
        numbers,
        build=_build(),
        sources=_sources(job, modules),
        marks=marks,
        pieces=pieces_of(dataset),
    )


def _build() -> str:
    n = torch.get_num_threads()
    kernels = torch.backends.cpu.get_cpu_capability()
    threads = "1 thread" if n == 1 else f"{n} threads"
    return f"torch {torch.__version__}, {kernels}, {threads}, {platform.machine()}"


def _sources(job: Job, modules: Sequence[str]) -> dict[str, str]:
    """Return hashes of the modules in use whose code comes with the job."""
    named = {name.partition(".")[0] for name in modules} - _OURS
    roots = [Path(path).resolve() for path in job.import_paths]
    found: dict[str, str] = {}
    for name, module in sorted(sys.modules.items()):
        file = Path(getattr(module, "__file__", None) or "")
        top = name.partition(".")[0]
        if file.suffix != ".py" or top in _OURS:
            continue
        is_with_job = not _OF_ALL & {*file.parts} and any(
            file.resolve().is_relative_to(root) for root in roots
        )
        if (is_with_job or top in named) and file.is_file():
            found[name] = hashlib.sha256(file.read_bytes()).hexdigest()
    return found


def _computed(job: Job, batch: Batch) -> Likeness:
    """Return loss and gradients of a batch; without a loss if the model cannot compute it so."""
    nothing = Likeness(build="", sources={})
    try:
        model = FlatModel(tasks.build_model(job.task.model))
        _draw_values(model)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # of dropout
            loss = model.gradient(batch, tasks.build_loss(job.task))
    except Exception:  # noqa: BLE001 -- the user's model, with values that it would never have
        return nothing
    content = hashlib.sha256(repr(loss).encode())
    norms: dict[str, float] = {}
    for name, gradient in zip(model.named_tensors(), model.gradients, strict=True):
        if gradient is not None:
            content.update(gradient.contiguous().view(torch.uint8).numpy().tobytes())
            norms[name] = float(gradient.double().norm())
    if not all(map(math.isfinite, [loss, *norms.values()])):
        return nothing
    return msgspec.structs.replace(nothing, loss=loss, gradients=norms, bits=content.hexdigest())


def _draw_values(model: FlatModel) -> None:
    # A model's own values may come from a file, or from a generator that nobody seeds. Uniform
    # numbers have the same bits everywhere.
    for item, (name, tensor) in enumerate(model.named_tensors().items()):
        if item not in model.trained:
            continue
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        uniform = torch.rand(tensor.shape, generator=generator, dtype=torch.float64) * 2.0 - 1.0
        n_inputs = max(1, tensor[:1].numel())
        drawn = uniform / n_inputs if tensor.ndim > 1 else 1.0 + uniform / 8.0
        tensor.detach().copy_(drawn)
