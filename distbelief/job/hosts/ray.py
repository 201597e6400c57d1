"""Hosts from a Ray cluster: one task runs a host, and again elsewhere if its node is lost.

    distbelief train speech.toml --on ray --hosts 4

What tasks do is in `task_hosts`. If Ray ends on the supervisor's host, it kills the supervisor too,
like every process that connected to it: `--resume` goes on.
"""

import os
import re
import socket
from collections.abc import Callable, Iterable, Sequence
from math import ceil
from typing import TYPE_CHECKING, Final, final

from distbelief.config.algorithms import cores_of
from distbelief.config.job import Job
from distbelief.core.errors import JobError
from distbelief.core.signals import handlers_kept
from distbelief.job.hosts.host_task import HostTask, run_blocks
from distbelief.job.hosts.task_hosts import TaskHosts
from distbelief.transport.address import LOOPBACK, own_address


if TYPE_CHECKING:
    from pyarrow import RecordBatch

ANSWER_SECONDS: Final = 5.0

_ADDRESS: Final = re.compile(r"(ray://)?(?P<host>[^:/]+):(?P<port>\d{1,5})")


def connect(*, is_local: bool) -> None:
    """Connect to Ray or start it, as Ray decides; JobError if it cannot reach the job."""
    try:
        import ray  # noqa: PLC0415 -- an extra
    except ImportError as error:
        raise JobError(
            f"--on ray: ray is not installed here ({error}): pip install 'distbelief[ray]'"
        ) from None
    _check_address(os.environ.get("RAY_ADDRESS", ""))  # as Ray itself does
    os.environ.setdefault("RAY_worker_niceness", "0")  # of a cluster that starts here
    try:
        with handlers_kept():  # Ray's handler would end this process at SIGTERM, unsaved
            ray.init(ignore_reinit_error=True, log_to_driver=False)
    except (OSError, RuntimeError, ValueError) as error:  # ValueError: a bad address
        raise JobError(f"--on ray: cannot connect to a Ray cluster: {error}") from error
    numbers = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    others = sorted(numbers - {ray.util.get_node_ip_address(), LOOPBACK})
    if is_local and others:
        raise JobError(
            f"--on ray: {', '.join(others[:3])} cannot reach a job that listens at this host only: "
            "use --listen tcp://0.0.0.0:7700 --keys DIR, with keys on all nodes"
        )


def _check_address(address: str) -> None:
    """Raise JobError for an address where nothing listens: Ray would try for minutes."""
    found = _ADDRESS.fullmatch(address)
    if found is None:  # empty, or a form that only Ray understands
        return
    hosts, why = [found["host"]], ""
    if hosts[0] in {LOOPBACK, "localhost"}:
        hosts.append(own_address())  # Ray uses this one instead
    for host in hosts:
        try:
            socket.create_connection((host, int(found["port"])), ANSWER_SECONDS).close()
        except (OSError, OverflowError) as error:
            why = str(error)
        else:
            return
    raise JobError(
        f"--on ray: nothing answers at RAY_ADDRESS={address} ({why}): start the cluster "
        "(ray start --head), or unset it"
    )


@final
class RayTasks:
    """Implements `task_hosts.Tasks`: one for each list of blocks, of which `read` makes rows.

    Ray runs one where most of its blocks lie, and computes those of a lost node again.
    """

    name = "Ray"

    def __init__(
        self,
        parts: Sequence[Sequence[object]],
        *,
        read: "Callable[[Sequence[object]], Iterable[RecordBatch]] | None" = None,
    ) -> None:
        self._parts, self._read = parts, read
        self._running: list[object] = []

    def run(self, task: HostTask, *, cores: int) -> None:
        import ray  # noqa: PLC0415 -- an extra

        host = ray.remote(
            num_cpus=cores,
            max_retries=-1,
            retry_exceptions=[ChildProcessError],  # others would come again
            scheduling_strategy="DEFAULT" if any(self._parts) else "SPREAD",
        )(run_blocks)
        self._running = [
            host.remote(task, part, self._read, *blocks) for part, blocks in enumerate(self._parts)
        ]
        try:
            ray.get(self._running)
        except Exception:
            self.cancel()
            raise

    def cancel(self) -> None:
        import ray  # noqa: PLC0415 -- an extra

        for one in self._running:
            ray.cancel(one, force=True)

    def runs_again(self, stage: int) -> bool:
        del stage
        return False


def hosts_of(job: Job, *, n_hosts: int, n_processes: int, keys: str, host: str) -> TaskHosts:
    """Return as many hosts, for the processes beyond those on the supervisor's own host."""
    hosts = TaskHosts(RayTasks([()] * n_hosts), host=host, keys=keys)
    hosts.job = job
    hosts.begin(n_parts=n_hosts, cores=ceil(max(1, n_processes) / n_hosts) * cores_of(job))
    return hosts
