import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from distbelief.cli.main import app
from distbelief.cli.options import MISTAKEN
from distbelief.transport.keys import KeyPair


OTHER = KeyPair.new().public


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / ".distbelief" / "keys"


def keys(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["keys", *arguments], env={"COLUMNS": "100"})


def test_from_the_first_key_to_the_last(directory: Path) -> None:
    key = keys("new").stdout.strip()
    assert json.loads(keys("show", "--json").stdout) == {
        "directory": str(directory),
        "key": key,
        "next": None,
        "allowed": [],
    }
    said = keys("show").stdout
    assert "no other key is allowed yet" in said
    assert "--role host" in said
    assert keys("allow", OTHER, "lab-3").stdout == "lab-3 is allowed as worker\n"
    assert f"{OTHER}  lab-3, as worker" in keys("show").stdout
    said = keys("allow", OTHER, "lab-3", "--role", "worker", "--role", "server").stdout
    assert said == "lab-3 is allowed as worker and server\n"
    said = keys("allow", OTHER, "lab-3", "--role", "worker,server,worker").stdout
    assert said == "lab-3 is allowed as worker and server\n"
    said = keys("rotate").stdout
    assert "--role" in said  # else a machine that joins jobs is a worker from then on
    following = said.split()[0]
    assert f"{following}  next key" in keys("show").stdout
    said = keys("rotate", "--finish").stdout
    assert said.split()[0] == following
    assert "After that" in said  # a machine in the midst of a job was put out
    assert json.loads(keys("show", "--json").stdout)["key"] == following != key
    assert keys("revoke", "lab-3").stdout == f"{OTHER} (lab-3) is no longer allowed\n"


def mistaken(*arguments: str) -> str:
    result = keys(*arguments)
    assert result.exit_code == MISTAKEN
    return result.stderr


@pytest.mark.parametrize("words", [["show"], ["allow", OTHER, "x"], ["rotate"], ["revoke", "x"]])
def test_without_a_key_one_is_told_how_to_make_it(words: list[str]) -> None:
    assert "distbelief keys new" in mistaken(*words)


def test_mistakes_are_named() -> None:
    key = keys("new").stdout.strip()
    for arguments, said in [
        (["new"], "has a key already"),
        (["allow", "abc", "x"], "not a public key"),
        (["allow", key, "x"], "this host's own key"),
        (["allow", OTHER, "two words"], "invalid name 'two words': use at most 64 letters"),
        (["allow", OTHER, "x "], "invalid name 'x '"),
        (["allow", OTHER, "x", "--role", "king"], "unknown role 'king': use work"),
        (["allow", OTHER, "x", "--role", ""], "unknown role ''"),
        (["revoke", "x"], "not on the allow-list"),
        (["rotate", "--finish"], "begin with"),
    ]:
        assert said in mistaken(*arguments)


def test_no_secret_is_ever_printed(directory: Path) -> None:
    said = [keys("new"), keys("allow", OTHER, "x"), keys("rotate")]
    secrets = [(directory / name).read_text().strip() for name in ("secret.key", "next.key")]
    said += [keys("show"), keys("show", "--json"), keys("rotate", "--finish")]
    (directory / "secret.key").chmod(0o644)
    said += [keys("show", "--traceback")]
    for result in said:
        assert not any(secret in result.output for secret in secrets)
