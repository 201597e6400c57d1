"""The join server of a job: where it listens for hosts, and what they receive."""

import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, Self, final

import msgspec
import torch

from distbelief.config.algorithms import cores_of
from distbelief.config.job import Job
from distbelief.job.hosts import ray, spark, ssh
from distbelief.job.hosts.bootstrap import JobAddress, write_job_spec
from distbelief.job.launch.role_process import RoleSpec
from distbelief.parameter_server.layout import Layout
from distbelief.plans.planner.profiling.this_host import memory
from distbelief.protocol.role import Seconds
from distbelief.supervisor.hosts import ClusterConfig
from distbelief.transport.address import Endpoint, is_anywhere, own_address
from distbelief.transport.listen_config import ListenConfig


class HostSource(Protocol):
    """Starts hosts that join one job: `start`, `news` at every tick, `close`."""

    def start(self, address: str, *, directory: Path) -> None:
        """Start hosts, which join at this address; their files go to this directory."""
        ...

    def news(self, now: Seconds) -> list[str]:
        """Return texts for the user, each once. It never waits."""
        ...

    def close(self) -> None:
        """End the hosts."""
        ...


@final
@dataclass(frozen=True, kw_only=True)
class JoinServer:
    reach: ListenConfig  # where its supervisor listens
    n_hosts: int = 0  # hosts to wait for before it begins
    hosts_seconds: float = 600.0  # for them; then it begins with those that are there
    cores: int | None = None  # of this host, for replicas; None for all
    on: str = ""  # what starts the hosts: "ray", "spark", "ssh:HOST1,HOST2"; "": somebody else
    remote: str | None = None  # shell words that run distbelief on hosts reached by ssh
    started: HostSource | None = None  # of hosts that run already

    @property
    def reach_of_roles(self) -> ListenConfig:
        keys = self.reach.keys
        if keys is not None:
            keys = msgspec.structs.replace(keys, believes=True)
        return msgspec.structs.replace(self.reach, keys=keys)

    def cluster(self, job: Job, spec: RoleSpec, *, files: str = "") -> ClusterConfig:
        snapshots = spec.snapshots if job.cluster.checkpoints is not None else ""
        return replace(
            ClusterConfig.of(job, Layout(spec.layout), slots_here=self.slots_here(job)),
            run=secrets.token_hex(4),
            job_spec=write_job_spec(spec, files=files, snapshots=snapshots),
            n_hosts=self.n_hosts,
            hosts_seconds_max=self.hosts_seconds,
            # What started them writes the rows of a lost host again, which takes a while.
            pieces_seconds_max=self.hosts_seconds if self.started is not None else None,
            memory_here=int(memory()),
        )

    def slots_here(self, job: Job) -> int:
        if job.cluster.is_on_device:
            return torch.cuda.device_count()
        cores = len(os.sched_getaffinity(0)) if self.cores is None else self.cores
        return cores // cores_of(job)

    def address(self, endpoint: str) -> JobAddress:
        place = Endpoint.parse(endpoint)
        host = own_address() if is_anywhere(place.host) else place.host
        return JobAddress(host=host, port=place.port, key=place.key, secret=self.reach.secret)

    def checked(self) -> Self:
        """Return the settings for a run, or raise JobError; called before anything is started."""
        self.reach.check()
        if self.on == "ray":
            ray.connect(is_local=self.reach.is_local)
        elif self.on == "spark":
            spark.check_reach(spark.connect(), is_local=self.reach.is_local)
        elif self.on:
            ssh.check(ssh.parse(self.on), is_local=self.reach.is_local)
        return replace(self, reach=self.reach.pinned())

    def source(self, job: Job, *, n_ranks: int, log: Callable[[str], None]) -> HostSource | None:
        """Return what starts hosts for this job, if anything does."""
        if self.started is not None:
            return self.started
        keys = "" if self.reach.keys is None else self.reach.keys.directory
        if not self.on:
            return None
        n_hosts, n_others = max(1, self.n_hosts), n_ranks - self.slots_here(job)
        if self.on in {"ray", "spark"}:
            hosts_of = ray.hosts_of if self.on == "ray" else spark.hosts_of
            host = self.reach.host
            return hosts_of(job, n_hosts=n_hosts, n_processes=n_others, keys=keys, host=host)
        return ssh.SshHosts.of(job, ssh.parse(self.on), command=self.remote, keys=keys, log=log)

    def lines(self, address: JobAddress) -> list[str]:
        keys = "" if address.secret else " --keys ~/.distbelief/keys"
        lines = [f'hosts join by: distbelief join "{address}"{keys}']
        if self.reach.is_open:
            lines.append(
                "NOT SECURE: anyone with this address can read and change the "
                "model. Use keys: distbelief keys new"
            )
        return lines
