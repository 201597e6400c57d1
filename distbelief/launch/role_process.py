"""The process of one role: build it, wrap it in a `Member`, and let a node run it.

The program that the fork server runs in a child. All it is told lies in one file, the
spec; its output is the role's log.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final, cast, final

import msgspec
import torch

from distbelief.config import algorithms
from distbelief.config.job import Job
from distbelief.config.load import job_from_json
from distbelief.core.memory import KEPT_BYTES_MAX, Memory, PrivateMemory, keep_memory
from distbelief.core.signals import ABANDONED
from distbelief.core.writer import Writer
from distbelief.errors import DistBeliefError, JobError
from distbelief.parameter_server.initial_values import Initial
from distbelief.parameter_server.layout import Layout, LayoutSpec
from distbelief.parameter_server.replication import shard_of
from distbelief.protocol import Failed
from distbelief.roles.role import SUPERVISOR, Address, PeerLost, Role, Snapshot
from distbelief.run.checkpoints import CheckpointStore
from distbelief.task.imports import resolve
from distbelief.task.task import BuildContext, Sample
from distbelief.transport.config import ListenConfig
from distbelief.transport.node import RoleRunner
from distbelief.transport.shared_memory import FileMemory
from distbelief.transport.zmq_transport import Log
from distbelief.worker.member import JobMember, JobMemberConfig, heartbeat_seconds


# What a job from another machine may call here: what this machine's user has named.
#
# A job names functions by import path, and their arguments. Whoever may name any function
# may do anything, so a host calls only functions of modules that its own user allowed:
#
#     --allow-import experiments.speech
#         experiments.speech.model:paper_net      yes
#         experiments.speech:anything             yes
#         experiments.speech.data:os.system       no: that is a function of os
#         experiments.images.model:net            no


def import_paths(job: Job) -> Iterator[tuple[str, str]]:
    """Yield table and path of every function that this job names."""
    yield "model", job.model.factory
    yield "data.train", job.data.train.factory
    if job.data.test is not None:
        yield "data.test", job.data.test.factory
    for table, name in (("algorithm", job.loss), ("evaluation", job.evaluation.metric)):
        if name is not None and ":" in name:
            yield table, name


def check_allowed(job: Job, allowed: Sequence[str]) -> None:
    """Refuse a job that names what this machine's user has not allowed.

    Raises:
        JobError: it names the module, and the option that would allow it.
    """
    paths = list(import_paths(job))
    for table, path in paths:  # before anything is imported
        _check(path.partition(":")[0], path, table=table, allowed=allowed)
    for table, path in paths:
        found = cast("object", resolve(path, table=table))
        module: object = getattr(found, "__module__", None)
        _check(str(module), path, table=table, allowed=allowed)


def _check(module: str, path: str, *, table: str, allowed: Sequence[str]) -> None:
    if any(module == name or module.startswith(f"{name}.") for name in allowed):
        return
    so_far = ", ".join(allowed) or "none so far"
    raise JobError(
        f"[{table}] {path!r} is a function of module {module!r}, from which this "
        f"machine's user lets nothing be called ({so_far}). If that is to be: "
        f"distbelief join ... --allow-import {module}"
    )


SPEC_BYTES_MAX: Final = 1 << 26


class RoleSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What all role processes of one run are told.

    Attributes:
        job: The job as JSON (`Job.to_json`).
        run: Its name, which is in every message.
        supervisor: Where the supervisor is to be found.
        memory: Directory of shared memory; "" if none is shared.
        snapshots: Directory of snapshots.
        layout: Of the model's tensors on the shards.
        initials: How each tensor is drawn, if the shards draw.
        initial_file: Else the file that has the initial values.
        plan: By which replicas are split over machines; None if they are not.
        sample: What the data are like, for that plan.
        n_train: Training samples.
        reach: From where these processes can be reached.
        allowed: Packages and modules that they may import functions from; None: any.
    """

    job: msgspec.Raw
    run: str
    supervisor: str
    memory: str
    snapshots: str
    layout: LayoutSpec
    initials: dict[str, Initial]
    initial_file: str | None
    plan: str | None = None
    sample: Sample | None = None
    n_train: int | None = None
    reach: ListenConfig = ListenConfig()
    allowed: tuple[str, ...] | None = None


@final
class SharedShelf:
    """Both copies of a shard keep their snapshots under the shard's one name."""

    def __init__(self, store: CheckpointStore) -> None:
        self._store = store

    def save(self, role: Address, snapshot: Snapshot) -> None:
        """Keep it for good."""
        self._store.save(shard_of(role), snapshot)

    def newest(self, role: Address) -> Snapshot | None:
        """Return the newest one of either copy."""
        return self._store.newest(shard_of(role))


def read_spec(path: str) -> RoleSpec:
    """Return the spec in this file."""
    with Path(path).open("rb") as file:
        return msgspec.json.decode(file.read(SPEC_BYTES_MAX), type=RoleSpec)


def main(name: str, incarnation: int, path: str) -> int:
    """Be the role `name` until it ends; return the process's exit status."""
    spec = read_spec(path)
    job = job_from_json(bytes(spec.job))
    import_from(job)
    if spec.allowed is not None:
        check_allowed(job, spec.allowed)
    torch.set_num_threads(job.cluster.threads if name.startswith("replica") else 1)
    driven = name.startswith("shard") and algorithms.coordinator_of(job) is not None
    if name.startswith("replica") or driven:
        # Each step's gradients lie where the last one's did; so do the vectors of each
        # set on a shard. One of Downpour makes none: it would hold more for nothing.
        keep_memory()
    else:
        keep_memory(block_bytes_max=KEPT_BYTES_MAX)
    memory: Memory = PrivateMemory(host="")
    if spec.memory:
        memory = FileMemory(Path(spec.memory))
    lines = Writer("log", tell=lambda text: report("warning", text))

    def report(level: str, text: str) -> None:
        # Stamped now; written by a thread, for the disk of the log may hang.
        lines.write(partial(_write, _line(name, incarnation, level, text)))

    with lines:
        report("info", f"process {os.getpid()} begins")
        error = _live(spec, job, memory, name=name, life=incarnation, report=report)
        report("info" if error is None else "error", f"ends: {error or 'as planned'}")
    status = 0 if error is None else 1
    if not lines.close(seconds_max=0.0):
        os._exit(status)  # to flush what that thread has begun would take as long
    return status


def _live(
    spec: RoleSpec, job: Job, memory: Memory, *, name: str, life: int, report: Log
) -> str | None:
    """Be the role until it ends; return what went wrong, if anything did."""
    transport = spec.reach.transport(name=name, incarnation=life, run=spec.run, log=report)
    with transport:
        transport.connect(SUPERVISOR, 0, spec.supervisor)
        config = JobMemberConfig(
            name=name,
            endpoint=transport.endpoint,
            host=memory.host,
            pid=os.getpid(),
            heartbeat_seconds=heartbeat_seconds(name, job.cluster.shard_copies),
            patience_seconds=job.cluster.patience,
        )
        member = JobMember(config, build=lambda: _build(name, job, spec, memory))

        def warn(text: str) -> None:
            report("warning", text)
            member.warn(text)

        store = CheckpointStore(Path(spec.snapshots), report=warn)
        node = RoleRunner(member, transport=transport, log=report, store=SharedShelf(store))
        _end_when_abandoned(node)
        error = node.run()
        if error is not None and not member.told_failure:
            transport.send(SUPERVISOR, Failed(error=error[:8192], culprit_is_job=False))
    return error


def _end_when_abandoned(node: RoleRunner) -> None:
    """End once the fork server says that the supervisor is gone; a shard saves."""
    if threading.current_thread() is not threading.main_thread():
        return

    def end(_number: int, _frame: object) -> None:
        reason = "the supervisor was killed"
        node.post(PeerLost(peer=SUPERVISOR, incarnation=0, reason=reason))

    signal.signal(ABANDONED, end)


def import_from(job: Job) -> None:
    """Let the user's import paths be found, before anything of the same name."""
    sys.path[:] = dict.fromkeys((*job.import_paths, *sys.path))


def log(name: str, incarnation: int, level: str, text: str) -> None:
    """Write one line to the log of this process."""
    _write(_line(name, incarnation, level, text))


def _line(name: str, incarnation: int, level: str, text: str) -> str:
    now = time.time()  # noqa: TID251 -- the time of day, for people
    clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
    return f"{clock}.{int(now % 1 * 1000):03d} {name}#{incarnation} {level}: {text}\n"


def _write(line: str) -> None:
    """Write one line to the log of this process, if there is room for it."""
    with suppress(OSError):  # a full disk ends no role; the supervisor tells of it
        sys.stdout.write(line)
        sys.stdout.flush()


def _build(name: str, job: Job, spec: RoleSpec, memory: Memory) -> Role:
    algorithm = algorithms.load(algorithms.find(job.algorithm_name))
    context = BuildContext(
        task=job.task,
        layout=Layout(spec.layout),
        n_replicas=job.cluster.replicas,
        n_shards=job.cluster.shards,
        seed=job.evaluation.seed,
        memory=memory,
        initials=spec.initials,
        initial_file=spec.initial_file,
        evaluation_subset=job.evaluation.subset,
        threads=job.cluster.threads,
        shard_copies=job.cluster.shard_copies,
        plan=spec.plan,
        sample=spec.sample,
        device=job.cluster.device,
        n_train=spec.n_train,
    )
    try:
        return algorithm.build(name, config=job.algorithm, context=context)
    except DistBeliefError:
        raise
    except MemoryError as error:
        raise DistBeliefError(f"out of memory while building {name}") from error
