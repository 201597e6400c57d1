"""Machines of a Ray cluster join a job: Ray places them, and starts them again.

    distbelief train speech.toml --on ray --hosts 4

One actor for each machine, in a placement group that spreads them over Ray's nodes; in
it runs what `distbelief join` runs. Ray does no more: what is trained travels by this
package's own messages. If a node goes, Ray starts its actor elsewhere, which joins as
any machine does that comes late. If Ray ends on the supervisor's own machine, it ends
the supervisor too, as every process that called it, without a word: `--resume` goes on.
"""

import os
import re
import socket
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Final, Protocol, cast, final

from distbelief.config.job import Job
from distbelief.core.signals import handlers_kept
from distbelief.errors import JobError
from distbelief.launch.role_process import import_paths
from distbelief.roles.role import Seconds
from distbelief.transport.address import LOOPBACK, own_number


FAREWELL_SECONDS: Final = 2.0
ANSWER_SECONDS: Final = 5.0
NEWS_SECONDS: Final = 2.0
"""Between two looks at what Ray has made of it."""

ROOM_SECONDS: Final = 10.0
"""Without room for all, after which the user is told: else he waits in the dark."""

_ADDRESS: Final = re.compile(r"(ray://)?(?P<host>[^:/]+):(?P<port>\d{1,5})")


@final
@dataclass(frozen=True, kw_only=True)
class RayOptions:
    """What a job wants of Ray.

    Attributes:
        n_hosts: Actors.
        cores: Of each.
        keys: Directory of keys on Ray's nodes; "": the job goes without.
        allowed: Modules whose functions the job names.
    """

    n_hosts: int
    cores: int
    keys: str
    allowed: tuple[str, ...]

    @classmethod
    def of(
        cls, job: Job, *, n_hosts: int, n_machines: int, slots_here: int, keys: str
    ) -> "RayOptions":
        """Return what this job wants: room for what the supervisor's machine has none.

        Args:
            job: The job, whose user is also Ray's.
            n_hosts: Actors.
            n_machines: Of each replica.
            slots_here: Processes of replicas that the supervisor's machine takes.
            keys: Directory of keys on Ray's nodes.
        """
        n_processes = max(1, job.cluster.replicas * n_machines - slots_here)
        modules = (path.partition(":")[0] for _, path in import_paths(job))
        return cls(
            n_hosts=n_hosts,
            cores=ceil(n_processes / n_hosts) * job.cluster.threads,
            keys=keys,
            allowed=tuple(dict.fromkeys(modules)),
        )


class RayMachine:
    """The actor: one machine that joins."""

    def join(
        self,
        *,
        address: str,
        keys: str,
        cores: int,
        allowed: tuple[str, ...],
        code: str,
        directory: str,
    ) -> int:
        """Be it until the job is over; return the exit code."""
        from distbelief.cluster import join  # noqa: PLC0415 -- on Ray's node

        wanted = join.JoinOptions(
            address=address,
            keys=Path(keys) if keys else None,
            cores=cores,
            allowed=allowed,
            code=Path(code),
            directory=Path(directory),
        )
        return join.join(wanted, tell=print)


class _Actor(Protocol):
    """What Ray makes of `RayMachine`."""

    @property
    def join(self) -> "_Method": ...


class _Method(Protocol):
    def remote(self, **arguments: object) -> object: ...


def connect(*, is_local: bool) -> None:
    """Find the Ray cluster, or begin one on this machine, as Ray itself decides.

    Args:
        is_local: Whether the job listens where only this machine can reach it.

    Raises:
        JobError: Ray is not installed, there is no cluster, or it cannot reach the job.
    """
    try:
        import ray  # noqa: PLC0415 -- an extra
    except ImportError as error:
        raise JobError(
            f"--on ray: ray is not installed here ({error}): pip install 'distbelief[ray]'"
        ) from None
    _check_address(os.environ.get("RAY_ADDRESS", ""))  # as Ray itself does
    try:
        with handlers_kept():  # Ray would end at SIGTERM, and this job unsaved
            ray.init(ignore_reinit_error=True, log_to_driver=False)
    except (OSError, RuntimeError, ValueError) as error:  # of an address, the last
        raise JobError(f"--on ray: there is no way to a Ray cluster: {error}") from error
    numbers = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    others = sorted(numbers - {ray.util.get_node_ip_address(), LOOPBACK})
    if is_local and others:
        raise JobError(
            f"--on ray: the cluster's nodes ({', '.join(others[:3])}) cannot reach a "
            "job that listens at this machine only: --listen tcp://0.0.0.0:7700 --keys "
            "DIR, of keys that are on all nodes"
        )


def _check_address(address: str) -> None:
    """Refuse one where nobody listens: Ray would try for minutes.

    Raises:
        JobError: naming it, and why.
    """
    found = _ADDRESS.fullmatch(address)
    if found is None:  # none, or one that is for Ray to judge
        return
    hosts, why = [found["host"]], ""
    if hosts[0] in {LOOPBACK, "localhost"}:
        hosts.append(own_number())  # Ray takes that instead
    for host in hosts:
        try:
            socket.create_connection((host, int(found["port"])), ANSWER_SECONDS).close()
        except (OSError, OverflowError) as error:
            why = str(error)
        else:
            return
    raise JobError(
        f"--on ray: nobody answers at RAY_ADDRESS={address} ({why}): start the cluster "
        "(ray start --head), or unset it"
    )


@final
class RayHosts:
    """The machines that Ray lends to one job: `start`, then `close`.

    `connect` comes before.
    """

    def __init__(self, wanted: RayOptions) -> None:
        self._wanted = wanted
        self._actors: list[_Actor] = []
        self._ends: list[object] = []  # of what they do
        self._group: object = None
        self._room: list[object] = []  # what is there once the group has room
        self._begun_at: Seconds | None = None
        self._look_at: Seconds = 0.0

    def start(self, address: str, *, directory: Path) -> None:
        """Ask Ray for machines; they join when it has them.

        Args:
            address: Where the job listens.
            directory: For their logs, on each node.
        """
        import ray  # noqa: PLC0415 -- an extra
        from ray.util import placement_group  # noqa: PLC0415 -- an extra
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # noqa: PLC0415 -- an extra

        wanted = self._wanted
        bundles = [{"CPU": wanted.cores} for _ in range(wanted.n_hosts)]
        self._group = group = placement_group(bundles, strategy="SPREAD")
        self._room = [group.ready()]
        make = ray.remote(num_cpus=wanted.cores, max_restarts=-1, max_task_retries=-1)
        for index in range(wanted.n_hosts):
            strategy = PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=index
            )
            machine = make(RayMachine).options(scheduling_strategy=strategy)
            actor = cast("_Actor", machine.remote())
            end = actor.join.remote(
                address=address,
                keys=wanted.keys,
                cores=wanted.cores,
                allowed=wanted.allowed,
                code=str(Path.cwd()),
                directory=str(directory / f"ray-{index}"),
            )
            self._actors.append(actor)
            self._ends.append(end)

    def news(self, now: Seconds) -> list[str]:
        """Return what the user should know, each thing once.

        Nothing here waits for Ray: this is called between a job's messages.
        """
        if self._group is None or now < self._look_at:
            return []
        import ray  # noqa: PLC0415 -- an extra

        self._look_at = now + NEWS_SECONDS
        self._begun_at = now if self._begun_at is None else self._begun_at
        told: list[str] = []
        if self._room and ray.wait(self._room, timeout=0)[0]:
            self._room = []
        elif self._room and now - self._begun_at >= ROOM_SECONDS:
            self._room = []
            wanted = self._wanted
            told.append(
                f"Ray has no room so far for {wanted.n_hosts} x {wanted.cores} cores (ray status)"
            )
        if self._ends:
            n = len(self._ends)
            ended, self._ends = ray.wait(self._ends, num_returns=n, timeout=0)
            told += [text for end in ended if (text := _trouble(end)) is not None]
        return told

    def close(self) -> None:
        """Give back what Ray lent, once those who joined have seen that it is over."""
        if self._group is None:
            return
        import ray  # noqa: PLC0415 -- an extra
        from ray.util import remove_placement_group  # noqa: PLC0415 -- an extra

        # Else Ray would tell the user of each that its task has failed.
        if self._ends:
            ray.wait(self._ends, num_returns=len(self._ends), timeout=FAREWELL_SECONDS)
        for actor in self._actors:
            ray.kill(actor)
        remove_placement_group(self._group)
        self._actors, self._ends, self._group = [], [], None


def _trouble(end: object) -> str | None:
    """Return why a machine could not be had, if that is how it has ended."""
    import ray  # noqa: PLC0415 -- an extra

    try:
        exit_code = ray.get(end)
    except ray.exceptions.RayError as error:
        lines = str(error).strip().splitlines()  # the last of them is the cause
        return f"a machine that Ray lends cannot take part: {lines[-1][:1000]}"
    text = f"a machine that Ray lends has ended (exit code {exit_code})"
    return text if exit_code else None
