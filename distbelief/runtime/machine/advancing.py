"""What a machine's compute lane does next, one thing at a time, and what came of it.

gathering   settle: nothing of the former life is under way any more
running     chain after chain of the step; count the votes; what the duty wants
            between two steps; install what was fetched; open the next
ended       leave, once all have taken the last step
"""

from collections.abc import Sequence
from typing import final

from distbelief.errors import DistBeliefError, JobError, LocalProtocolError
from distbelief.roles import Action, Compute, Computed, Seconds
from distbelief.runtime.machine.course import Chosen
from distbelief.runtime.machine.duty import Vote
from distbelief.runtime.machine.equipment import Equipment
from distbelief.runtime.machine.following import Following
from distbelief.runtime.machine.living import Phase
from distbelief.runtime.machine.portions import READ
from distbelief.runtime.machine.renewing import INSTALL
from distbelief.runtime.machine.stepping import CHAIN, Ran
from distbelief.runtime.machine.voting import SETTLE, Ballot


@final
class Advancing:
    """One machine's compute lane.

    Args:
        own: All that the machine has.
        following: Its talk with its leader.

    Attributes:
        lane: The work under way, or "".
    """

    def __init__(self, own: Equipment, following: Following) -> None:
        self.lane = ""
        self._own = own
        self._following = following
        self._chosen: Chosen | None = None  # of the step under way

    # ---------------------------------------------------------------------------- done

    def computed(self, event: Computed, now: Seconds) -> Sequence[Action]:
        """Account for work that is done.

        Raises:
            JobError: model or data make it impossible to go on.
            LocalProtocolError: nobody asked for it.
        """
        own = self._own
        if event.error is not None:
            raise _failure(event.error, step=own.stepping.step)
        if event.name == READ:
            own.portions.have_read(event.result)
            return []
        if event.name != self.lane:
            raise LocalProtocolError(f"nobody asked for {event.name!r}")
        self.lane = ""
        if event.name == INSTALL:
            return own.renewing.installed(event, now)
        if event.name == CHAIN:
            return self._ran(event.result, now)
        if event.name == SETTLE:
            done = own.voting.settled()
            return own.duty.closed(event.result, done.found, done.chosen, now)
        return own.duty.computed(event, now)

    def _ran(self, result: object, now: Seconds) -> Sequence[Action]:
        """Send what a chain has for others; account for a step that is over."""
        own = self._own
        assert isinstance(result, Ran), result
        actions = own.stepping.ran(result, now)
        if result.found is None:
            return actions
        assert self._chosen is not None
        chosen, self._chosen = self._chosen, None
        is_over = result.life != own.stepping.life
        if isinstance(result.closed, Vote):
            if is_over:
                return actions  # nobody counts the votes; the duty drops it
            own.voting.cast(Ballot(result.closed, result.found, chosen))
        else:
            # Of a life that is over too: it is as good as any, if it is whole.
            actions += own.duty.closed(result.closed, result.found, chosen, now)
            if is_over:
                return actions
        own.living.add(result.found, len(chosen.indices))
        return [*actions, *self._following.stepped(now)]

    # ---------------------------------------------------------------------------- next

    def advance(self, now: Seconds) -> Sequence[Action]:
        """Begin what can begin."""
        own = self._own
        if self.lane or own.renewing.waits:
            return []
        match own.living.phase:
            case Phase.GATHERING:
                return self._settle(now)
            case Phase.RUNNING:
                return self._go_on(now)
            case Phase.ENDED:
                return own.ending.leave(now)
            case _:
                return []

    def _settle(self, now: Seconds) -> list[Action]:
        """Answer the leader once nothing is under way; the lane is idle."""
        own = self._own
        self._chosen = None
        own.voting.drop()
        own.duty.drop()
        if not (own.client.ready and own.duty.is_settled):
            return []
        own.living.phase = Phase.GATHERED
        return self._following.gathered(now)

    def _go_on(self, now: Seconds) -> list[Action]:
        own = self._own
        if own.voting.is_open:
            return self._occupy(own.voting.count(own.stepping.step))
        if own.stepping.is_open:
            return self._occupy(own.stepping.chain())
        return self._between(now)

    def _occupy(self, actions: Sequence[Action]) -> list[Action]:
        for action in actions:
            if isinstance(action, Compute):
                self.lane = action.name
        return list(actions)

    def _between(self, now: Seconds) -> list[Action]:
        """Do what comes between two steps; begin the next one."""
        own, step = self._own, self._own.stepping.step
        living, renewing = own.living, own.renewing
        over = living.is_over(step)
        work = self._occupy(own.duty.work(final=over))
        if work or own.duty.is_due:
            return work
        if over:
            return self._end(now)
        stop = living.granted if living.is_last else step + 2
        actions = own.portions.read_ahead(step, stop=stop)
        actions += renewing.fetch(step, now, ahead=False)
        if not own.may_step or not own.client.ready:
            return actions
        if renewing.lacks(step):
            return [*actions, *self._occupy(renewing.install(step))]
        return [*actions, *self._open(step, now)]

    def _open(self, step: int, now: Seconds) -> list[Action]:
        """Begin a step, if its samples are there."""
        own = self._own
        portion = own.portions.take(step)
        if portion is None:
            return []
        self._chosen = own.course.batch(step)
        own.stepping.open(
            portion,
            own.parameters,
            put=own.duty.open(step, self._chosen, portion),
            close=own.duty.close,
        )
        actions = self._occupy(own.stepping.chain())
        actions += own.portions.read_ahead(step + 1, stop=step + 2)
        if not own.living.is_over(step + 1):
            actions += own.renewing.fetch(step + 1, now, ahead=True)
        return actions

    def _end(self, now: Seconds) -> list[Action]:
        """End once all that was pushed is known to be applied."""
        own = self._own
        if not own.duty.is_settled:
            return []
        own.living.phase = Phase.ENDED
        own.ending.end(now)
        return [*self._following.stepped(now), *own.ending.leave(now)]


def _failure(error: BaseException, *, step: int) -> DistBeliefError:
    if isinstance(error, DistBeliefError):
        return error
    return JobError(f"step {step} failed: {type(error).__name__}: {error}")
