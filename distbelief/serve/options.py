"""Options of `distbelief serve` and `train --listen`: model, update rule, address, keys."""

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Final, cast

import msgspec
import torch

from distbelief.config.presets import expand
from distbelief.core.errors import JobError, JobFileError
from distbelief.job.hosts import ssh
from distbelief.job.hosts.join_server import JoinServer
from distbelief.parameter_server.rules import TORCH_RULES, UpdateRule
from distbelief.serve.address import by_position, rule_from
from distbelief.task.task import ModelSpec, build_model
from distbelief.transport.address import is_loopback, number_of
from distbelief.transport.keys import new_secret
from distbelief.transport.listen_config import KeyConfig, ListenConfig


ANY_PORT: Final = "tcp://127.0.0.1:0"

_BIND: Final = re.compile(
    r"tcp://(\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<host>[^:/?#\[\]]+)):(?P<port>[0-9]{1,5}|\*)"
)


def model(path: str, *, seed: int) -> torch.nn.Module:
    """Return the model that the function "MODULE:FUNCTION" makes, with this random seed."""
    return build_model(ModelSpec(factory=path, seed=seed))


def rule(
    name: str | None,
    learning_rate: float | None,
    options: Sequence[str],
    *,
    preset: str | None = None,
    names: Sequence[str] = (),  # of the parameters
) -> UpdateRule:
    """Return an update rule, or a preset's, with options such as "momentum=0.9"."""
    usual = {} if preset is not None else {"name": "sgd"}
    rate_key = "lr" if name in TORCH_RULES else "learning_rate"
    given = {"name": name, rate_key: learning_rate}
    table: dict[str, object] = {
        **usual,
        **{key: value for key, value in given.items() if value is not None},
    }
    for option in options:
        try:
            table |= tomllib.loads(option)
        except tomllib.TOMLDecodeError:
            raise JobError(
                f"--set {option!r}: write KEY=VALUE, such as --set momentum=0.9"
            ) from None
    try:
        whole = table
        if preset is not None:
            whole = cast("dict[str, object]", expand({"preset": preset, "rule": table})["rule"])
    except JobFileError as error:
        raise JobError(f"--{error}") from None
    made = rule_from({rate_key: 0.01, **whole}, user=f"--rule {whole['name']}")
    return by_position(made, names)


def join_server(
    listen: str,
    *,
    keys: Path | None,
    insecure: bool,
    n_hosts: int,
    hosts_seconds: float,
    cores: int | None,
    on: str | None = None,
    remote: str | None = None,
) -> JoinServer:
    """Return the join server of a job that other hosts may join."""
    if on is not None and on.startswith(ssh.PREFIX):
        ssh.parse(on)
    elif on not in {None, "ray", "spark"}:
        raise JobError(
            f'--on {on!r} is not supported: use "ray", "spark" or "ssh:HOST1,HOST2", or leave it '
            "out"
        )
    elif remote is not None:
        raise JobError("--remote is for hosts reached by ssh: add --on ssh:HOST1,HOST2")
    parsed = listen_config(listen, keys=keys, insecure=insecure, option="--listen")
    if parsed.keys is not None:
        key_config = msgspec.structs.replace(parsed.keys, role="job")
        parsed = msgspec.structs.replace(parsed, keys=key_config)
    return JoinServer(
        reach=parsed,
        n_hosts=n_hosts,
        hosts_seconds=hosts_seconds,
        cores=cores,
        on=on or "",
        remote=remote,
    )


def listen_config(
    bind: str | None, *, keys: Path | None, insecure: bool, option: str = "--bind"
) -> ListenConfig:
    """Return where to listen; by default only this user's processes can connect."""
    if bind is None and keys is None and not insecure:
        return ListenConfig()
    bind = bind or ANY_PORT
    parsed = _BIND.fullmatch(bind)
    if parsed is None or (parsed["port"] != "*" and int(parsed["port"]) > 65535):
        raise JobError(
            f"{option} {bind!r} is no address: write tcp://10.0.0.1:7700, or tcp://0.0.0.0:7700"
        )
    if keys is not None and insecure:
        raise JobError("--insecure and --keys exclude each other: leave out one of them")
    key_config = None
    if keys is not None:
        key_config = KeyConfig(directory=str(keys.expanduser().absolute()), role="server")
    number = number_of(parsed["six"] or parsed["host"])
    is_named = not parsed["six"] and parsed["host"] not in {number, "localhost"}
    is_local = is_loopback(number)
    if is_named and is_local:
        raise JobError(
            f"{option} {bind}: {parsed['host']} is {number} here, for this host alone: give the IP "
            "address of an interface, or tcp://0.0.0.0:7700 for all"
        )
    # Without key files, the address contains the secret of a key pair made for this run.
    has_secret = key_config is None and (insecure or is_local)
    config = ListenConfig(
        host=number,
        port=0 if parsed["port"] == "*" else int(parsed["port"]),
        secret=new_secret() if has_secret else "",
        keys=key_config,
    )
    config.check()
    return config
