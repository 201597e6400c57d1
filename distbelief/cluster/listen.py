"""What a job needs so that machines may join: where it listens, what they are told."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self, final

import msgspec

from distbelief.cluster.address import JobAddress
from distbelief.cluster.bootstrap import write_job_spec
from distbelief.cluster.host_table import ClusterConfig, StepTime
from distbelief.cluster.ray import RayHosts, RayOptions, connect
from distbelief.cluster.scheduler import ClusterSupervisor
from distbelief.config.job import Job
from distbelief.launch.role_process import RoleSpec
from distbelief.supervisor.supervisor import Supervisor
from distbelief.transport.address import ANYWHERE, Endpoint, own_number
from distbelief.transport.config import ListenConfig


@final
@dataclass(frozen=True, kw_only=True)
class JoinServer:
    """How a job spans machines.

    Attributes:
        reach: Where its supervisor listens.
        n_hosts: Machines to wait for before it begins.
        hosts_seconds: For them; then it begins with those that are there.
        cores: Of this machine, for replicas; None: all that there are.
        on_ray: Whether a Ray cluster lends the machines.
    """

    reach: ListenConfig
    n_hosts: int = 0
    hosts_seconds: float = 600.0
    cores: int | None = None
    on_ray: bool = False

    @property
    def reach_of_roles(self) -> ListenConfig:
        """From where roles on this machine can be reached."""
        keys = self.reach.keys
        if keys is not None:
            keys = msgspec.structs.replace(keys, believes=True)
        return msgspec.structs.replace(self.reach, keys=keys)

    def around(
        self, supervisor: Supervisor, job: Job, spec: RoleSpec, *, plan: Path | None
    ) -> ClusterSupervisor:
        """Return the supervisor as one whose roles may be elsewhere."""
        config = ClusterConfig(
            run=secrets.token_hex(4),
            brief=write_job_spec(spec, plan=plan),
            n_hosts=self.n_hosts,
            hosts_seconds_max=self.hosts_seconds,
            slots_here=self.slots_here(job),
            threads=job.cluster.threads,
            device=job.cluster.device,
            step=StepTime.of(job),
        )
        return ClusterSupervisor(supervisor, config)

    def slots_here(self, job: Job) -> int:
        """Return how many processes of replicas this machine takes."""
        cores = len(os.sched_getaffinity(0)) if self.cores is None else self.cores
        return cores // job.cluster.threads

    def address(self, endpoint: str) -> JobAddress:
        """Return where other machines join.

        Args:
            endpoint: Where the supervisor listens, as its transport says.
        """
        place = Endpoint.parse(endpoint)
        host = place.host
        if host == ANYWHERE:
            host = own_number()
        return JobAddress(host=host, port=place.port, key=place.key, secret=self.reach.secret)

    def checked(self) -> Self:
        """Return it as it is while a run lasts: to be called before anything is begun.

        Raises:
            JobError: it would be open to strangers, or nobody lends the machines.
        """
        self.reach.check()
        if self.on_ray:
            connect(is_local=self.reach.is_local)
        return replace(self, reach=self.reach.pinned())

    @contextmanager
    def lent(
        self, job: Job, address: JobAddress, *, n_machines: int, directory: Path
    ) -> Iterator[RayHosts | None]:
        """Have machines come, if somebody lends them, for as long as this lasts.

        Yields who lends them.

        Args:
            job: The job.
            address: Where they join.
            n_machines: Of each replica.
            directory: For their logs.
        """
        if not self.on_ray:
            yield None
            return
        wanted = RayOptions.of(
            job,
            n_hosts=max(1, self.n_hosts),
            n_machines=n_machines,
            slots_here=self.slots_here(job),
            keys="" if self.reach.keys is None else self.reach.keys.directory,
        )
        machines = RayHosts(wanted)
        try:
            machines.start(str(address), directory=directory)
            yield machines
        finally:
            machines.close()

    def lines(self, address: JobAddress) -> list[str]:
        """Return what to tell users of other machines."""
        keys = "" if address.secret else " --keys ~/.distbelief/keys"
        lines = [f'machines join by: distbelief join "{address}"{keys}']
        if self.reach.is_open:
            lines.append(
                "NOT SECURE: whoever has this address can read all that is trained, "
                "and change it. Use keys: distbelief keys new"
            )
        return lines
