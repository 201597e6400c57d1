"""A coordinator's orders to the shards: the same to each, once, one after the other.

    give n ---- Order n ----> every shard ---- Performed n ----> complete, when all have
                  ^                 |
                  +---- retry ------+        after a while without an answer

Rules:

* Order n + 1 is given when every shard has answered order n: shards never differ by
  more than one order, so one answer is all that they have to remember.
* Answers are handed on in the order of the shards, whatever order they came in.
* A shard whose life is another than when it attached has lost what it was told: the
  epoch is over (`lost`). A shard that knows a higher epoch says that we are.
"""

from collections.abc import Sequence
from typing import Final, final

from distbelief.errors import DistBeliefError, PeerLostError
from distbelief.protocol import (
    BeginEpoch,
    Checkpoint,
    CommandDone,
    Savepoint,
    ShardCommand,
    ShardVersion,
    Task,
)
from distbelief.roles.role import Action, Address, Received, Seconds, Send, SetTimer
from sandblaster.coordinator.config import CoordinatorConfig


TIMER: Final = "coordinator:orders"


@final
class CommandBroadcast:
    """The orders of one epoch after the other.

    Attributes:
        epoch: The present one.
        number: Of the last order given in it.
        lost: A shard that has begun another life, if one has.
        n_orders: Given, over all epochs.
    """

    def __init__(self, config: CoordinatorConfig, *, shards: Sequence[Address]) -> None:
        self._config = config
        self._shards = tuple(shards)
        self._command: ShardCommand | None = None  # until every shard has answered
        self._answers: dict[Address, CommandDone] = {}
        self._incarnations: dict[Address, int] = {}  # when they attached
        self._newest: dict[Address, int] = {}  # heard of
        self._heard_at: dict[Address, Seconds] = {}
        self._delay = config.retry_seconds
        self._timer_at: Seconds = 0.0
        self.epoch = 0
        self.number = 0
        self.lost: Address | None = None
        self.n_commands = 0

    def owns(self, sender: Address) -> bool:
        """Return whether that is a shard."""
        return sender in self._shards

    @property
    def complete(self) -> bool:
        """Is no order under way?"""
        return self._command is None

    @property
    def waiting_for(self) -> Address | None:
        """The first shard that has not answered, if one has not."""
        if self._command is None:
            return None
        return next((s for s in self._shards if s not in self._answers), None)

    @property
    def answers(self) -> tuple[CommandDone, ...]:
        """To the last order, shard 0 first."""
        return tuple(self._answers[shard] for shard in self._shards)

    @property
    def versions(self) -> tuple[ShardVersion, ...]:
        """Of the values that were published by the last order, shard 0 first."""
        return tuple(
            ShardVersion(incarnation=self._incarnations[shard], clock=self._answers[shard].clock)
            for shard in self._shards
        )

    # ------------------------------------------------------------------------ orders

    def begin_epoch(self, epoch: int, now: Seconds) -> list[Action]:
        """Begin an epoch."""
        self.epoch, self.number, self.lost = epoch, 0, None
        self._incarnations = {}
        return self.send(BeginEpoch(), now)

    def send(
        self,
        task: Task,
        now: Seconds,
        *,
        savepoint: Savepoint | None = None,
        settled: int = 0,
        on_disk: int = 0,
    ) -> list[Action]:
        """Order the next thing; the rest is as in `Order`."""
        self.number += 1
        self.n_commands += 1
        self._command = ShardCommand(
            epoch=self.epoch,
            number=self.number,
            task=task,
            mark=savepoint,
            settled=settled,
            on_disk=on_disk,
        )
        self._answers = {}
        self._heard_at = dict.fromkeys(self._shards, now)
        self._delay = self._config.retry_seconds
        return self._send(now)

    def receive(self, event: Received, message: CommandDone, now: Seconds) -> None:
        """Take an answer.

        Raises:
            DistBeliefError: another coordinator has taken over, or a shard cannot do
                what it was told.
        """
        shard, command = event.sender, self._command
        self._note_incarnation(shard, event.incarnation)
        if event.incarnation < self._newest[shard]:
            return
        if message.epoch > self.epoch:
            raise DistBeliefError(
                f"{shard} obeys epoch {message.epoch}, and this coordinator's is "
                f"{self.epoch}: another one has taken over"
            )
        self._heard_at[shard] = now
        if self.lost is not None or command is None:
            return
        if (message.epoch, message.number) != (command.epoch, command.number):
            return
        if message.error is not None and not isinstance(command.task, Checkpoint):
            raise DistBeliefError(
                f"{shard} cannot perform {type(command.task).__name__}, order "
                f"{command.number} of epoch {command.epoch}: {message.error}"
            )
        self._incarnations.setdefault(shard, event.incarnation)
        self._answers[shard] = message
        if len(self._answers) == len(self._shards):
            self._command = None

    def joined(self, shard: Address, incarnation: int) -> list[Action]:
        """A shard, or a new life of it, can be reached: it hears the order at once."""
        self._note_incarnation(shard, incarnation)
        if self._command is None or shard in self._answers or self.lost is not None:
            return []
        return [Send(receiver=shard, message=self._command)]

    def _note_incarnation(self, shard: Address, incarnation: int) -> None:
        self._newest[shard] = max(incarnation, self._newest.get(shard, 0))
        known = self._incarnations.get(shard)
        if known is not None and incarnation > known:
            self.lost = shard

    def timer(self, now: Seconds) -> list[Action]:
        """Ask again.

        Raises:
            PeerLostError: a shard has been silent for too long.
        """
        late = max(0.0, now - self._timer_at)  # nobody drove this role meanwhile
        for shard in self._heard_at:
            self._heard_at[shard] = min(now, self._heard_at[shard] + late)
        waiting = self.waiting_for
        if waiting is None:
            return []
        for shard in self._shards:
            silent = now - self._heard_at[shard]
            if shard in self._answers or silent < self._config.silence_seconds_max:
                continue
            raise PeerLostError(
                f"{shard} has been silent for {silent:.1f} s while an order was to be "
                f"performed (silence_seconds_max is "
                f"{self._config.silence_seconds_max:g}): look at its log; the run "
                "resumes from the last cut that all shards have"
            )
        self._delay = min(2 * self._delay, self._config.retry_seconds_max)
        return self._send(now)

    def _send(self, now: Seconds) -> list[Action]:
        assert self._command is not None
        self._timer_at = now + self._delay
        return [
            *(
                Send(receiver=shard, message=self._command)
                for shard in self._shards
                if shard not in self._answers
            ),
            SetTimer(name=TIMER, at=self._timer_at),
        ]
