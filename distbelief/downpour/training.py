"""What a machine of a model replica computes for: Algorithm 1.1, on its own regions.

Of the tensors a machine keeps it fetches, steps and pushes its part; others hear of it
by messages of the program. So fetches, local steps and pushes are as in `replica`, one
for each machine, and the machines meet in the step alone. Whose shards have the most
samples after a life was given up pushes nothing until the others have as many: each
gradient is applied once (`pushed`).

One push goes to several shards. A machine that dies after some have applied it and
before all have goes on from where the least advanced shard is, so that those apply it
twice: its number dies with the machine's incarnation, and what shards keep, samples,
does not tell two pushes of several steps apart. It is one gradient of one replica.

It decides what is fetched, wanted and pushed when; what a step computes is in
`part_steps`.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Final, assert_never, final

from distbelief.downpour.config import DownpourConfig
from distbelief.downpour.part_steps import Closed, PartTrainer, Step
from distbelief.downpour.tally import Tally
from distbelief.downpour.telling import Telling
from distbelief.errors import LocalProtocolError
from distbelief.messages import Begin, Evaluate, Stop
from distbelief.parameter_server.client.client import ParameterClient, Staged
from distbelief.roles import SUPERVISOR, Action, Compute, Computed, Cost, Seconds, Send
from distbelief.runtime.execution.execution import Found, Put
from distbelief.runtime.machine.course import Chosen
from distbelief.runtime.machine.duty import Install, Vote
from distbelief.runtime.machine.leading import Leader, Outgoing
from distbelief.runtime.machine.portions import Portion


PUSH: Final = "machine:push"


@final
class Training:
    """Trains; see `runtime.machine.Duty`.

    Args:
        config: How.
        client: Of the shards.
        trainer: Does the work of its steps.
        await_begin: The leader waits for `Begin`.

    Attributes:
        values: Flat, one per item.
    """

    def __init__(
        self,
        config: DownpourConfig,
        *,
        client: ParameterClient,
        trainer: PartTrainer,
        await_begin: bool,
    ) -> None:
        self.values = trainer.values
        self._config = config
        self._client = client
        self._trainer = trainer
        self._accrued = trainer.accrued
        self._tally = Tally(config)
        self._begun = not await_begin
        self._samples_allowed: int | None = None
        self._pushed = 0  # samples of what was pushed last
        self._clock = 0
        self._begun_at: Seconds = 0.0
        self._step: Step | None = None
        self._push_due = False
        self._staging = False
        self._telling = Telling(every=config.progress_seconds)

    # ------------------------------------------------------------------------ the life

    @property
    def pushed(self) -> int | None:
        """Samples of what the shards have from it; None if it pushes nothing."""
        if not self.values:
            return None
        return max(self._pushed, self._client.samples)

    @property
    def is_settled(self) -> bool:
        """Whether nothing that it pushed is under way."""
        return not (self._staging or self._client.unacknowledged)

    def may_fetch(self, *, ahead: bool) -> bool:
        """Return whether a fetch may begin now (DB-11)."""
        config, step = self._config, self._step
        if ahead and step is not None and not config.may_fetch_during(step.number):
            return False
        return not (config.awaits_pushes and self._client.unacknowledged)

    @property
    def is_due(self) -> bool:
        """Whether a push waits for a slot."""
        return self._push_due

    def begin(self, position: int, now: Seconds) -> None:
        """Begin a life there in the data."""
        self._pushed = self.pushed or 0
        if not self._tally.position:
            self._begun_at = now
        self._tally.begin(position, now)

    def drop(self) -> None:
        """Give up the step under way, and what has accrued.

        It is computed again: a life begins where the shards' knowledge ends.
        """
        step, self._step = self._step, None
        if step is not None and step.draft is not None:
            self._client.abandon()
        self._trainer.drop()
        self._push_due = False

    def fetches_at(self, step: int) -> bool:
        """Return whether this step begins with a fetch (DB-6)."""
        return self._config.fetches_at(step)

    def installing(self, work: Install) -> Install:
        """Return the work of an install; it loses no local step."""
        if not self._config.keeps_local_steps:
            return work
        return self._trainer.installing(work, rate=self._config.rate(self._clock))

    def fetched(self, seconds: Seconds) -> bool:
        """A fetch was installed."""
        self._tally.seconds_computing += seconds
        self._tally.counters.fetches += 1
        self._clock = max(self._client.clocks, default=0)
        return True

    # ------------------------------------------------------------------------ the step

    def open(self, step: int, chosen: Chosen, portion: Portion) -> Put:
        """Begin a step; return what takes its gradients."""
        config = self._config
        counts = bool(self.values) and chosen.stop > self._pushed
        waits = config.checks_every_gradient or config.clip_norm is not None
        at_once = counts and not waits and not self._accrued.n_gradients
        draft = self._client.draft() if at_once and self._client.can_push else None
        self._step = Step(
            number=step,
            counts=counts,
            draft=draft,
            local_rate=config.local_rate(step, clock=self._clock),
            chosen=chosen,
            portion=portion,
        )
        return self._step.put

    def close(self, found: Found) -> Vote | Closed:
        """Say what this machine has of the step; alone, go on at once. Work."""
        assert self._step is not None
        return self._trainer.close(self._step, found)

    def closed(
        self, result: object, found: Found, chosen: Chosen, now: Seconds
    ) -> Sequence[Action]:
        """Account for a step; push what was laid into the slots."""
        assert isinstance(result, Closed), result
        step, self._step = self._step, None
        assert step is not None
        n = len(chosen.indices)
        loss = math.nan if found.loss is None else found.loss / n
        self._tally.stepped(n_samples=n, loss=loss)
        holds_nothing = not self.values  # it may know the loss, and has to tell
        if not step.counts and not holds_nothing:
            return []
        if not result.is_finite:
            return self._skip(result, step, tells=found.loss is not None)
        if holds_nothing:
            self._tally.good()
            return []
        counters = self._tally.counters
        counters.gradients += 1
        if step.draft is not None:
            assert result.staged is not None
            return self._staged(result.staged, n_gradients=1, stop=chosen.stop, now=now)
        self._accrued.count(chosen.stop, clocks=self._client.clocks)
        counters.local_steps += step.local_rate is not None
        if self._config.checks_every_gradient:
            self._tally.good()
        self._push_due = self._config.pushes_at(step.number)
        return []

    def _skip(self, result: Closed, step: Step, *, tells: bool) -> Sequence[Action]:
        """Skip a step, as all machines do; who knows the loss tells of it."""
        if result.staged is not None:
            self._client.abandon()
        samples = step.chosen.indices.tolist()
        said = self._tally.skip(result.blame, samples=samples)
        return said if tells else []

    # ------------------------------------------------------------------------ the push

    def work(self, *, final: bool) -> Sequence[Action]:
        """Stage what has accrued, once there is a free slot on every shard."""
        self._push_due |= final and self._accrued.n_gradients > 0
        if not (self._push_due and self._client.ready and self._client.can_push):
            return []
        self._push_due, self._staging = False, True
        oldest = self._accrued.fetched_clocks(self._client.clocks)
        stage = self._client.stage(self._accrued.sums, self.values, fetched_clocks=oldest)
        n_bytes = 2.0 * sum(value.nbytes for value in self.values)
        return [Compute(name=PUSH, work=stage, cost=Cost(n_bytes=n_bytes))]

    def computed(self, event: Computed, now: Seconds) -> Sequence[Action]:
        """Send what lies in the slots now; or, if it is not finite, forget it."""
        if event.name != PUSH:
            raise LocalProtocolError(f"nobody asked for {event.name!r}")
        result = event.result
        assert isinstance(result, Staged), result
        self._staging = False
        n_gradients, stop = self._accrued.n_gradients, self._accrued.stop
        self._trainer.staged(result)
        return self._staged(result, n_gradients=n_gradients, stop=stop, now=now)

    def _staged(
        self, staged: Staged, *, n_gradients: int, stop: int, now: Seconds
    ) -> Sequence[Action]:
        actions = self._client.staged(staged, n_gradients=n_gradients, samples=stop, now=now)
        if not staged.finite:  # the client's report names the tensors
            return self._tally.bad(n_gradients, actions)
        self._pushed = max(self._pushed, stop)
        self._tally.counters.pushes += 1
        self._tally.counters.gradients_pushed += n_gradients
        self._tally.good()
        return actions

    # ---------------------------------------------------------------------- the leader

    def command(self, leader: Leader, message: Begin | Evaluate | Stop, now: Seconds) -> Outgoing:
        """Obey the supervisor, if this machine leads."""
        match message:
            case Begin():
                self._samples_allowed = message.samples
                return leader.begin(now, samples=message.samples)
            case Stop():
                return leader.stop(now)
            case Evaluate():
                return []  # the evaluators are asked
            case _:
                assert_never(message)

    def report(
        self, leader: Leader, now: Seconds, *, final: bool
    ) -> tuple[Sequence[Action], Outgoing]:
        """Report to the supervisor, unless that was done a moment ago."""
        progress = self._telling.report(
            leader,
            now,
            final=final or leader.is_held,
            computing=self._tally.seconds_computing,
            elapsed=now - self._begun_at,
        )
        if progress is None:
            return [], []
        return [Send(receiver=SUPERVISOR, message=progress)], []

    @property
    def clock(self) -> float | None:
        """Mean clock of the values in use; None if it keeps none."""
        clocks = self._client.clocks
        return sum(clocks) / len(clocks) if clocks else None

    def figures(self) -> Mapping[str, float]:
        """Return counters."""
        figures = self._tally.figures()
        if self._samples_allowed is not None:
            figures["samples_allowed"] = float(self._samples_allowed)
        return figures
