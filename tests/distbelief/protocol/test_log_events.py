"""Log events: fields, and their words in one table."""

import re
from pathlib import Path
from string import Formatter

import pytest

import distbelief
from distbelief.protocol.log_events import WORDS, LogEvent
from distbelief.protocol.role import Report


FIELDS = set(LogEvent.__struct_fields__) - {"what"}


@pytest.mark.parametrize("what", WORDS)
def test_every_event_has_words_for_fields_that_it_has(what: str) -> None:
    names = {name for _, name, _, _ in Formatter().parse(WORDS[what][1]) if name}
    assert names <= FIELDS
    report = Report.of(LogEvent(what, "shard-0b", 2, roles=("replica-1", "replica-2.0")))
    assert report.level in {"info", "warning", "error"}
    assert ("shard 0b" in report.text) == ("role" in names)
    assert ("replica 1, replica 2.0" in report.text) == ("roles" in names)


def test_events_and_words_are_each_others() -> None:
    """A misspelt event would show when it happens for the first time."""
    folder = Path(distbelief.__path__[0])
    rooms = [path for room in ("supervisor", "job/hosts") for path in (folder / room).glob("*.py")]
    text = "\n".join(path.read_text() for path in rooms)
    named = set(re.findall(r'(?:LogEvent|_said)\(\s*"(\w+)"', text))
    chosen = {word for word in re.findall(r'"([a-z_]+)"', text) if word in WORDS}
    assert named <= WORDS.keys() <= chosen


def test_texts_of_others_are_no_commands_to_a_terminal() -> None:
    event = LogEvent("role_restarted", "replica-1", reason="died \x1b[2J")
    assert event.text == "replica 1 died ?[2J: restarting it"
