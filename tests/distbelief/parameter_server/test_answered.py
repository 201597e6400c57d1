"""A batch is performed once, however often it comes."""

import math

import pytest

from distbelief.errors import RemoteProtocolError, StorageError
from distbelief.parameter_server.answered import Answered


@pytest.mark.parametrize(
    ("epoch", "number", "verdict"),
    [
        (3, 8, "perform"),
        (3, 7, "repeat"),
        (3, 6, "late"),
        (3, 1, "late"),
        (4, 1, "perform"),
    ],
)
def test_a_batch_is_performed_repeated_or_ignored(
    epoch: int, number: int, verdict: str
) -> None:
    assert Answered(epoch=3, number=7).ask(epoch, number) == verdict


@pytest.mark.parametrize(
    ("epoch", "number", "message"),
    [
        (2, 8, "epoch 3 has taken over"),
        (3, 9, "came after batch 7"),
        (4, 2, "came after batch 0"),
        (4, 0, "the first one is 1"),
        (3, 0, "the first one is 1"),
    ],
)
def test_a_batch_from_behind_or_beyond_is_refused(
    epoch: int, number: int, message: str
) -> None:
    with pytest.raises(RemoteProtocolError, match=message):
        Answered(epoch=3, number=7).ask(epoch, number)


def test_an_answer_is_repeated_to_the_bit_after_a_restart() -> None:
    answered = Answered()
    assert answered.ask(1, 1) == "perform"
    answered.answer(1, 1, (0.1, math.inf, math.nan, -0.0))
    restored = Answered.of(answered.facts())
    assert restored.ask(1, 1) == "repeat"
    assert repr(restored.scalars) == repr((0.1, math.inf, math.nan, -0.0))
    assert restored.ask(1, 2) == "perform"


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"epoch": "1", "number": "x", "scalars": ""},
        {"epoch": "1", "number": "1", "scalars": "0x1p99999"},
        {"epoch": "-1", "number": "1", "scalars": ""},
        {"epoch": "1", "number": "1", "scalars": "0x1p0 " * 20000},
    ],
)
def test_a_record_that_cannot_be_read_is_refused(facts: dict[str, str]) -> None:
    with pytest.raises(StorageError, match="the last batch of commands"):
        Answered.of(facts)
