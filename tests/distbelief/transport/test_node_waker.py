"""What ends the wait of a poll."""

import select

from distbelief.transport.node import Waker


def rings(alarm: Waker) -> bool:
    return bool(select.select([alarm], [], [], 0.0)[0])


def test_it_rings_until_it_is_silenced_however_often_it_was_rung() -> None:
    alarm = Waker()
    alarm.start()
    assert not rings(alarm)
    for _ in range(3):
        alarm.ring()
    assert rings(alarm)
    alarm.silence()
    assert not rings(alarm)
    alarm.silence()
    alarm.close()


def test_it_may_be_rung_too_early_too_late_and_too_often() -> None:
    alarm = Waker()
    alarm.ring()
    alarm.start()
    assert not rings(alarm)
    for _ in range(10_000):  # more than the sockets hold
        alarm.ring()
    assert rings(alarm)
    alarm.close()
    alarm.ring()
    alarm.close()
