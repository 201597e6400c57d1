"""A machine that joins, as a process of its own would, and a supervisor that is none."""

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import pytest

from distbelief.job.hosts import joining
from distbelief.job.hosts.host_config import HostConfig
from distbelief.messages import Ask, Dismiss, Duties, Offer
from distbelief.roles import SUPERVISOR
from distbelief.transport.zmq_transport import ZmqTransport
from distbelief.wire import Envelope


pytestmark = [pytest.mark.processes, pytest.mark.slow]

SECONDS_MAX: Final = 30.0


class Head:
    """A supervisor that says what a test wants it to, until it is to go."""

    def __init__(self, answer: Callable[["Head", Envelope], bool]) -> None:
        self.offers: list[Offer] = []
        self._answer = answer
        self._transport = ZmqTransport(name=SUPERVISOR, incarnation=1, token="t")
        self._transport.start()
        self.address = f"{self._transport.endpoint}?token=t"
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> "Head":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join()

    def dismiss(self, to: str, *, again: bool) -> None:
        life = self.offers[-1].life
        self._transport.send(to, Dismiss(life=life, again=again, reason="so"))

    def _serve(self) -> None:
        goes_on = True
        while goes_on:
            self._transport.poll(1.0)
            for envelope in self._transport.receive():
                goes_on = goes_on and self._hear(envelope)
        self._transport.close()

    def _hear(self, envelope: Envelope) -> bool:
        host, offer = envelope.sender, envelope.message
        if isinstance(offer, Offer) and offer not in self.offers:
            self.offers.append(offer)
            self._transport.connect(host, envelope.incarnation, offer.endpoint)
            duties = Duties(life=offer.life, run="r", duties=())
            self._transport.send(host, duties)
        return self._answer(self, envelope)


def join(head: Head, tmp_path: Path) -> tuple[int, list[str]]:
    """Return the exit code, and what its user was told."""
    said: list[str] = []
    wanted = joining.Wanted(
        address=head.address,
        keys=None,
        cores=1,
        directory=tmp_path,
        wait_seconds=SECONDS_MAX,
    )
    with head:
        return joining.join(wanted, tell=said.append), said


def test_a_job_that_ends_as_a_machine_begins_anew_is_over_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waited as long for the next one as if it had never been of any."""
    patient = partial(HostConfig, over_seconds=1.0)
    monkeypatch.setattr(joining, "HostConfig", patient)

    def answer(head: Head, envelope: Envelope) -> bool:
        if isinstance(envelope.message, Ask):
            head.dismiss(envelope.sender, again=True)
            return False
        return True

    exit_code, said = join(Head(answer), tmp_path)
    assert exit_code == 0, said
    assert "the job is over" in said[-1]
