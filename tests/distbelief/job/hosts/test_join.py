"""A machine joins, as its own process would; its supervisor is a dummy."""

import select
import socket
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from distbelief.job.hosts import join as join_module
from distbelief.job.hosts.agent import HostAgentConfig, JoinOptions
from distbelief.job.hosts.join import SupervisorMonitor
from distbelief.protocol import Assignments, Message, Offer, Release
from distbelief.protocol.codec import Envelope
from distbelief.protocol.role import SUPERVISOR
from distbelief.transport.address import LOOPBACK, Endpoint
from distbelief.transport.keys import new_secret
from distbelief.transport.listen_config import ListenConfig
from distbelief.transport.zmq_transport import ANOTHER, ZmqTransport


pytestmark = [pytest.mark.processes, pytest.mark.slow]


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

    def say(self, name: str, message: Message) -> None:
        self._transport.send(name, message)

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


def join(address: str, directory: Path, said: list[str], *, seconds: float = 30.0) -> int:
    wanted = JoinOptions(
        address=address, keys=None, cores=1, directory=directory, wait_seconds=seconds
    )
    return join_module.join(wanted, tell=said.append)


def test_a_job_over_at_a_restart_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waited as long for the next one as if it had never been of any."""
    patient = partial(HostAgentConfig, over_seconds=1.0)
    monkeypatch.setattr(join_module, "HostAgentConfig", patient)

    def answer(head: Head, envelope: Envelope) -> bool:
        incarnation, is_offer = head.offers[-1].incarnation, isinstance(envelope.message, Offer)
        taken = Assignments(incarnation=incarnation, run="r", assignments=())
        dismissed = Release(incarnation=incarnation, again=True, reason="so")
        head.say(envelope.sender, taken if is_offer else dismissed)
        return is_offer

    said: list[str] = []
    with Head(answer) as head:
        exit_code = join(head.address, tmp_path, said)
    assert exit_code == 0, said
    assert "the job is over" in said[-1]


def test_a_host_that_comes_first_says_that_nobody_is_there(tmp_path: Path) -> None:
    """It said that it waits for a job, and nothing else for ten minutes."""
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        address = f"tcp://127.0.0.1:{reserved.getsockname()[1]}"
    said: list[str] = []
    assert join(f"{address}?secret={'5f' * 32}", tmp_path, said, seconds=3.0) == 1
    assert said[1:] == [f"nothing listens at {address} so far", "no job has taken this host in 3 s"]


def monitor(
    port: int, said: list[str], *, host: str = LOOPBACK, other_key: bool = False
) -> SupervisorMonitor:
    """Return what watches a supervisor that may have another key than expected."""
    transport = SimpleNamespace(has_failed=lambda _, kinds: other_key and kinds == ANOTHER)
    return SupervisorMonitor(
        cast("ZmqTransport", transport),
        key="k",
        place=Endpoint(host=host, port=port),
        tell=said.append,
    )


def test_a_supervisor_that_stood_still_has_no_other_key() -> None:
    """A machine stopped for 25 s was said to have another key than its address."""
    said: list[str] = []
    watched = monitor(9, said, other_key=True)
    watched.look(is_alone=False, is_known=True)
    assert not any("another key" in text for text in said)
    watched.look(is_alone=False, is_known=False)
    assert any("another key" in text and "prints there" in text for text in said)


def test_where_somebody_listens_nobody_is_disturbed_for_long() -> None:
    with socket.create_server((LOOPBACK, 0)) as listener:
        watched = monitor(listener.getsockname()[1], [])
        assert not any(watched.nothing_listens(0.0) for _ in range(3))
        link, _ = listener.accept()
        with link:
            assert link.recv(1) == b""  # closed at once
        assert not watched.nothing_listens(1.0)
        assert not select.select([listener], [], [], 0.0)[0]  # no second one so soon
        watched.nothing_listens(join_module.PROBE_SECONDS)
        assert select.select([listener], [], [], 5.0)[0]


def test_a_port_that_is_shut_is_found_so_once_for_each_probe() -> None:
    with socket.create_server((LOOPBACK, 0)) as listener:
        watched = monitor(listener.getsockname()[1], [])
    for begun in (0.0, join_module.PROBE_SECONDS):
        assert [watched.nothing_listens(begun + at) for at in (0.0, 0.5, 1.0)].count(True) == 1


def test_where_no_way_leads_nothing_is_known() -> None:
    """A number of the class that no host has: the kernel refuses to send there."""
    watched = monitor(9, [], host="240.0.0.1")
    assert not any(watched.nothing_listens(float(now)) for now in range(3))
