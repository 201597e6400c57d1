"""A machine joins, as its own process would; its supervisor is a dummy."""

import socket
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import pytest

from distbelief.cluster import join as join_module
from distbelief.cluster.agent import HostAgentConfig
from distbelief.protocol import Assignments, Offer, Release
from distbelief.protocol.codec import Envelope
from distbelief.roles.role import SUPERVISOR
from distbelief.transport.address import LOOPBACK, Endpoint
from distbelief.transport.config import ListenConfig
from distbelief.transport.keys import new_secret


pytestmark = [pytest.mark.processes, pytest.mark.slow]

SECONDS_MAX: Final = 30.0


class Head:
    """A supervisor that says what a test wants it to, until it is to go."""

    def __init__(self, answer: Callable[["Head", Envelope], bool]) -> None:
        self.offers: list[Offer] = []
        self._answer = answer
        secret = new_secret()
        self._transport = ListenConfig(host=LOOPBACK, secret=secret).transport(
            name=SUPERVISOR, incarnation=1, run="t", log=lambda _level, _text: None
        )
        self._transport.start()
        place = Endpoint.parse(self._transport.endpoint).endpoint
        self.address = f"{place}?secret={secret}"
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> "Head":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join()

    @property
    def machine_at(self) -> str:
        """Where the machine listens, as it said last."""
        return Endpoint.parse(self.offers[-1].endpoint).host

    def take(self, name: str) -> None:
        self._transport.send(name, Assignments(incarnation=self._life, run="r", assignments=()))

    def dismiss(self, name: str, *, again: bool) -> None:
        self._transport.send(name, Release(incarnation=self._life, again=again, reason="so"))

    @property
    def _life(self) -> int:
        return self.offers[-1].incarnation

    def _serve(self) -> None:
        goes_on = True
        while goes_on:
            self._transport.poll(1.0)
            for envelope in self._transport.receive():
                goes_on = goes_on and self._hear(envelope)
        self._transport.close()

    def _hear(self, envelope: Envelope) -> bool:
        message = envelope.message
        if isinstance(message, Offer):
            self.offers.append(message)
            self._transport.connect(envelope.sender, 1, message.endpoint)
        return self._answer(self, envelope)


def join(head: Head, directory: Path) -> tuple[int, list[str]]:
    """Return the exit code, and what its user was told."""
    said: list[str] = []
    wanted = join_module.JoinOptions(
        address=head.address, keys=None, cores=1, directory=directory, wait_seconds=SECONDS_MAX
    )
    with head:
        return join_module.join(wanted, tell=said.append), said


def test_a_job_that_ends_as_a_host_restarts_is_over_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waited as long for the next one as if it had never been of any."""
    patient = partial(HostAgentConfig, over_seconds=1.0)
    monkeypatch.setattr(join_module, "HostAgentConfig", patient)

    def answer(head: Head, envelope: Envelope) -> bool:
        if isinstance(envelope.message, Offer):
            head.take(envelope.sender)
            return True
        head.dismiss(envelope.sender, again=True)
        return False

    exit_code, said = join(Head(answer), tmp_path)
    assert exit_code == 0, said
    assert "the job is over" in said[-1]


def test_a_host_whose_address_changes_offers_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It went on offering, and listening at, the one that it had begun with."""

    def moved(host: str) -> str:
        return f"{host[:-1]}2"

    def answer(head: Head, envelope: Envelope) -> bool:
        if head.machine_at == "127.0.0.2":
            head.dismiss(envelope.sender, again=False)
            return False
        monkeypatch.setattr(join_module, "own_address_towards", moved)
        return True

    head = Head(answer)
    exit_code, said = join(head, tmp_path)
    assert exit_code == 0, said
    assert any("offering it again" in text for text in said)


def test_a_supervisor_that_has_another_address_is_found_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod that stayed went on calling where the trainer's first pod had been."""
    numbers = {"trainer": "127.0.0.3"}
    known = socket.getaddrinfo

    def found(host: str, *more: int) -> object:
        return known(numbers.get(host, host), *more)

    def tell(text: str) -> None:
        said.append(text)
        numbers["trainer"] = "127.0.0.1"

    def answer(head: Head, envelope: Envelope) -> bool:
        head.dismiss(envelope.sender, again=False)
        return False

    monkeypatch.setattr(socket, "getaddrinfo", found)
    monkeypatch.setattr(join_module, "NAME_SECONDS", 0.5)
    said: list[str] = []
    with Head(answer) as head:
        wanted = join_module.JoinOptions(
            address=head.address.replace("127.0.0.1", "trainer"),
            keys=None,
            directory=tmp_path,
            wait_seconds=SECONDS_MAX,
        )
        assert join_module.join(wanted, tell=tell) == 0
    assert "trainer is no longer at 127.0.0.3: offering it again" in said


def test_a_host_that_comes_first_says_that_nobody_is_there(tmp_path: Path) -> None:
    """It said that it waits for a job, and nothing else for ten minutes."""
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = int(reserved.getsockname()[1])
    said: list[str] = []
    wanted = join_module.JoinOptions(
        address=f"tcp://127.0.0.1:{port}?secret={'5f' * 32}",
        keys=None,
        cores=1,
        directory=tmp_path,
        wait_seconds=3.0,
    )
    assert join_module.join(wanted, tell=said.append) == 1
    assert said[1:] == [
        f"nothing listens at tcp://127.0.0.1:{port} so far",
        "no job has taken this host in 3 s",
    ]
