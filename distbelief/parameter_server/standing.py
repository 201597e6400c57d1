"""Where a copy of a shard stands: it waits, follows, or leads.

    waiting ---- Lead ------------------------------------------------> leading
       |                                                                  ^
       +--- Follow --> following --- all pieces --> whole ---- Lead ------+

Rules:

* A shard of one copy leads from the beginning, and hears nothing of all this.
* A `Lead` or `Follow` that is meant for another life of this copy is not obeyed.
* Who is told to lead first applies what it has taken. It leads with what it has
  followed if it is whole, or with what it began with if it has never followed.
  Otherwise its life is over: the next one begins from the newest snapshot.
* Who leads never follows again in the same life, for it may have applied what the other
  leader never saw: if it hears of one, its life is over.
"""

from collections.abc import Mapping
from typing import assert_never, final

from distbelief.errors import DistBeliefError, RemoteProtocolError, StorageError
from distbelief.memory import Memory
from distbelief.messages import (
    Acknowledge,
    Follow,
    Forward,
    Lead,
    PushBlock,
    PushCredit,
    StateBlock,
    StateCredit,
)
from distbelief.parameter_server.copies.following import Following, Forwarded
from distbelief.parameter_server.service import Service
from distbelief.parameter_server.state.shard_config import ShardConfig
from distbelief.parameter_server.state.snapshots import ShardState
from distbelief.parameter_server.state.values import ShardValues
from distbelief.roles import Action, Address, Received, Report, Seconds


FromLeader = Follow | StateBlock | Forward | PushBlock
FromSecond = StateCredit | Acknowledge | PushCredit
CopyMessage = Lead | FromLeader | FromSecond


@final
class Standing:
    """Of one life of one copy."""

    def __init__(
        self, config: ShardConfig, values: ShardValues, service: Service, *, memory: Memory
    ) -> None:
        self._name = config.name
        self._has_other = config.waits_for_lead
        self._values = values
        self._service = service
        self._forwarding = service.forwarding
        self._following: Following | None = None  # until it leads
        if config.waits_for_lead:
            self._following = Following(
                values, memory=memory, bounds=service.bounds, n_clients_max=config.n_clients_max
            )
        self._life = 0
        self._lead: Lead | None = None  # that it is to obey
        self._restored_pairing = 0  # of the snapshot
        self._unrestored: str | None = None  # why there is none that can be used
        self._followed: Address | None = None  # before it led

    @property
    def leads(self) -> bool:
        """Does it serve the clients?"""
        return self._following is None

    @property
    def will_lead(self) -> bool:
        """Does it, or was it told to?"""
        return self._following is None or self._lead is not None

    @property
    def word(self) -> str:
        """What it is doing if nothing is to be done."""
        if self._following is None:
            return "serving"
        return "following" if self._following.follows else "waiting"

    def counters(self) -> Mapping[str, float]:
        """Return figures for the role's status, if there is another copy."""
        if not self._has_other:
            return {}
        following = self._following
        part = self._forwarding if following is None else following
        return {
            "pairing": float(part.pairing),
            "whole": 0.0 if following is None else float(following.whole_for),
            "leading": float(following is None),
        }

    # ------------------------------------------------------------------------- work

    def start(self, incarnation: int, *, unrestored: str | None = None) -> None:
        """The life of this copy begins.

        Args:
            incarnation: Of it.
            unrestored: Why none of its snapshots can be used; the other copy may help.
        """
        self._life = incarnation
        self._unrestored = unrestored

    def restored(self, state: ShardState) -> list[Action]:
        """The values are there."""
        if self._following is None:
            return self._service.open(state.clients)
        self._restored_pairing = state.incarnation
        return self._following.restored(state.clients)

    def begin_next(self) -> Forwarded | None:
        """Take the next push of the leader, to apply it."""
        return None if self._following is None else self._following.begin_next()

    def end_push(self) -> list[Action]:
        """A push is applied: of the leader, or the oldest of the clients'."""
        if self._following is not None:
            return self._following.end()
        clock = self._values.clock
        self._values.end_push()
        held = self._forwarding.applied(clock=clock)
        actions = self._service.pushes.end(clock=clock, held=held)
        return [*actions, *self._service.greet_held()]

    def begin_to_lead(self, now: Seconds) -> list[Action]:
        """Lead, if that is due.

        Raises:
            StorageError: it would begin from a snapshot of a later leader, or anew
                where all snapshots are damaged.
        """
        following, lead = self._following, self._lead
        if following is None or lead is None or not following.drained:
            return []
        if not following.follows and self._unrestored is not None:
            raise StorageError(self._unrestored)
        if not following.follows and lead.pairing <= self._restored_pairing:
            raise StorageError(
                f"the snapshot of {self._name} is of pairing {self._restored_pairing}, "
                f"and it is told to lead as {lead.pairing}: a resumed run must go on "
                "counting pairings where the first ended"
            )
        self._following = self._lead = None
        self._followed = following.leader
        following.release()
        text = f"leads as pairing {lead.pairing}, from clock {self._values.clock}"
        return [
            Report(text=text),
            *self._service.lead(lead.pairing, following.clients.values()),
            *self._forwarding.lead(lead, now),
        ]

    def release(self) -> None:
        """Let go of all memory that is not the shard's own."""
        if self._following is not None:
            self._following.release()

    # --------------------------------------------------------------------- messages

    def receive(self, event: Received, message: CopyMessage, now: Seconds) -> list[Action]:
        """Take what the supervisor or the other copy says.

        Raises:
            RemoteProtocolError: there is no other copy, or it makes no sense.
            DistBeliefError: this life is over.
        """
        if not self._has_other:
            raise RemoteProtocolError(
                f"{event.sender} sent {type(message).__name__} to {self._name}, which "
                "is the only copy of its shard"
            )
        match message:
            case Lead() | Follow() if message.receiver_incarnation != self._life:
                return []
            case Lead():
                return self._take_lead(message, now)
            case Follow() | StateBlock() | Forward() | PushBlock():
                return self._from_leader(event.sender, message)
            case StateCredit() | Acknowledge() | PushCredit():
                return self._from_second(event, message, now)
            case _:
                assert_never(message)

    def is_leader(self, sender: Address) -> bool:
        """Return whether blocks of this sender come from a leader, not a client."""
        return self._following is not None or sender == self._followed

    def _take_lead(self, lead: Lead, now: Seconds) -> list[Action]:
        if self._following is not None:
            return self._prepare(self._following, lead)
        if lead.pairing <= self._forwarding.pairing:
            return []
        actions = self._forwarding.lead(lead, now)
        return [*actions, *self._service.greet_held()]

    def _prepare(self, following: Following, lead: Lead) -> list[Action]:
        """Lead as soon as what was taken is applied."""
        if lead.pairing <= following.pairing:
            return []
        if not following.lead(lead.pairing):
            raise DistBeliefError(
                f"{self._name} is told to lead, and holds {self._values.n_held} of "
                f"{self._values.n_pieces} pieces of what {following.leader} held: its "
                "next life begins from the newest snapshot"
            )
        self._lead = lead
        return []

    def _from_leader(self, sender: Address, message: FromLeader) -> list[Action]:
        following = self._following
        if following is None:
            self._check_deposed(sender, message)
            return []
        match message:
            case Follow():
                return following.follow(sender, message)
            case StateBlock():
                return following.take_piece(sender, message)
            case Forward():
                return following.forward(sender, message)
            case PushBlock():
                return following.take_block(sender, message)
            case _:
                assert_never(message)

    def _from_second(self, event: Received, message: FromSecond, now: Seconds) -> list[Action]:
        if self._following is not None:
            return []  # meant for an earlier life
        forwarding = self._forwarding
        match message:
            case StateCredit():
                return forwarding.credit_pieces(event, message, now)
            case PushCredit():
                return forwarding.credit_blocks(event, message, now)
            case Acknowledge():
                actions = forwarding.acknowledged(event, message, now)
                return [*actions, *self._service.greet_held()]
            case _:
                assert_never(message)

    def _check_deposed(self, sender: Address, message: FromLeader) -> None:
        if isinstance(message, Follow) and message.pairing > self._forwarding.pairing:
            raise DistBeliefError(
                f"{sender} leads as pairing {message.pairing} where {self._name} led "
                f"as {self._forwarding.pairing}: only its next life can be a second"
            )
