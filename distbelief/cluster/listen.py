"""The join server of a job: where it listens for hosts, and what they receive."""

import os
import secrets
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self, final
from urllib.parse import parse_qs, urlencode, urlsplit

import msgspec
from typing_extensions import override

from distbelief.cluster.bootstrap import write_job_spec
from distbelief.cluster.ray import RayHosts, connect
from distbelief.config.job import Job
from distbelief.errors import JobError
from distbelief.launch.role_process import RoleSpec
from distbelief.supervisor.hosts import ClusterConfig, StepTime
from distbelief.transport.address import ANYWHERE, Endpoint, number_of, own_address
from distbelief.transport.config import ListenConfig
from distbelief.transport.keys import KeyPair, public_key


@final
@dataclass(frozen=True, kw_only=True)
class JobAddress:
    """Where hosts join a job: tcp://HOST:PORT?key=..., without key files ?secret=...

    With key files the address contains no secret. Without them, anyone with it is let in.
    """

    host: str  # name or number, as the user wrote it
    port: int  # TCP port
    key: str = ""  # public key; "" for the server key in the host's allow-list
    secret: str = ""  # of a run without key files

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse what `str` wrote, or a part of it, or raise JobError."""
        try:
            parts = urlsplit(text)
            scheme, host, port = parts.scheme, parts.hostname, parts.port
            query = parse_qs(parts.query)
        except ValueError:  # unbalanced brackets, a port that is not a number, ...
            scheme, host, port, query = "", None, None, {}
        if scheme != "tcp" or not host or not port or not text.isascii():
            raise JobError(
                f"{text!r} is not a job address: use the one that `distbelief train JOB.toml "
                "--listen tcp://HOST:PORT --keys DIR` prints, like tcp://10.0.0.1:7700?key=..."
            )
        key = public_key(query["key"][0]) if "key" in query else ""
        secret = query.get("secret", [""])[0]
        if secret:
            key = KeyPair.parse(secret).public
        return cls(host=host, port=port, key=key, secret=secret)

    @override
    def __str__(self) -> str:
        who = {"secret": self.secret} if self.secret else {"key": self.key}
        return f"{self.endpoint}?{urlencode(who)}"

    @property
    def endpoint(self) -> str:
        return f"tcp://{self.host}:{self.port}"

    def place(self, key: str) -> Endpoint:
        return Endpoint(host=number_of(self.host), port=self.port, key=key)


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

    def cluster(self, job: Job, spec: RoleSpec, *, plan: Path | None) -> ClusterConfig:
        return ClusterConfig(
            run=secrets.token_hex(4),
            job_spec=write_job_spec(spec, plan=plan),
            n_hosts=self.n_hosts,
            hosts_seconds_max=self.hosts_seconds,
            slots_here=self.slots_here(job),
            threads=job.cluster.threads,
            device=job.cluster.device,
            step=StepTime.of(job),
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
