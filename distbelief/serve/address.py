"""What a training loop needs to join a parameter server: its address, the names of tensors."""

import base64
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, Self, cast
from urllib.parse import parse_qs, urlencode, urlsplit

import msgspec
import torch
from typing_extensions import override

from distbelief.config import tables
from distbelief.config.presets import expand
from distbelief.core.errors import JobError, JobFileError
from distbelief.parameter_server.layout import TensorSpec, in_one_memory, kind_of
from distbelief.parameter_server.policy import DOWNPOUR, ExchangePolicy
from distbelief.parameter_server.rules import UpdateRule, check_groups, rule_of
from distbelief.parameter_server.shard_config import COPIES_MAX
from distbelief.task.initializers import lost
from distbelief.transport.address import Endpoint, number_of, own_address_towards
from distbelief.transport.keys import DIRECTORY, KeyPair, public_key
from distbelief.transport.listen_config import KeyConfig, ListenConfig


SHARDS_MAX: Final = 4096
_NAMES_BYTES_MAX: Final = 1 << 24  # of all names together

# What a server or a loop is given: tensors, tensors with names, or a module that has them.
Tensors = torch.nn.Module | Iterable[torch.Tensor] | Iterable[tuple[str, torch.Tensor]]


class ServerAddress(msgspec.Struct, frozen=True, kw_only=True):
    """The address of a parameter server.

    for this user    ipc://DIRECTORY/.supervisor.1?run=…&shards=2&copies=1&memory=…
    with keys        tcp://HOST:PORT?key=…&run=…&shards=2&copies=1
    without keys     tcp://HOST:PORT?secret=…&run=…&shards=2&copies=1

    A server with another policy than Downpour's adds exchange={"staleness":3, ...}: workers follow
    it. One that knows the names of its tensors adds them, packed, as names=….
    """

    endpoint: str
    run: str  # name of the run
    key: str = ""  # public key of the server
    secret: str = ""  # a password: every process that knows it may push
    n_shards: int
    shard_copies: int = 1
    memory: str  # directory of shared memory, for workers on this host
    exchange: ExchangePolicy = DOWNPOUR
    preset: str = ""  # by which the policy was chosen
    n_buffers: int = 0  # of the tensors, the last
    names: tuple[str, ...] = ()  # of the tensors, in their order; (): unknown

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
        if self.preset:
            query["preset"] = self.preset
        if self.n_buffers:
            query["buffers"] = self.n_buffers
        if self.names:
            packed = zlib.compress(msgspec.json.encode(self.names), 9)
            query["names"] = base64.urlsafe_b64encode(packed).decode().rstrip("=")
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
            preset=query.get("preset", ""),
            n_buffers=int(query.get("buffers", "0")),
            names=_unpacked(query["names"]) if "names" in query else (),
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

    def places(self, names: Sequence[str], *, user: str, of_buffers: bool = False) -> list[int]:
        """Return for each parameter of the server, or each buffer, which of the loop's it is.

        By name where both sides have names, else in the order given. JobError if the names differ.
        """
        n = len(self.names) - self.n_buffers
        wanted = self.names[n:] if of_buffers else self.names[:n]
        if not (wanted and all(names)):
            return list(range(len(names)))
        what = "buffer" if of_buffers else "parameter"
        for ours, theirs, whose in (
            (wanted, names, "the server has {}, which is not"),
            (names, wanted, "{} is not on the server, and is"),
        ):
            missing = [name for name in ours if name not in set(theirs)]
            if missing:
                raise JobError(
                    f"{user}: {whose.format(f'{what} {missing[0]!r}')} among those given here "
                    f"({len(wanted)} there, {len(names)} here): give both sides the same model, or "
                    "one of them no names, to match by position"
                )
        place = {name: index for index, name in enumerate(names)}
        return [place[name] for name in wanted]


def _unpacked(text: str) -> tuple[str, ...]:
    try:
        packed = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
        names = zlib.decompressobj().decompress(packed, _NAMES_BYTES_MAX)
        return msgspec.json.decode(names, type=tuple[str, ...])
    except zlib.error as error:
        raise ValueError(str(error)) from None


def named(tensors: Tensors, *, what: str) -> tuple[list[str], list[torch.Tensor]]:
    """Return names, "" where there are none, and tensors; JobError if there are none."""
    if isinstance(tensors, torch.nn.Module):
        tensors = tensors.named_parameters() if what == "parameter" else saved_buffers(tensors)
    given = cast("object", tensors)
    if not isinstance(given, Iterable) or isinstance(given, torch.Tensor | str):
        shown = " ".join(repr(given).split())[:60]
        raise JobError(f"{what}s are {shown}: give net, or net.{what}s()")
    pairs = [one if isinstance(one, tuple) else ("", one) for one in tensors]
    sizes: set[int] = {len(pair) for pair in pairs}
    if sizes - {2}:
        raise JobError(f"a {what} is a tuple of {max(sizes - {2})}: give net.named_{what}s()")
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if name and names.count(name) > 1})
    if twice:
        raise JobError(f"{what} {twice[0]!r} is given twice: give each its own name")
    return names, [tensor for _, tensor in pairs]


def saved_buffers(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return the buffers that the module saves, by name, whatever a wrapper calls them there."""
    left_out = {
        id(part._buffers[name])  # noqa: SLF001 -- torch has no public way to ask
        for part in module.modules()
        for name in part._non_persistent_buffers_set  # noqa: SLF001
    }
    return [(name, one) for name, one in module.named_buffers() if id(one) not in left_out]


def exchange_policy(
    user: str, usual: Mapping[str, object], preset: str | None, **given: object
) -> ExchangePolicy:
    """Return the usual choices, replaced by a preset's, then by those given; or raise JobError."""
    table = dict(usual)
    if preset is not None:
        try:
            whole = expand({"preset": preset})
            table |= cast("dict[str, object]", whole.get("exchange", {}))
            table.pop("route", None)  # loops of one's own know their server, not each other
            if table.get("push") == {"codec": "auto"}:  # nor the layers of a model
                del table["push"]
        except JobFileError as error:
            raise JobError(f"{user}: {error}") from None
        if "lockfree" in whole:
            raise JobError(
                f"{user}: preset {preset!r} has threads in each replica, and a loop of your own "
                'takes its steps itself: use preset = "downpour", or "dpplee3-asgd" for Exchange'
            )
    if given.get("numbers") is not None:  # short for both
        table = {key: value for key, value in table.items() if key not in {"push", "fetch"}}
    table |= {key: value for key, value in given.items() if value is not None}
    policy = tables.convert(table, ExchangePolicy, user=user)
    if policy.sends_factors:
        raise JobError(
            f'{user}: push has codec "factors" or "auto", and a loop of one\'s own knows '
            'parameters, not layers: use push={"codec": "int4"}, or train by a job'
        )
    return policy


class _Given(msgspec.Struct, frozen=True):
    rule: UpdateRule


def rule_from(table: Mapping[str, object], *, user: str) -> UpdateRule:
    """Return the update rule of a table, or raise JobError."""
    return tables.convert(tables.with_whole_groups({"rule": table}), _Given, user=user).rule


def by_position(rule: UpdateRule, names: Sequence[str]) -> UpdateRule:
    """Return a rule whose groups name tensors as `parameter_specs` does.

    JobError if there are groups, and no names or none that fits one of them.
    """
    if rule.ema is not None:
        raise JobError(
            f"rule has ema = {rule.ema}, which jobs save: in a loop of your own, average its model "
            "by torch.optim.swa_utils.AveragedModel after each step"
        )
    for one in rule.rules:
        for key, count in one.schedule.counted.items():
            raise JobError(
                f"schedule {key} is {count!r}: a server does not know the data of its workers: "
                "give the number of pushes of all workers"
            )
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


def parameter_specs(
    parameters: Iterable[torch.Tensor], *, buffers: Iterable[torch.Tensor] = ()
) -> tuple[TensorSpec, ...]:
    """Return the specs of a training loop's tensors, named by their positions."""
    specs: list[TensorSpec] = []
    parameters, buffers = list(parameters), list(buffers)
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
            way = "use net.float(), and torch.autocast to compute in fewer bits"
            if parameter.is_complex():
                way = "keep its real and imaginary parts in a float32 (torch.view_as_real)"
            elif not parameter.is_floating_point():
                way = "leave it out ([p for p in net.parameters() if p.is_floating_point()])"
            raise JobError(f"parameter {index} is {parameter.dtype}: {way}")
        if parameter.is_meta or parameter.layout != torch.strided:
            kind = "on the meta device" if parameter.is_meta else f"a {parameter.layout} tensor"
            raise JobError(f"parameter {index} is {kind}: give one with all its values")
        shape = tuple(parameter.shape)
        specs.append(TensorSpec(name=f"{index:06d}", shape=shape, kind="parameter"))
    if not specs:
        raise JobError("no parameters are given: is it net.parameters()?")
    for index, buffer in enumerate(buffers):
        if not isinstance(cast("object", buffer), torch.Tensor) or buffer.is_complex():
            kind = getattr(buffer, "dtype", type(buffer).__name__)
            raise JobError(f"buffer {index} is a {kind}: give real tensors, as net.buffers()")
        if not buffer.is_meta and (what := lost(buffer.detach(), buffer.detach().float())):
            raise JobError(
                f"buffer {index} is {buffer.dtype} with {what}, which float32, as a server has it, "
                "does not keep: register it with persistent=False, so that each worker has its own"
            )
        name, shape = f"{len(specs):06d}", tuple(buffer.shape)
        specs.append(TensorSpec(name=name, shape=shape, kind=kind_of(buffer.detach())))
    check_memory(parameters, buffers)
    return tuple(specs)


def check_memory(parameters: Iterable[torch.Tensor], buffers: Iterable[torch.Tensor] = ()) -> None:
    """Raise JobError if a parameter has elements of another tensor: a fetch writes each."""
    named = [(f"parameter {index}", one) for index, one in enumerate(parameters)]
    named += [(f"buffer {index}", one) for index, one in enumerate(buffers)]
    for name, other in in_one_memory(named):
        raise JobError(
            f"{name} and {other} have the same memory, and a server keeps each by itself: make "
            "them one parameter (b.weight = a.weight), given once, or a copy (.clone())"
        )
