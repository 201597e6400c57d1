"""Broadcast of commands from the coordinator to all shards, in order and exactly once.

    send n ---- ShardCommand n ----> every shard ---- CommandDone n ----> complete
                  ^                      |
                  +------- retry --------+

Command n + 1 is sent when every shard has answered command n, so a shard has to remember
one answer only. Answers are passed on in the order of the shards, whatever their arrival.
While workers compute, a shard that has said nothing for a while gets the last command again.

A shard with two copies gets commands at both, and the primary answers. A takeover loses nothing:
the series goes on. Only a primary that does not know the series has lost it.
"""

from collections.abc import Mapping, Sequence
from typing import Final, final

import msgspec

from distbelief import protocol as wire
from distbelief.core.errors import DistBeliefError, PeerLostError, RemoteProtocolError
from distbelief.core.reliable import Backoff, Silence
from distbelief.protocol.role import Action, Address, Received, Seconds, Send, SetTimer
from distbelief.protocol.vector_commands import n_scalars
from sandblaster.coordinator.workers import CoordinatorConfig


TIMER: Final = "coordinator:commands"

_UNWATCHED_SHARE: Final = 0.25
"""Share of `silence_seconds_max` that a shard may be silent while no answer is due."""


@final
class CommandBroadcast:
    """The commands of one series after the other."""

    def __init__(
        self,
        config: CoordinatorConfig,
        *,
        shards: Sequence[Address],
        second_copies: Mapping[Address, Address],  # by shard, if there are two
    ) -> None:
        self._config = config
        self.shards = tuple(shards)
        self._second_copies = second_copies
        self.shard_of = {copy: shard for shard, copy in second_copies.items()}
        self.shard_of |= {shard: shard for shard in shards}
        self._command: wire.ShardCommand | None = None  # the last one; None before the first
        self._n_scalars = 0  # in each answer to it
        self._answers: dict[Address, wire.CommandDone] = {}
        # Of each shard's answers in this series; or their term, if it has two copies.
        self._incarnations: dict[Address, int] = {}
        self._newest: dict[Address, int] = {}  # the newest known
        # Shards of which a copy has come since they last answered: perhaps both have begun anew.
        self._unsure: set[Address] = set()
        self._silences = {shard: Silence() for shard in self.shards}
        self._backoff = Backoff(config.retry_seconds, config.retry_seconds_max)
        self.answers: tuple[wire.CommandDone, ...] = ()  # to the last command that is complete
        self.series = 0  # the present series
        self.number = 0  # of the last command sent in it
        # A shard that has restarted in this series and lost its state, or None.
        self.lost: Address | None = None
        self.n_commands = 0  # commands sent, in all series

    @property
    def complete(self) -> bool:
        return self._command is None or len(self._answers) == len(self.shards)

    @property
    def waiting_for(self) -> Address | None:
        return next(iter(self._waiting()), None)

    @property
    def versions(self) -> tuple[wire.ShardVersion, ...]:
        outlasts = True if self._second_copies else msgspec.UNSET
        return tuple(
            wire.ShardVersion(
                incarnation=self._incarnations[shard], clock=answer.clock, outlasts=outlasts
            )
            for shard, answer in zip(self.shards, self.answers, strict=True)
        )

    def begin_series(self, series: int, now: Seconds) -> list[Action]:
        self.series, self.number, self.lost = series, 0, None
        self._incarnations = {}
        return self.send(wire.BeginSeries(), now)

    def send(
        self,
        task: wire.Task,
        now: Seconds,
        *,
        savepoint: wire.Savepoint | None = None,
        settled: int = 0,
        on_disk: int = 0,
    ) -> list[Action]:
        """Send a task to all shards; the other arguments are those of `ShardCommand`."""
        self.number += 1
        self.n_commands += 1
        self._command = wire.ShardCommand(
            series=self.series,
            number=self.number,
            task=task,
            savepoint=savepoint,
            settled=settled,
            on_disk=on_disk,
        )
        self._n_scalars = _n_measured_by(task)
        self._answers = {}
        for silence in self._silences.values():
            silence.start(now)
        self._backoff.start(now)
        return self._send()

    def receive(self, event: Received, message: wire.CommandDone, now: Seconds) -> None:
        shard, command = self.shard_of[event.sender], self._command
        incarnation, goes_on = event.incarnation, False
        if message.term is not msgspec.UNSET:
            incarnation, goes_on = message.term, message.series == self.series
        self._note_incarnation(shard, incarnation, goes_on=goes_on)
        if incarnation < self._newest[shard]:
            return
        if message.series > self.series:
            raise DistBeliefError(
                f"{shard} is in series {message.series}, this coordinator in {self.series}: "
                "another coordinator has taken over"
            )
        is_due = command is not None and (message.series, message.number) == (
            command.series,
            command.number,
        )
        n = self._n_scalars if is_due and message.error is None else len(message.scalars)
        if len(message.scalars) != n:  # no sign of life either
            raise RemoteProtocolError(
                f"{shard} answers command {message.number} of series {message.series} with "
                f"{len(message.scalars)} numbers, not {n}"
            )
        self._silences[shard].heard(now)
        self._unsure.discard(shard)
        if self.lost is not None or command is None or not is_due or shard in self._answers:
            return
        # A failed checkpoint goes back to the supervisor; any other failure ends the run.
        if message.error is not None and not isinstance(command.task, wire.Checkpoint):
            raise DistBeliefError(
                f"{shard} cannot execute {type(command.task).__name__}, command "
                f"{command.number} of series {command.series}: {message.error}"
            )
        self._incarnations.setdefault(shard, incarnation)
        self._answers[shard] = message
        if len(self._answers) == len(self.shards):
            self.answers = tuple(self._answers[shard] for shard in self.shards)

    def joined(self, copy: Address, incarnation: int) -> list[Action]:
        if self._second_copies:
            self._unsure.add(self.shard_of[copy])
        else:
            self._note_incarnation(copy, incarnation)
        if self.shard_of[copy] not in self._waiting() or self.lost is not None:
            return []
        assert self._command is not None
        return [Send(receiver=copy, message=self._command)]

    def timer(self, now: Seconds) -> list[Action]:
        """Send the command again to the shards that have not answered."""
        # If our own timer came late, this process stood still: do not blame the shards.
        self.add_delay(max(0.0, now - self._backoff.due), now)
        waiting = self._waiting()
        self._check(waiting, now)
        if not waiting:
            return []
        self._backoff.repeat(now)
        return self._send()

    def watch(self, now: Seconds) -> list[Action]:
        """Send silent shards their last command again when no answer is due: a sign of life."""
        if not self.complete or self._command is None:
            return []
        self._check(self.shards, now)
        least = _UNWATCHED_SHARE * self._config.silence_seconds_max
        silent = [
            shard
            for shard in self.shards
            if shard in self._unsure or self._silences[shard].silent(now) >= least
        ]
        if not (silent and self._backoff.again(now)):
            return []
        return self._send_to(silent)

    def add_delay(self, late: Seconds, now: Seconds) -> None:
        """Do not count time by which the coordinator itself was late as silence of shards."""
        for silence in self._silences.values():
            silence.add_delay(late, now)

    def _check(self, shards: Sequence[Address], now: Seconds) -> None:
        for shard in shards:
            if (silent := self._silences[shard].silent(now)) >= self._config.silence_seconds_max:
                raise PeerLostError(
                    f"{shard} has not answered for {silent:.1f} s (silence_seconds_max is "
                    f"{self._config.silence_seconds_max:g}): check its log, then resume the run"
                )

    def _note_incarnation(self, shard: Address, incarnation: int, *, goes_on: bool = False) -> None:
        self._newest[shard] = max(incarnation, self._newest.get(shard, 0))
        known = self._incarnations.get(shard)
        if known is None or incarnation <= known:
            return
        if goes_on:
            self._incarnations[shard] = incarnation
        else:  # a restarted shard has lost the state of this series
            self.lost = shard

    def _waiting(self) -> list[Address]:
        if self._command is None:
            return []
        return [shard for shard in self.shards if shard not in self._answers]

    def _send(self) -> list[Action]:
        assert self._command is not None
        return [*self._send_to(self._waiting()), SetTimer(name=TIMER, at=self._backoff.due)]

    def _send_to(self, shards: Sequence[Address]) -> list[Action]:
        assert self._command is not None
        second = [self._second_copies[shard] for shard in shards if shard in self._second_copies]
        return [Send(receiver=copy, message=self._command) for copy in (*shards, *second)]


def _n_measured_by(task: wire.Task) -> int:
    """Return how many numbers each shard answers."""
    match task:
        case (
            wire.Execute(commands=commands)
            | wire.BeginEvaluation(before=commands)
            | wire.FinishEvaluation(after=commands)
        ) if commands:
            return n_scalars(commands)
        case _:
            return 0
