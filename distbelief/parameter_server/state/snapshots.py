"""A shard's state as a snapshot, and back, bit for bit.

What must be restored together lies in one snapshot: values, rule state, clock, and per
client the watermark, so that no push is applied twice to what was restored (Lee et al.
2015, RIFL: the completion record is written with the object that it is about).

    arrays   "values" (shard_size,), "state.NAME" (n_gradient,) per vector of the rule
    facts    format, layout, index, incarnation, clock, rule, clients, steps (as JSON)

A snapshot is not trusted: whatever does not fit raises `StorageError` and says what to
do. Incarnations only rise, in a resumed run too: a snapshot that is not of an earlier
incarnation cannot be told from one whose watermarks belong to other clients' pushes. Of
two copies of a shard the pairing stands for the incarnation (`messages`), and whoever
is told to lead compares.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, final

import msgspec
import numpy as np

from distbelief.errors import RemoteProtocolError, StorageError
from distbelief.parameter_server.layout.layout import Layout
from distbelief.parameter_server.rules.steps import Steps
from distbelief.parameter_server.rules.update_rules import State, UpdateRule
from distbelief.parameter_server.state.slots import Client
from distbelief.roles import Address, Snapshot
from distbelief.vectors import Element, Vector


FORMAT = "distbelief-shard-1"

_Count = Annotated[int, msgspec.Meta(ge=0)]
_Word = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class _ClientFacts(msgspec.Struct, frozen=True, kw_only=True):
    incarnation: _Count
    watermark: _Count
    applied: _Count
    samples: _Count
    staleness: _Count


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ShardState:
    """All of a shard that outlives it."""

    incarnation: int  # of the shard, in the sense of `messages`; 0: of none yet
    clock: int
    values: Vector  # (shard_size,)
    state: State  # each (n_gradient,)
    clients: tuple[Client, ...]
    steps: Steps


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ShardIdentity:
    """What a snapshot must agree with."""

    index: int
    layout: Layout
    rule: UpdateRule


def take(label: str, state: ShardState, *, identity: ShardIdentity) -> Snapshot:
    """Return a snapshot that shares the arrays of `state`."""
    clients = {
        client.name: _ClientFacts(
            incarnation=client.incarnation,
            watermark=client.watermark,
            applied=client.applied,
            samples=client.samples,
            staleness=client.staleness,
        )
        for client in state.clients
    }
    arrays = {"values": state.values}
    arrays |= {f"state.{name}": vector for name, vector in state.state.items()}
    return Snapshot(
        label=label,
        arrays=arrays,
        facts={
            "format": FORMAT,
            "layout": identity.layout.fingerprint,
            "index": str(identity.index),
            "incarnation": str(state.incarnation),
            "clock": str(state.clock),
            "rule": identity.rule.name,
            "clients": msgspec.json.encode(clients).decode(),
            "steps": msgspec.json.encode(state.steps.words().tolist()).decode(),
        },
    )


def restore(snapshot: Snapshot, *, identity: ShardIdentity, incarnation: int | None) -> ShardState:
    """Return the state that the snapshot holds, in arrays of its own.

    Args:
        snapshot: The newest whole one of this shard.
        identity: What it must agree with.
        incarnation: Of the shard now; the snapshot must be of an earlier one. None if
            nobody can say yet: then the state is of the snapshot's incarnation.

    Raises:
        StorageError: it is damaged, or of another shard, layout, rule or run.
    """
    return _Reader(snapshot, identity).read(incarnation=incarnation)


@final
class _Reader:
    """Reads one snapshot, and knows what to say of it."""

    def __init__(self, snapshot: Snapshot, identity: ShardIdentity) -> None:
        self._snapshot = snapshot
        self._identity = identity

    def read(self, *, incarnation: int | None) -> ShardState:
        """Check everything, then copy."""
        identity, layout = self._identity, self._identity.layout
        self._expect("format", FORMAT, mend="it was written by another version")
        self._expect(
            "layout",
            layout.fingerprint,
            mend="resume with the model and the number of shards it was made with",
        )
        self._expect("index", str(identity.index), mend="it belongs to another shard")
        self._expect("rule", identity.rule.name, mend="resume with that rule, or start anew")
        earlier = self._count("incarnation")
        if incarnation is not None and earlier >= incarnation:
            raise self._error(
                f"incarnation is {earlier}, and this shard's only {incarnation}: a "
                "resumed run must go on counting incarnations where the first ended"
            )
        size, n_gradient = (layout.shard_size(identity.index), layout.n_gradient(identity.index))
        state = identity.rule.state(n_gradient, layout.dtype)
        unknown = self._snapshot.arrays.keys() - {"values", *(f"state.{name}" for name in state)}
        if unknown:
            raise self._error(f"arrays {sorted(unknown)} mean nothing to this shard")
        return ShardState(
            incarnation=earlier if incarnation is None else incarnation,
            clock=self._count("clock"),
            values=self._array("values", size, layout.dtype),
            state={
                name: self._array(f"state.{name}", n_gradient, vector.dtype)
                for name, vector in state.items()
            },
            clients=tuple(self._clients()),
            steps=self._steps(size),
        )

    def _error(self, what: str) -> StorageError:
        return StorageError(
            f"snapshot {self._snapshot.label!r} of shard {self._identity.index} cannot "
            f"be restored: {what}"
        )

    def _fact(self, name: str) -> str:
        try:
            return self._snapshot.facts[name]
        except KeyError:
            raise self._error(
                f"fact {name!r} is missing; delete it, and the one before is used"
            ) from None

    def _expect(self, name: str, value: str, *, mend: str) -> None:
        found = self._fact(name)
        if found != value:
            raise self._error(f"{name} is {found!r}, not {value!r}: {mend}")

    def _count(self, name: str) -> int:
        text = self._fact(name)
        if not text.isdecimal() or len(text) > 18:
            raise self._error(
                f"{name} is {text!r}, not a count; delete it, and the one before is used"
            )
        return int(text)

    def _array(self, name: str, size: int, dtype: np.dtype[Element]) -> Vector:
        array = self._snapshot.arrays.get(name)
        if array is None:
            raise self._error(f"array {name!r} is missing; delete it, and the one before is used")
        if array.shape != (size,) or array.dtype != dtype:
            raise self._error(
                f"array {name!r} has shape {array.shape} and dtype {array.dtype}, not "
                f"({size},) and {dtype}; delete it, and the one before is used"
            )
        return array.copy()

    def _steps(self, size: int) -> Steps:
        text = self._snapshot.facts.get("steps")
        if text is None:  # written before clients could hold parts
            return Steps(self._count("clock"))
        try:
            words = msgspec.json.decode(text, type=list[_Word])
            return Steps.read(np.array(words, np.int64), size=size)
        except (msgspec.MsgspecError, RemoteProtocolError) as error:
            raise self._error(
                f"steps cannot be read ({error}); delete it, and the one before is used"
            ) from None

    def _clients(self) -> Iterable[Client]:
        try:
            clients = msgspec.json.decode(self._fact("clients"), type=dict[str, _ClientFacts])
        except msgspec.MsgspecError as error:
            raise self._error(
                f"clients cannot be read ({error}); delete it, and the one before is used"
            ) from None
        for name, facts in clients.items():
            yield Client(
                name=Address(name),
                incarnation=facts.incarnation,
                watermark=facts.watermark,
                applied=facts.applied,
                samples=facts.samples,
                staleness=facts.staleness,
                told_staleness=facts.staleness,
            )
