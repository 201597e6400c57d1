"""What options of `distbelief serve` and `train --listen` mean: a model, an address."""

import ipaddress
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import torch

from distbelief.cluster.listen import JoinServer
from distbelief.errors import JobError
from distbelief.parameter_server.optimizers import UpdateRule
from distbelief.task.imports import resolve
from distbelief.transport.address import number_of
from distbelief.transport.config import KeyConfig, ListenConfig
from distbelief.transport.keys import new_secret


ANY_PORT: Final = "tcp://127.0.0.1:0"

_BIND: Final = re.compile(r"tcp://(?P<host>[^:/?#\[\]]+):(?P<port>[0-9]{1,5}|\*)")


def model(path: str, *, seed: int) -> torch.nn.Module:
    """Return the model that a function makes, drawn from this seed.

    Raises:
        JobError: there is no such function, or it makes something else.
    """
    factory = resolve(path, table="model")
    torch.manual_seed(seed)
    made: object = factory()
    if not isinstance(made, torch.nn.Module):
        raise JobError(f"{path} returns a {type(made).__name__}: let it return a model")
    return made


def rule(name: str, learning_rate: float, options: Sequence[str]) -> UpdateRule:
    """Return the rule of this name, with these options ("momentum=0.9").

    Raises:
        JobError: naming what makes no sense.
    """
    table: dict[str, object] = {"name": name, "learning_rate": learning_rate}
    for option in options:
        try:
            table |= tomllib.loads(option)
        except tomllib.TOMLDecodeError:
            raise JobError(
                f"--set {option!r}: write KEY=VALUE, such as --set momentum=0.9"
            ) from None
    try:
        made: UpdateRule = msgspec.convert(table, type=UpdateRule)
    except msgspec.ValidationError as error:
        raise JobError(f"--rule {name}: {error}") from None
    return made


def hosting_of(
    listen: str,
    *,
    keys: Path | None,
    insecure: bool,
    n_hosts: int,
    hosts_seconds: float,
    cores: int | None,
    on: str | None = None,
) -> JoinServer:
    """Return how a job spans machines.

    Raises:
        JobError: the address makes no sense, or would be open to strangers.
    """
    if on not in {None, "ray"}:
        raise JobError(f"--on {on!r}: jobs run on this machine, or --on ray")
    found = reach(listen, keys=keys, insecure=insecure, option="--listen")
    if found.keys is not None:
        ring = msgspec.structs.replace(found.keys, role="job")
        found = msgspec.structs.replace(found, keys=ring)
    return JoinServer(
        reach=found, n_hosts=n_hosts, hosts_seconds=hosts_seconds, cores=cores, on_ray=on == "ray"
    )


def reach(
    bind: str | None, *, keys: Path | None, insecure: bool, option: str = "--bind"
) -> ListenConfig:
    """Return from where the server can be reached; by default, by its user's processes.

    Raises:
        JobError: the address makes no sense, or would be open to strangers.
    """
    if bind is None and keys is None and not insecure:
        return ListenConfig()
    bind = bind or ANY_PORT
    found = _BIND.fullmatch(bind)
    if found is None or (found["port"] != "*" and int(found["port"]) > 65535):
        raise JobError(
            f"{option} {bind!r} is no address: it looks like tcp://10.0.0.1:7700, or "
            "tcp://0.0.0.0:7700 for all interfaces"
        )
    if keys is not None and insecure:
        raise JobError(
            "--insecure is for a network of friends, without keys: leave out one of them"
        )
    ring = None
    if keys is not None:
        ring = KeyConfig(directory=str(keys.expanduser().absolute()), role="server")
    number = number_of(found["host"])
    is_named = found["host"] not in {number, "localhost"}
    is_loopback = ipaddress.IPv4Address(number).is_loopback
    if is_named and is_loopback:
        raise JobError(
            f"{option} {bind}: {found['host']} is {number} here, which no other "
            "machine can reach: give the number of an interface, or tcp://0.0.0.0:7700 "
            "for all interfaces; tcp://127.0.0.1:7700 is for this machine alone"
        )
    # Without key files, the run gets a key pair of its own.
    has_secret = ring is None and (insecure or is_loopback)
    wanted = ListenConfig(
        host=number,
        port=0 if found["port"] == "*" else int(found["port"]),
        secret=new_secret() if has_secret else "",
        keys=ring,
    )
    wanted.check()
    return wanted
