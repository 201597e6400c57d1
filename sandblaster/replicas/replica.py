"""The replica of Sandblaster: Algorithm 1.2 of Dean et al. 2012, `ProcessPortion`.

    Assignment      fetch, if this evaluation's parameters are not here     DB-16
                    read and compute portions, in the order given
    set computed    Account: its loss; hold the sum
    granted         push the sum, under the grant
    acknowledged    Account: every shard holds it
    not named       drop it, whatever state it is in

Rules:

* All portions of a batch are computed at one point: `parameters` sees to that.
* At most `N_SETS_HELD` sums wait to be granted; meanwhile nothing more is computed.
* The last word said is said again after a while: either side may have missed something.
  A replica without work says so too, and is given some when there is any.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, final

from distbelief.downpour.steps import Trainer
from distbelief.errors import DistBeliefError, JobError, LocalProtocolError, RemoteProtocolError
from distbelief.messages import Assignment, Begin, Finished, Stop
from distbelief.parameter_server.client.client import ParameterClient, Staged
from distbelief.roles import (
    SUPERVISOR,
    Action,
    Address,
    Compute,
    Computed,
    Cost,
    Event,
    Halt,
    PeerJoined,
    Received,
    Report,
    Seconds,
    Send,
    SetTimer,
    Started,
    TimerFired,
)
from sandblaster.names import COORDINATOR
from sandblaster.replicas.parameters import INSTALL, RETRY, Parameters
from sandblaster.replicas.portion_sums import PortionOutcome, PortionSums
from sandblaster.replicas.prefetch import N_PORTIONS_HELD, Prefetch
from sandblaster.replicas.samples import Samples
from sandblaster.replicas.tries import Tries, Try
from sandblaster.sets import Cutting


N_SETS_HELD: Final = 2

_SAY = "replica:say"


@final
@dataclass(frozen=True, kw_only=True)
class ReplicaConfig:
    """How a replica works.

    Attributes:
        cutting: How batches are cut; the coordinator must have the same.
        retry_seconds: After which a busy one says again how it stands.
        retry_seconds_max: After which an idle one does.
    """

    cutting: Cutting
    retry_seconds: Seconds = 0.5
    retry_seconds_max: Seconds = 4.0

    def __post_init__(self) -> None:
        for name in ("retry_seconds", "retry_seconds_max"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; use more than 0")


@final
class SandblasterReplica:
    """The role `replica-INDEX` of a Sandblaster job.

    Args:
        config: How it works.
        client: Of all shards; it pushes.
        trainer: What is run in its lanes; its loss is a sum (`sums.summed`).
        samples: The order of the data.
        await_begin: Wait for `Begin` before it asks for work.
    """

    def __init__(
        self,
        config: ReplicaConfig,
        *,
        client: ParameterClient,
        trainer: Trainer,
        samples: Samples,
        await_begin: bool = True,
    ) -> None:
        self._config = config
        self._client = client
        self._sums = PortionSums(trainer)
        self._prefetch = Prefetch(self._sums, samples)
        self._tries = Tries(config.cutting)
        self._parameters = Parameters(client, self._sums, retry_seconds=config.retry_seconds)
        self._incarnation = 0
        self._begun = not await_begin
        self._stopped_by: Address | None = None
        self._busy = False  # the compute lane
        self._current: Try | None = None  # whose portion is computed, or whose sum pushed
        self._accruing: Try | None = None  # what the model has accrued is of this one
        self._computing_for = (0, 0)  # which evaluation
        self._n_computed = 0  # examples of this life
        self._seconds = 0.0

    def handle(self, event: Event, now: Seconds) -> Sequence[Action]:
        """Return the actions that `event` calls for.

        Raises:
            JobError: model, data or loss make it impossible to go on.
            PeerLostError: a shard has been silent for too long.
        """
        if self._client.owns(event):
            return self._shard_spoke(event, now)
        actions: list[Action] = []
        match event:
            case Started():
                self._incarnation = event.incarnation
                actions += [*self._client.start(event.incarnation, now)]
                actions += self._say(now)
            case Received():
                actions += self._receive(event, now)
            case TimerFired(name=name):
                actions += self._timer(name, now)
            case Computed():
                actions += self._computed(event, now)
            case PeerJoined(peer=peer) if peer == COORDINATOR:
                actions += self._say(now)
            case _:
                pass  # peers come and go
        return [*actions, *self._advance(now)]

    def _shard_spoke(self, event: Event, now: Seconds) -> Sequence[Action]:
        """Let the client take an event; most of the events of a job are such.

        A shard's words let nothing begin but a push or an install; all else that could
        begin has begun. So the rest is not looked at.
        """
        actions = self._client.handle(event, now)
        tries = self._tries
        if tries.awaits_shards and tries.acknowledged(n_waiting=self._client.unacknowledged):
            actions += self._say(now)
        if self._busy or not self._begun:
            return actions
        return [*actions, *(self._push() or self._install())]

    def adopt(self, incarnation: int) -> None:
        """Be a life whose client another role has begun; it begins when it is told."""
        self._incarnation, self._begun = incarnation, False

    def status(self) -> tuple[str, Mapping[str, float]]:
        """Return what it is doing, and its counters."""
        return self._state(), {
            **self._client.counters(),
            "samples": float(self._n_computed),
            "seconds_computing": self._seconds,
            "sets_held": float(sum(one.total is not None for one in self._tries)),
        }

    def _state(self) -> str:
        if self._busy:
            return "computing"
        waited = self._client.waiting_for
        if waited is not None and any(True for _ in self._tries):
            return f"waiting for {waited}"
        return "waiting for work" if self._begun else "waiting for begin"

    # ------------------------------------------------------------------------ events

    def _receive(self, event: Received, now: Seconds) -> Sequence[Action]:
        message = event.message
        match message:
            case Begin():
                self._begun = True
                return self._say(now)
            case Stop():
                self._stopped_by = event.sender
                return []
            case Assignment():
                return self._take(message, now)
            case _:
                raise RemoteProtocolError(
                    f"{event.sender} sent a replica {type(message).__name__}: only "
                    "shards, the coordinator, and Begin and Stop, speak to it"
                )

    def _take(self, message: Assignment, now: Seconds) -> Sequence[Action]:
        tries = self._tries
        if message.replica_incarnation != self._incarnation:
            return []  # meant for another life
        if message.epoch < tries.epoch:
            return []  # of a coordinator that is over
        before = tries.key
        try:
            tries.told(message)
        except ValueError as error:
            raise RemoteProtocolError(f"an impossible assignment: {error}") from None
        if tries.key != before:
            self._parameters.renew()
        return self._say(now)

    def _timer(self, name: str, now: Seconds) -> Sequence[Action]:
        if name == RETRY:
            self._parameters.retry()
            return []
        return self._say(now)

    def _say(self, now: Seconds) -> Sequence[Action]:
        """Tell the coordinator how it stands, now and after a while."""
        if not self._begun:
            return []
        idle = not any(True for _ in self._tries)
        config = self._config
        pause = config.retry_seconds_max if idle else config.retry_seconds
        return [
            Send(receiver=COORDINATOR, message=self._tries.account),
            SetTimer(name=_SAY, at=now + pause),
        ]

    def _computed(self, event: Computed, now: Seconds) -> Sequence[Action]:
        if event.error is not None:
            raise _failure(event.error)
        if event.name == "replica:read":
            self._prefetch.have_read(event.result)
            return []
        self._busy = False
        self._seconds += event.seconds
        match event.name:
            case name if name == INSTALL:
                return self._parameters.installed(event.result, self._tries, now)
            case "replica:portion":
                return self._end_portion(event, now)
            case "replica:push":
                return self._end_push(event.result, now)
            case _:
                raise LocalProtocolError(f"nobody asked for {event.name!r}")

    # ------------------------------------------------------------------- the machine

    def _advance(self, now: Seconds) -> Sequence[Action]:
        """Begin what can begin; the compute lane has one thing to do at a time."""
        if self._stopped_by is not None:
            return [] if self._busy else self._end()
        if not self._begun:
            return []
        to_compute = self._tries.to_compute(n_held_max=N_SETS_HELD)
        actions = [*self._parameters.fetch(self._tries, now), *self._read(to_compute)]
        if self._busy:
            return actions
        return [*actions, *(self._push() or self._install() or self._step(to_compute))]

    def _end(self) -> Sequence[Action]:
        receiver, self._stopped_by = self._stopped_by, None
        self._begun = False
        _, counters = self.status()
        finished = Finished(counters=dict(counters))
        return [Send(receiver=receiver or SUPERVISOR, message=finished), Halt()]

    def _read(self, to_compute: Sequence[Try]) -> Sequence[Action]:
        ahead = [
            portion
            for one in to_compute[:N_PORTIONS_HELD]
            for portion in one.portions[len(one.losses) :][:N_PORTIONS_HELD]
        ]
        return self._prefetch.read(ahead)

    def _install(self) -> Sequence[Action]:
        actions = self._parameters.install()
        if actions:
            self._busy, self._current, self._accruing = True, None, None
        return actions

    # ----------------------------------------------------------------------- portions

    def _step(self, to_compute: Sequence[Try]) -> Sequence[Action]:
        """Compute the next portion, if its samples and the parameters are here."""
        if not to_compute or self._parameters.lacks(self._tries):
            return []
        one = to_compute[0]
        if self._accruing in to_compute and self._accruing is not None:
            one = self._accruing  # another was put before it
        batch = self._prefetch.get(one.next_portion)
        if batch is None:
            return []
        is_first = not one.losses
        self._busy, self._current, self._accruing = True, one, one
        self._computing_for = self._tries.key
        work = partial(self._sums.step, batch, is_first=is_first, is_last=one.is_last)
        cost = Cost(flops=self._sums.flops(batch.n_samples), n_bytes=float(self._sums.n_bytes))
        return [Compute(name="replica:portion", work=work, cost=cost)]

    def _end_portion(self, event: Computed, now: Seconds) -> Sequence[Action]:
        one, result = self._current, event.result
        assert one is not None
        assert isinstance(result, PortionOutcome), result
        start, stop = one.next_portion
        self._current = None
        self._n_computed += stop - start
        one.computed(result, seconds=event.seconds)
        if self._computing_for == self._tries.key:
            self._tries.n_computed += stop - start
        if one not in self._tries or not one.is_computed:
            return []
        actions: list[Action] = []
        if not one.is_finite:
            start = one.portions[0][0] if result.is_of_set else start
            blame = result.blame or "look at the model and its loss there"
            text = f"loss or gradient of positions {start} to {stop - 1} of the data is"
            actions.append(Report(text=f"{text} not finite: {blame}", level="warning"))
        return [*actions, *self._say(now)]

    # -------------------------------------------------------------------------- push

    def _push(self) -> Sequence[Action]:
        """Push a sum that was granted, once there is a free slot on every shard."""
        one = self._tries.to_push
        if one is None or one.total is None or not self._client.can_push:
            return []
        self._busy, self._current = True, one
        stage = self._client.stage(one.total.gradients, one.total.values)
        cost = Cost(n_bytes=2.0 * self._sums.n_bytes)
        return [Compute(name="replica:push", work=stage, cost=cost)]

    def _end_push(self, result: object, now: Seconds) -> Sequence[Action]:
        one, self._current = self._current, None
        assert one is not None
        assert isinstance(result, Staged), result
        actions = self._client.staged(
            result, n_gradients=len(one.portions), samples=one.n_examples, grant=one.grant, now=now
        )
        self._tries.pushed(one, is_finite=result.finite)
        return actions if result.finite else [*actions, *self._say(now)]


def _failure(error: BaseException) -> DistBeliefError:
    if isinstance(error, DistBeliefError):
        return error
    return JobError(f"a portion failed: {type(error).__name__}: {error}")
