"""How far each replica may train, so that together they stop where [stop] says.

    left   samples of the job that are not trained yet, as far as replicas have reported
    held   what one replica may still train: its bound less what it has reported
    pool   left, less what all replicas hold

A supervisor that only says `Stop` learns of progress late, and is heard late. So each
replica has a bound (`StartTraining.samples`): it begins no step once it has so many. It holds
half of its share of what is left, by its speed, and at least what it trains in a few
seconds, up to its share: its bound is raised long before it gets there, even by a slow
supervisor. At the end the pool runs dry, and all come to their bounds at about the same
time (guided self-scheduling: Polychronopoulos and Kuck 1987).

A replica that is dead or silent holds nothing: the others get what it has not reported.
If it goes on after all, its part is trained beyond the bound of the job.
"""

from typing import Final, final

from distbelief.protocol import StartTraining
from distbelief.roles.role import Address
from distbelief.supervisor.membership import Membership, Presence, RoleRecord
from distbelief.supervisor.metrics import JobMetrics
from distbelief.supervisor.stop_rules import StopRules


AHEAD_SECONDS: Final = 2.0
"""A replica holds at least what it trains in so long, up to its share."""

AHEAD_SECONDS_EACH: Final = 0.01
"""Of each replica, where they are many: these report less often."""


@final
class Allowances:
    """The bounds of all replicas.

    Args:
        members: Of the job.
        figures: What they have reported.
        stop: The rules; without a number of samples there are no bounds.
        batch_size: Samples of one step: nobody is given less while there is more.
    """

    def __init__(
        self, members: Membership, figures: JobMetrics, *, stop: StopRules | None, batch_size: int
    ) -> None:
        self._members = members
        self._figures = figures
        # Under a coordinator replicas compute what it deals out.
        driven = members.coordinator is not None
        self._total = None if stop is None or driven else stop.total_samples
        self._batch_size = batch_size
        self._bounds: dict[Address, int] = {}
        self._low: dict[Address, int] = {}  # where the bound is to be raised

    def begin(self, record: RoleRecord) -> StartTraining:
        """Return what a new life of a role is told: it holds nothing yet."""
        self._bounds.pop(record.name, None)
        self._raise(record)
        return self._message(record)

    def after_progress(self, record: RoleRecord) -> StartTraining | None:
        """Return what a replica is told that has reported: a new bound, if any."""
        if not (record.begun and self._raise(record)):
            return None
        return self._message(record)

    def again(self, record: RoleRecord) -> StartTraining | None:
        """Return what a role that has begun is told at its heartbeat, if anything."""
        if self._total is None or record.kind != "replica":
            return None if record.progressed else StartTraining()
        bound = self._bounds.get(record.name)
        if bound is not None and self._samples(record) >= bound:
            # It waits, and does not report again: its last report may be lost.
            self._figures.has_trained(record.name, self._samples(record))
        self._raise(record)
        heard = record.counters.get("samples_allowed")
        if record.progressed and heard == self._bounds.get(record.name):
            return None
        return self._message(record)

    def _message(self, record: RoleRecord) -> StartTraining:
        return StartTraining(samples=self._bounds.get(record.name))

    def _samples(self, record: RoleRecord) -> int:
        """Return what it has trained in all its lives, by its latest word."""
        reported = self._figures.samples_of(record.name)
        beaten = record.counters.get("samples", 0.0)
        return max(reported, int(beaten)) if 0.0 <= beaten < 2.0**53 else reported

    def _raise(self, record: RoleRecord) -> bool:
        """Raise the bound of a replica that comes near it; return whether it rose."""
        if self._total is None or record.kind != "replica":
            return False
        name, samples = record.name, self._samples(record)
        if name in self._bounds and samples < self._low[name]:
            return False
        before = self._bounds.get(name)
        bound = max(self._bounds.setdefault(name, samples), samples)
        more = min(self._wanted(record) - (bound - samples), self._pool())
        if more > 0:
            bound += more
            self._bounds[name] = bound
        self._low[name] = bound - (bound - samples) // 2
        return self._bounds[name] != before

    def _wanted(self, record: RoleRecord) -> int:
        """Return how much a replica is to hold: whole batches."""
        replicas = [r for r in self._members.of("replica") if r.is_alive]
        rates = [r.rate.per_second for r in replicas]
        known = [rate for rate in rates if rate is not None]
        usual = sum(known) / len(known) if known else 0.0
        own = record.rate.per_second
        own = usual if own is None else own
        all_together = sum(usual if rate is None else rate for rate in rates)
        share = own / all_together if all_together else 1.0 / max(len(replicas), 1)
        seconds = max(AHEAD_SECONDS, AHEAD_SECONDS_EACH * len(replicas))
        # Never more than its share: a short job would leave the others without work.
        fair = share * self._left
        wanted = max(min(max(fair / 2, own * seconds), fair), 1.0)
        return -int(-wanted // self._batch_size) * self._batch_size

    @property
    def _left(self) -> int:
        assert self._total is not None
        return self._total - self._figures.samples

    def _pool(self) -> int:
        """Return what nobody holds."""
        held = 0
        for record in self._members.of("replica"):
            if record.silence_named or record.presence is not Presence.PRESENT:
                self._bounds.pop(record.name, None)
            samples = self._samples(record)
            bound = self._bounds.get(record.name, samples)
            held += max(bound, samples) - self._figures.samples_of(record.name)
        return self._left - held
