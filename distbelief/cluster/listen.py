"""The join server of a job: where it listens for hosts, and what they receive."""

import os
import secrets
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self, final

import msgspec

from distbelief.cluster.bootstrap import JobAddress, write_job_spec
from distbelief.cluster.ray import RayHosts, connect
from distbelief.config.job import Job
from distbelief.launch.role_process import RoleSpec
from distbelief.parameter_server.layout import Layout
from distbelief.supervisor.hosts import ClusterConfig
from distbelief.transport.address import ANYWHERE, Endpoint, own_address
from distbelief.transport.config import ListenConfig


@final
@dataclass(frozen=True, kw_only=True)
class JoinServer:
    reach: ListenConfig  # where its supervisor listens
    n_hosts: int = 0  # hosts to wait for before it begins
    hosts_seconds: float = 600.0  # for them; then it begins with those that are there
    cores: int | None = None  # of this host, for replicas; None for all
    on_ray: bool = False  # whether a Ray cluster provides the hosts

    @property
    def reach_of_roles(self) -> ListenConfig:
        keys = self.reach.keys
        if keys is not None:
            keys = msgspec.structs.replace(keys, believes=True)
        return msgspec.structs.replace(self.reach, keys=keys)

    def cluster(
        self, job: Job, spec: RoleSpec, *, plan: Path | None, files: str = ""
    ) -> ClusterConfig:
        snapshots = spec.snapshots if job.cluster.checkpoints is not None else ""
        return replace(
            ClusterConfig.of(job, Layout(spec.layout), slots_here=self.slots_here(job)),
            run=secrets.token_hex(4),
            job_spec=write_job_spec(spec, plan=plan, files=files, snapshots=snapshots),
            n_hosts=self.n_hosts,
            hosts_seconds_max=self.hosts_seconds,
        )

    def slots_here(self, job: Job) -> int:
        cores = len(os.sched_getaffinity(0)) if self.cores is None else self.cores
        return cores // job.cluster.threads

    def address(self, endpoint: str) -> JobAddress:
        place = Endpoint.parse(endpoint)
        host = own_address() if place.host == ANYWHERE else place.host
        return JobAddress(host=host, port=place.port, key=place.key, secret=self.reach.secret)

    def checked(self) -> Self:
        """Return the settings for a run, or raise JobError; called before anything is started."""
        self.reach.check()
        if self.on_ray:
            connect(is_local=self.reach.is_local)
        return replace(self, reach=self.reach.pinned())

    def ray_hosts(self, job: Job, *, n_machines: int) -> RayHosts:
        return RayHosts.of(
            job,
            n_hosts=max(1, self.n_hosts),
            n_machines=n_machines,
            slots_here=self.slots_here(job),
            keys="" if self.reach.keys is None else self.reach.keys.directory,
        )

    def lines(self, address: JobAddress) -> list[str]:
        keys = "" if address.secret else " --keys ~/.distbelief/keys"
        lines = [f'hosts join by: distbelief join "{address}"{keys}']
        if self.reach.is_open:
            lines.append(
                "NOT SECURE: anyone with this address can read and change the "
                "model. Use keys: distbelief keys new"
            )
        return lines
