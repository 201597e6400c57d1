"""What a training loop needs to join a parameter server: its address, the names of tensors."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, Self, cast
from urllib.parse import parse_qs, urlencode, urlsplit

import msgspec
import torch
from typing_extensions import override

from distbelief.config.presets import expand
from distbelief.errors import JobError, JobFileError
from distbelief.parameter_server.config import COPIES_MAX
from distbelief.parameter_server.layout import TensorSpec
from distbelief.parameter_server.optimizers import UpdateRule, check_groups, rule_of
from distbelief.parameter_server.policy import DOWNPOUR, ExchangePolicy
from distbelief.transport.address import Endpoint, number_of, own_address_towards
from distbelief.transport.config import KeyConfig, ListenConfig
from distbelief.transport.keys import DIRECTORY, KeyPair, public_key


SHARDS_MAX: Final = 4096


class ServerAddress(msgspec.Struct, frozen=True, kw_only=True):
    """The address of a parameter server.

    for this user    ipc://DIRECTORY/.supervisor.1?run=…&shards=2&copies=1&memory=…
    with keys        tcp://HOST:PORT?key=…&run=…&shards=2&copies=1
    without keys     tcp://HOST:PORT?secret=…&run=…&shards=2&copies=1

    A server with another policy than Downpour's adds exchange={"staleness":3, ...}: workers follow
    it.
    """

    endpoint: str
    run: str  # name of the run
    key: str = ""  # public key of the server
    secret: str = ""  # a password: every process that knows it may push
    n_shards: int
    shard_copies: int = 1
    memory: str  # directory of shared memory, for workers on this host
    exchange: ExchangePolicy = DOWNPOUR

    @override
    def __str__(self) -> str:
        query: dict[str, str | int] = {"key": self.key} if self.key else {}
        if self.secret:
            query = {"secret": self.secret}
        query |= {"run": self.run, "shards": self.n_shards, "copies": self.shard_copies}
        if self.memory:
            query["memory"] = self.memory
        if self.exchange != DOWNPOUR:
            query["exchange"] = msgspec.json.encode(self.exchange.chosen).decode()
        return f"{self.endpoint}?{urlencode(query)}"

    def place(self) -> Endpoint:
        """Return the endpoint to connect to, or raise JobError."""
        parts = urlsplit(self.endpoint)
        if parts.scheme == "ipc":
            return Endpoint(path=parts.path)
        key = KeyPair.parse(self.secret).public if self.secret else self.key
        return Endpoint(host=number_of(parts.hostname or ""), port=parts.port or 0, key=key)

    def listen_config(self, keys: str | Path | None = None) -> ListenConfig:
        """Return where a worker of this server listens."""
        place = self.place()
        if place.path:
            return ListenConfig(directory=str(Path(place.path).parent))
        host = own_address_towards(place.host)
        if self.secret:
            return ListenConfig(host=host, secret=self.secret)
        directory = Path(DIRECTORY if keys is None else keys).expanduser()
        key_config = KeyConfig(directory=str(directory), role="worker", server_key=place.key)
        return ListenConfig(host=host, keys=key_config)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse an address, as `str` writes it, or raise JobError."""
        if not isinstance(text, str):
            raise JobError(
                f"server is {text!r}: use ParameterServer(...).address, or one that `serve` prints"
            )
        try:
            return cls._read(text)
        except (KeyError, ValueError, JobError):
            raise JobError(
                f"{text!r} is no address of a parameter server: use ParameterServer(...).address, "
                "or what `distbelief serve` prints, as tcp://10.0.0.1:7700?key=…&run=…&shards=2"
            ) from None

    @classmethod
    def _read(cls, text: str) -> Self:
        parts = urlsplit(text)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        is_file = parts.scheme == "ipc" and not parts.netloc and parts.path
        address = cls(
            endpoint=f"{parts.scheme}://{parts.netloc}{parts.path if is_file else ''}",
            run=query["run"],
            key=public_key(query["key"]) if "key" in query else "",
            secret=query.get("secret", ""),
            n_shards=int(query["shards"]),
            shard_copies=int(query.get("copies", "1")),
            memory=query.get("memory", ""),
            exchange=msgspec.json.decode(query.get("exchange", "{}"), type=ExchangePolicy),
        )
        if address.secret:
            KeyPair.parse(address.secret)
        if not (is_file or (parts.scheme == "tcp" and parts.port)):
            raise JobError("no endpoint")
        if bool(address.key) + bool(address.secret) != (0 if is_file else 1):
            raise JobError("a server over TCP has a key or a secret")
        copies = address.shard_copies
        if not (1 <= address.n_shards <= SHARDS_MAX and 1 <= copies <= COPIES_MAX):
            raise JobError("no such server")
        return address


def exchange_policy(
    user: str, usual: Mapping[str, object], preset: str | None, **given: object
) -> ExchangePolicy:
    """Return the usual choices, replaced by a preset's, then by those given; or raise JobError."""
    table = dict(usual)
    try:
        if preset is not None:
            table |= cast("dict[str, object]", expand({"preset": preset}).get("exchange", {}))
        table |= {key: value for key, value in given.items() if value is not None}
        return msgspec.convert(table, type=ExchangePolicy)
    except (msgspec.ValidationError, JobFileError) as error:
        raise JobError(f"{user}: {error}") from None


def by_position(rule: UpdateRule, names: Sequence[str]) -> UpdateRule:
    """Return a rule whose groups name tensors as `parameter_specs` does.

    JobError if there are groups, and no names or none that fits one of them.
    """
    if not rule.groups:
        return rule
    if not names:
        raise JobError(
            f"rule.groups has {', '.join(map(repr, rule.groups))}, and the parameters have no "
            "names: give net.named_parameters()"
        )
    try:
        check_groups(rule, names)
    except ValueError as error:
        raise JobError(str(error)) from None
    found = {f"{index:06d}": rule_of(rule, name) for index, name in enumerate(names)}
    groups = {place: one for place, one in found.items() if one is not rule}
    return msgspec.structs.replace(rule, groups=groups)


def parameter_specs(parameters: Iterable[torch.nn.Parameter]) -> tuple[TensorSpec, ...]:
    """Return the specs of a training loop's parameters, named by their positions."""
    specs = []
    for index, parameter in enumerate(parameters):
        if not isinstance(cast("object", parameter), torch.Tensor):
            raise JobError(
                f"parameter {index} is a {type(parameter).__name__}: give net.parameters()"
            )
        if torch.nn.parameter.is_lazy(parameter):
            raise JobError(
                f"parameter {index} has no shape yet: run a batch through the net first, or "
                "replace its Lazy module by one with its sizes given"
            )
        if parameter.dtype != torch.float32:
            raise JobError(f"parameter {index} is {parameter.dtype}: use net.float()")
        shape = tuple(parameter.shape)
        specs.append(TensorSpec(name=f"{index:06d}", shape=shape, kind="parameter"))
    if not specs:
        raise JobError("no parameters are given: is it net.parameters()?")
    return tuple(specs)
