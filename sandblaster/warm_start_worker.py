"""Worker that begins with Downpour and ends with Sandblaster, on one model.

    here                coordinator
      | -- WorkReport ---> |    it is ready
      | <- StartTraining - |    the warm start goes on: train
      |   (Downpour)       |
      | -- Finished -----> |    its share is done, and all its pushes are applied
      | <- Assignment ---- |    from here on it computes chunks

Nothing is trained before the coordinator asks for it: a worker that restarts late, or a
resumed job, must not move a point that is being optimized. Both parts share one client,
so the shards count one sequence of pushes.
"""

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Final, final

from distbelief.protocol import Assignment, Finished, StartTraining, Stop, WorkReport, role as rl
from distbelief.worker.replica import Replica
from sandblaster.chunks import COORDINATOR
from sandblaster.worker import ChunkProgram


_REPORT_TIMER = "warm:report"


class _Part(Enum):
    WAITING = "waiting for the coordinator"
    TRAINING = "training"
    ENDING = "ending the warm start"
    CHUNKS = "computing chunks"


@final
class WarmStartWorker:
    """The role `replica-INDEX` of a Sandblaster job with a warm start.

    `downpour` waits for `StartTraining` and ends by itself; `chunks`, with the same client and
    model, does not wait.
    """

    accepts: Final = Replica.accepts | ChunkProgram.accepts

    def __init__(
        self,
        *,
        downpour: Replica,
        chunks: Replica,
        await_begin: bool = True,
        retry_seconds: rl.Seconds = 0.5,
    ) -> None:
        self._downpour = downpour
        self._chunks = chunks
        self._retry_seconds = retry_seconds
        self._begun = not await_begin
        self._part = _Part.WAITING
        self._stopping = False
        self._incarnation = 0
        self._n_under_way = 0  # works of the first part in the executors
        self._early: list[rl.Event] = []  # for the second part, until it begins

    def handle(self, event: rl.Event, now: rl.Seconds) -> Sequence[rl.Action]:
        """Return actions; JobError if it cannot go on, PeerLostError if a shard is silent."""
        actions: list[rl.Action] = []
        match event:
            case rl.Started():
                self._incarnation = event.incarnation
                actions += self._train(event, now) + self._report(now)
            case rl.TimerFired(name=name) if name == _REPORT_TIMER:
                actions += self._report(now)
            case rl.PeerJoined(peer=peer) if peer == COORDINATOR:
                actions += self._report(now) + self._forward(event, now)
            case rl.Received():
                actions += self._receive(event, now)
            case _:
                actions += self._forward(event, now)
        # The parts share a model: the second begins when no work of the first is left.
        if self._part is _Part.ENDING and not self._n_under_way:
            self._part = _Part.CHUNKS
            actions.append(self._finished())
            for each in (rl.Started(incarnation=self._incarnation), *self._early):
                actions += self._chunks.handle(each, now)
        return actions

    def status(self) -> tuple[str, Mapping[str, float]]:
        if self._part is _Part.TRAINING:
            return self._downpour.status()
        state, counters = self._chunks.status()
        is_there = self._part is _Part.CHUNKS
        return state if is_there else self._part.value, counters

    def _receive(self, event: rl.Received, now: rl.Seconds) -> list[rl.Action]:
        from_coordinator = event.sender == COORDINATOR
        match event.message:
            case StartTraining():
                return self._begin(event, now)
            case Assignment() if self._part is _Part.WAITING:
                self._part = _Part.ENDING  # the warm start is over already
            case Assignment() if self._part is _Part.TRAINING:
                return []  # the coordinator will repeat it
            case Stop() if from_coordinator and self._part is not _Part.TRAINING:
                return []  # for the first part, which is over
            case Stop() if not from_coordinator:
                self._stopping = True
            case _:
                pass
        return self._forward(event, now)

    def _begin(self, event: rl.Received, now: rl.Seconds) -> list[rl.Action]:
        if event.sender != COORDINATOR:
            self._begun = True
            return self._report(now)
        if self._part is _Part.WAITING:
            self._part = _Part.TRAINING
            return self._train(event, now)
        return [] if self._part is _Part.TRAINING else [self._finished()]

    def _report(self, now: rl.Seconds) -> list[rl.Action]:
        if not self._begun or self._part not in {_Part.WAITING, _Part.TRAINING}:
            return []
        here = WorkReport(series=0, version=0, evaluation=0, n_computed=0, results=())
        actions: list[rl.Action] = [rl.Send(receiver=COORDINATOR, message=here)]
        if self._part is _Part.WAITING:
            actions.append(rl.SetTimer(name=_REPORT_TIMER, at=now + self._retry_seconds))
        return actions

    def _finished(self) -> rl.Send:
        _, counters = self._downpour.status()
        return rl.Send(receiver=COORDINATOR, message=Finished(counters=dict(counters)))

    def _forward(self, event: rl.Event, now: rl.Seconds) -> list[rl.Action]:
        if isinstance(event, rl.Computed) and self._n_under_way:
            self._n_under_way -= 1
            if self._part is _Part.ENDING:
                return []  # a batch that was read ahead
        match self._part:
            case _Part.WAITING | _Part.TRAINING:
                return self._train(event, now)
            case _Part.ENDING:
                self._early.append(event)
                return []
            case _Part.CHUNKS:
                return [*self._chunks.handle(event, now)]

    def _train(self, event: rl.Event, now: rl.Seconds) -> list[rl.Action]:
        # The end of Downpour is not the end of this role: `Finished` and `Exit` are dropped.
        actions = self._downpour.handle(event, now)
        self._n_under_way += sum(isinstance(one, rl.Compute) for one in actions)
        if self._stopping or not any(isinstance(one, rl.Exit) for one in actions):
            return [*actions]
        self._part = _Part.ENDING
        return [one for one in actions if not _is_end(one)]


def _is_end(action: rl.Action) -> bool:
    says_so = isinstance(action, rl.Send) and isinstance(action.message, Finished)
    return says_so or isinstance(action, rl.Exit)
