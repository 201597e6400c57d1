"""A parameter server shard: owns one slice of every vector, and applies what is pushed.

No word passes between shards (DB-5). Rules:

* `agenda` has what is done next, one piece of work at a time.
* `standing` has the rules of who leads and who follows, `forwarding` those of a leader
  with a second, `following` those of a second.
* `service` has the rules of the handshake, `slots` and `pushes` those of pushes,
  `leases` and `fetches` those of fetches by blocks.
* `orders` has the rules of a shard under a coordinator.
* From the last snapshot on no push is begun: it would be acknowledged, and lost.
* After `Stop`: complete pushes and snapshots asked for are finished; nothing else is
  begun, and clients get no answer.
* Without a supervisor it saves what is in no snapshot, and ends; so what it has
  acknowledged is not lost. Of points that a coordinator drives to, only those fit
  together that it has had saved: then nothing is.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import assert_never, final

from distbelief.errors import RemoteProtocolError, StorageError
from distbelief.memory import Memory
from distbelief.messages import (
    Account,
    Acknowledge,
    Alive,
    Alone,
    Ask,
    Assignment,
    Begin,
    Credit,
    Dismiss,
    Duties,
    Evaluate,
    Failed,
    Fetch,
    Finished,
    Follow,
    Forward,
    Gather,
    Gathered,
    Heartbeat,
    Hello,
    HostReport,
    Join,
    Lead,
    Leading,
    Measured,
    Offer,
    Order,
    ParameterBlock,
    PartStaged,
    Peers,
    Performed,
    Piece,
    Proceed,
    Progress,
    Push,
    PushBlock,
    PushCredit,
    PushPart,
    Refused,
    Save,
    Saved,
    StateBlock,
    StateCredit,
    Stepped,
    Stop,
    Taken,
    Transfer,
    Welcome,
    Whole,
)
from distbelief.parameter_server.agenda import Agenda
from distbelief.parameter_server.copies.forwarding import TIMER as SECOND_TIMER
from distbelief.parameter_server.orders.orders import Orders
from distbelief.parameter_server.service import ClientMessage, Service
from distbelief.parameter_server.standing import Standing
from distbelief.parameter_server.state.shard_config import ShardConfig
from distbelief.parameter_server.state.snapshots import ShardState
from distbelief.parameter_server.state.values import ShardValues
from distbelief.roles import (
    SUPERVISOR,
    Action,
    Address,
    Compute,
    Computed,
    Event,
    Halt,
    PeerJoined,
    PeerLost,
    Persisted,
    Received,
    Report,
    Seconds,
    Send,
    Started,
    TimerFired,
)
from distbelief.vectors import Vector


__all__ = ["ParameterServerShard", "ShardConfig"]


@final
class ParameterServerShard:
    """The role `shard-INDEX`, or one of two copies of it."""

    def __init__(
        self, config: ShardConfig, *, memory: Memory, initialise: Callable[[], Vector]
    ) -> None:
        """Store; `Started` acts.

        Args:
            config: What it is to be.
            memory: Where values and slots lie that clients of this host can reach.
            initialise: Returns the initial values, (shard_size,); called as work, and
                only if there is no snapshot.
        """
        self._memory = memory
        self._initialise = initialise
        self._values = ShardValues(config.identity, memory=memory)
        self._service = Service(config, self._values, memory=memory)
        self._standing = Standing(config, self._values, self._service, memory=memory)
        self._orders = Orders(config, self._values)
        self._agenda = Agenda(
            config.identity,
            self._values,
            service=self._service,
            standing=self._standing,
            orders=self._orders,
        )
        self._stopped_by: Address | None = None
        self._abandoned: str | None = None  # why, if the supervisor is gone

    def handle(self, event: Event, now: Seconds) -> Sequence[Action]:
        """Return the actions that `event` calls for."""
        match event:
            case Started():
                actions = self._start(event)
            case Received():
                actions = self._receive(event, now)
            case TimerFired():
                actions = self._timer(event.name, now)
            case Computed():
                actions = self._agenda.computed(event, now)
            case Persisted():
                actions = self._agenda.persisted(event)
            case PeerLost():
                actions = self._lost(event, now)
            case PeerJoined():
                actions = []
            case _:
                assert_never(event)
        actions = [*actions, *self._agenda.next(now)]
        return [*actions, *self._end()] if self._agenda.is_over else actions

    def status(self) -> tuple[str, Mapping[str, float]]:
        """Return what it is doing, and its counters.

        `pushes` are those in its values, those of the snapshot that it began with
        included: of a replica of several machines it is one if all parts are there.
        `pushes_applied` counts what this life has applied, each part for itself.
        `bytes_in` counts what was pushed, by blocks or through shared memory;
        `bytes_out` blocks only: nobody tells a shard of reads from shared memory.
        """
        state = self._agenda.word
        if state is None:
            state = "stopping" if self._stopped_by is not None else self._standing.word
        return state, {
            "clock": float(self._values.clock),
            "pushes": float(self._values.steps.n_pushes),
            "pushes_restored": float(self._values.n_restored),
            **self._service.counters(),
            **self._standing.counters(),
            **self._orders.counters(),
        }

    # ------------------------------------------------------------- life and death

    def _start(self, event: Started) -> list[Action]:
        if event.unrestored is not None and self._standing.leads:
            raise StorageError(event.unrestored)  # else it would begin anew
        self._service.start(event.incarnation)
        self._standing.start(event.incarnation, unrestored=event.unrestored)
        why_not = self._values.publish(
            self._service.region("values"), incarnation=event.incarnation
        )
        restored, restore_vectors = self._orders.restoring(event.restored)
        initialise, cost = self._values.initialising(
            restored,
            self._initialise,
            incarnation=event.incarnation if self._standing.leads else None,
        )

        def work() -> ShardState:
            state = initialise()
            restore_vectors()
            return state

        begun = Compute(name="initialise", work=work, cost=cost)
        actions: list[Action] = [self._agenda.initialise(begun)]
        if why_not is not None:
            text = f"clients of this host have to fetch by messages: {why_not}"
            actions.append(Report(text=text, level="warning"))
        return actions

    def _end(self) -> list[Action]:
        assert self._stopped_by is not None
        self._service.release()
        self._standing.release()
        self._memory.release(self._values.region)
        if self._abandoned is not None:
            return [Halt(error=self._abandoned)]  # to be started again
        _, counters = self.status()
        finished = Finished(counters=dict(counters))
        return [Send(receiver=self._stopped_by, message=finished), Halt()]

    def _timer(self, name: str, now: Seconds) -> list[Action]:
        if name == SECOND_TIMER:
            return self._service.forwarding.timer(now)
        return self._service.timer(name, now)

    # ------------------------------------------------------------------- messages

    def _receive(self, event: Received, now: Seconds) -> list[Action]:
        sender, message, standing = event.sender, event.message, self._standing
        match message:
            case Hello():
                actions = self._service.greet(event, message)
            case PushBlock() if standing.is_leader(sender):
                actions = standing.receive(event, message, now)
            case Fetch() | Credit() | PushBlock() | Push():
                actions = self._serve_client(event, message, now)
            case Order():
                actions = self._orders.take(event, message)
            case (
                Lead()
                | Follow()
                | StateBlock()
                | Forward()
                | StateCredit()
                | Acknowledge()
                | PushCredit()
            ):
                actions = standing.receive(event, message, now)
            case Save() | Stop():
                actions = self._obey(sender, message)
            case (
                Join()
                | Peers()
                | Heartbeat()
                | Alive()
                | Begin()
                | Finished()
                | Failed()
                | Progress()
                | Evaluate()
                | Measured()
                | Saved()
                | Alone()
                | Whole()
                | Leading()
                | Welcome()
                | Refused()
                | ParameterBlock()
                | Performed()
                | Assignment()
                | Account()
                | Gather()
                | Gathered()
                | Proceed()
                | Stepped()
                | PushPart()
                | PartStaged()
                | Transfer()
                | Taken()
                | Offer()
                | Duties()
                | HostReport()
                | Dismiss()
                | Ask()
                | Piece()
            ):
                raise RemoteProtocolError(
                    f"{sender} sent {type(message).__name__} to a shard, which has no use for it"
                )
            case _:
                assert_never(message)
        return actions

    def _serve_client(self, event: Received, message: ClientMessage, now: Seconds) -> list[Action]:
        if isinstance(message, Push) and not message.grant and self._orders.drives:
            reason = "a coordinator drives this shard: nothing else can be pushed"
            refused = Refused(reason=reason, for_good=True)
            return [Send(receiver=event.sender, message=refused)]
        return self._service.serve(event, message, now)

    def _obey(self, sender: Address, message: Save | Stop) -> list[Action]:
        if isinstance(message, Save):
            self._agenda.is_sealed = self._agenda.is_sealed or message.last
            return self._save(sender, message.label)
        return self._stop(sender)

    def _stop(self, sender: Address) -> list[Action]:
        self._stopped_by, self._agenda.is_stopping = sender, True
        self._service.close()
        return self._service.forwarding.stop()

    def _lost(self, event: PeerLost, now: Seconds) -> list[Action]:
        if not (event.peer == SUPERVISOR and event.for_good):
            return self._service.lost(event, now)
        if self._stopped_by is not None:
            return []
        self._abandoned = event.reason
        if self._standing.will_lead and not self._orders.were_given:
            self._agenda.is_sealed = True
            self._agenda.saves.save_rest()
        return self._stop(SUPERVISOR)

    def _save(self, sender: Address, label: str) -> list[Action]:
        clock = self._values.clock
        if self._orders.drives:
            why_not = "a coordinator drives this shard: ask it to save"
            return self._agenda.saves.refuse(sender, label, clock=clock, why_not=why_not)
        if not self._standing.will_lead:
            why_not = "this copy of the shard does not lead: ask the one that does"
            return self._agenda.saves.refuse(sender, label, clock=clock, why_not=why_not)
        return self._agenda.saves.ask(sender, label, clock=clock)
