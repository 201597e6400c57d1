"""Laws that hold for every message of the protocol."""

import re
from typing import get_args, get_type_hints

import pytest
from msgspec import UnsetType

from distbelief.core.vectors import Vector
from distbelief.protocol import MESSAGES, Blob, Message, Push
from distbelief.protocol.codec import FRAMES_MAX


def test_the_union_is_closed() -> None:
    assert {kind.__module__.rpartition(".")[0] for kind in MESSAGES} == {"distbelief.protocol"}


@pytest.mark.parametrize("kind", MESSAGES)
def test_each_kind_of_message(kind: type[Message]) -> None:
    """It says who sends it to whom and what for; it is immutable and tagged by its name.

    It has no more arrays than the wire carries, as fields, never hidden inside them.
    """
    assert re.match(r"[A-Z]\w+ -> \w+: .", kind.__doc__ or "")
    assert kind.__struct_config__.frozen
    assert kind.__struct_config__.tag == kind.__name__
    hints = get_type_hints(kind).values()
    optional = Vector | None, Vector | UnsetType
    assert sum(hint in {Vector, Blob} for hint in hints) <= FRAMES_MAX - 1
    assert all(Vector not in get_args(hint) for hint in hints if hint not in optional)


def test_what_must_not_be_sent_twice_carries_the_term_or_the_receivers_incarnation() -> None:
    of_a_term = {
        "Fetch", "ParameterBlock", "FetchAck", "PushBlock", "PushBlockAck", "Push",
        "PushApplied", "Floor", "SessionOpened", "PrimaryChanged", "Promote",
        "BackupUnresponsive", "BackupInSync", "StartSync", "StateBlock", "StateAck",
        "ReplicatePush", "ReplicateCommand", "ReplicateRows", "CommandDone",
    }  # fmt: skip
    for fence, expected in (
        ("term", of_a_term),
        ("receiver_incarnation", {"Promote", "StartSync"}),  # the first of a term
    ):
        assert {kind.__name__ for kind in MESSAGES if fence in kind.__struct_fields__} == expected


def test_messages_cannot_be_changed() -> None:
    push = Push(sequence=1, term=1, fetched_clock=0, n_gradients=1, samples=1)
    with pytest.raises(AttributeError):
        push.sequence = 2  # type: ignore[misc]
