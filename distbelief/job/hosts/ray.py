"""Hosts from a Ray cluster: Ray places them, and restarts them.

    distbelief train speech.toml --on ray --hosts 4

One actor per host runs what `distbelief join` runs, in a placement group that spreads over Ray's
nodes. Parameters and gradients travel by this package's own messages. If a node is lost, Ray
restarts its actor elsewhere, which joins like any late host. If Ray ends on the supervisor's host,
it kills the supervisor too, like every process that connected to it: `--resume` goes on.
"""

import os
import re
import socket
from math import ceil
from pathlib import Path
from typing import Final, Self, final

from distbelief.config.algorithms import cores_of
from distbelief.config.job import Job
from distbelief.core.errors import JobError
from distbelief.core.signals import handlers_kept
from distbelief.job.hosts.agent import JoinOptions
from distbelief.job.launch.role_process import modules_of, places_of
from distbelief.protocol.role import Seconds
from distbelief.transport.address import LOOPBACK, own_address


CLOSE_SECONDS: Final = 2.0
ANSWER_SECONDS: Final = 5.0
NEWS_SECONDS: Final = 2.0  # between two checks of the actors
RESOURCE_SECONDS: Final = 10.0  # without resources for all actors, until the user is warned

_ADDRESS: Final = re.compile(r"(ray://)?(?P<host>[^:/]+):(?P<port>\d{1,5})")


class RayMachine:
    """The actor: one host that joins."""

    def join(self, options: JoinOptions) -> int:
        from distbelief.job.hosts.join import join  # noqa: PLC0415 -- on Ray's node

        return join(options, tell=print)


def connect(*, is_local: bool) -> None:
    """Connect to Ray or start it, as Ray decides; JobError if it cannot reach the job."""
    try:
        import ray  # noqa: PLC0415 -- an extra
    except ImportError as error:
        raise JobError(
            f"--on ray: ray is not installed here ({error}): pip install 'distbelief[ray]'"
        ) from None
    _check_address(os.environ.get("RAY_ADDRESS", ""))  # as Ray itself does
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
class RayHosts:
    """The hosts that Ray provides to one job: `connect`, then `start`, then `close`.

    Each runs in an actor that has so many `cores`. `keys` is a directory on Ray's nodes, or "";
    `allowed` are the modules whose functions the job names, `places` where it saves.
    """

    def __init__(
        self,
        *,
        n_hosts: int,
        cores: int,
        keys: str,
        allowed: tuple[str, ...],
        places: tuple[str, ...] = (),
    ) -> None:
        self.n_hosts, self.cores, self.allowed = n_hosts, cores, allowed
        self._keys, self._places = keys, places
        self._actors: list[object] = []
        self._ends: list[object] = []  # result of each actor's `join`
        self._group: object = None
        self._pending: list[object] = []  # ready once the group has its resources
        self._begun_at: Seconds | None = None
        self._look_at: Seconds = 0.0

    @classmethod
    def of(cls, job: Job, *, n_hosts: int, n_processes: int, keys: str) -> Self:
        """Return as many hosts, for the processes beyond those on the supervisor's own host."""
        cores = ceil(max(1, n_processes) / n_hosts) * cores_of(job)
        allowed, places = modules_of(job), places_of(job)
        return cls(n_hosts=n_hosts, cores=cores, keys=keys, allowed=allowed, places=places)

    def start(self, address: str, *, directory: Path) -> None:
        """Ask Ray for hosts; they join when it has them."""
        import ray  # noqa: PLC0415 -- an extra
        from ray.util import placement_group  # noqa: PLC0415 -- an extra
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # noqa: PLC0415 -- an extra

        bundles = [{"CPU": self.cores} for _ in range(self.n_hosts)]
        self._group = group = placement_group(bundles, strategy="SPREAD")
        self._pending = [group.ready()]
        make = ray.remote(num_cpus=self.cores, max_restarts=-1, max_task_retries=-1)
        for index in range(self.n_hosts):
            strategy = PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=index
            )
            machine = make(RayMachine).options(scheduling_strategy=strategy)
            actor = machine.remote()
            host = JoinOptions(
                address=address,
                keys=Path(self._keys) if self._keys else None,
                cores=self.cores,
                allowed=self.allowed,
                places=self._places,
                code=Path.cwd(),
                directory=directory / f"ray-{index}",
            )
            end = actor.join.remote(host)
            self._actors.append(actor)
            self._ends.append(end)

    def news(self, now: Seconds) -> list[str]:
        """Return texts for the user, each once.

        It never waits for Ray: it is called between a job's messages.
        """
        if self._group is None or now < self._look_at:
            return []
        import ray  # noqa: PLC0415 -- an extra

        self._look_at = now + NEWS_SECONDS
        self._begun_at = now if self._begun_at is None else self._begun_at
        texts: list[str] = []
        if self._pending and ray.wait(self._pending, timeout=0)[0]:
            self._pending = []
        elif self._pending and now - self._begun_at >= RESOURCE_SECONDS:
            self._pending = []
            texts.append(
                f"Ray has no resources for {self.n_hosts} x {self.cores} cores (ray status)"
            )
        if self._ends:
            n = len(self._ends)
            ended, self._ends = ray.wait(self._ends, num_returns=n, timeout=0)
            texts += [text for end in ended if (text := _failure_text(end)) is not None]
        return texts

    def close(self) -> None:
        if self._group is None:
            return
        import ray  # noqa: PLC0415 -- an extra
        from ray.util import remove_placement_group  # noqa: PLC0415 -- an extra

        # Else Ray would report each task as failed.
        if self._ends:
            ray.wait(self._ends, num_returns=len(self._ends), timeout=CLOSE_SECONDS)
        for actor in self._actors:
            ray.kill(actor)
        remove_placement_group(self._group)
        self._actors, self._ends, self._group = [], [], None


def _failure_text(end: object) -> str | None:
    import ray  # noqa: PLC0415 -- an extra

    try:
        exit_code = ray.get(end)
    except ray.exceptions.RayError as error:
        lines = str(error).strip().splitlines()  # the last line is the cause
        return f"a host from Ray cannot take part: {lines[-1][:1000]}"
    text = f"a host from Ray has ended (exit code {exit_code})"
    return text if exit_code else None
