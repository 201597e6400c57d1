"""Which replicas may train, and how far, so that together they stop where [stop] says.

    left   samples of the job that are not trained yet, as far as replicas have reported
    held   what one replica may still train: its bound less what it has reported
    pool   left, less what all replicas hold

A Stop that is sent when the target is met comes too late. So each replica has a bound
(`StartTraining.samples`) and begins no step beyond it. It holds half of its share of what is
left, by its speed, and at least what it trains in a few seconds; its bound is raised long before
it gets there. At the end all replicas reach their bounds at about the same time (guided
self-scheduling: Polychronopoulos and Kuck 1987). Where samples are dealt, a replica may train what
it was dealt, and the `Dealer` gives as much of it as here.
"""

import math
from typing import Final, final

from distbelief.protocol import Progress, StartTraining
from distbelief.protocol.role import Address
from distbelief.supervisor.dealer import Dealer, Wanted
from distbelief.supervisor.membership import FEW, Membership, Presence, RoleRecord, Seldom
from distbelief.supervisor.metrics import JobMetrics
from distbelief.supervisor.supervisor_config import SupervisorConfig


# A replica holds at least what it trains in this time, up to its share, and at most what it trains
# in the longest: its share may be wrong, and what it holds nobody else trains. With many replicas,
# which report less often, it is the last constant times their number.
AHEAD_SECONDS: Final = 2.0
AHEAD_SECONDS_MAX: Final = 30.0
AHEAD_SECONDS_EACH: Final = 0.01


# Those that have just been started train soon. Of a short job, the first ones would otherwise hold
# the shares of all.
_COMING: Final = (Presence.PRESENT, Presence.LAUNCHED)


@final
class Allowances:
    """The bounds of all replicas; none if [stop] says no number of samples."""

    def __init__(self, members: Membership, metrics: JobMetrics, config: SupervisorConfig) -> None:
        self._members = members
        self._metrics = metrics
        # A coordinator hands out the work itself.
        driven = members.coordinator is not None
        self._total = None if config.stop is None or driven else config.stop.total_samples
        self._batch_size = config.batch_size
        self._cuts_pushes = config.cuts_pushes
        # More is dealt at each heartbeat.
        self._ahead_seconds = max(AHEAD_SECONDS, config.heartbeat_seconds)
        self._replicas_min = 0 if driven else config.replicas_min
        self.warm_start_left = config.warm_start_steps  # over all incarnations of replica 0
        self._bounds: dict[Address, int] = {}
        self._low: dict[Address, int] = {}  # samples at which the bound is raised
        self._releases, self._rates_again = Seldom(), Seldom()
        # As of a while ago, where replicas are many: their number, the mean and the sum of rates,
        # and the dealt samples that nobody has trained.
        self._rates: tuple[int, float, float, int | None] | None = None
        # As of the last tick, less what was given since.
        self._pool, self._looks_again = 0, True
        self.dealer: Dealer | None = None
        if config.dealt is not None:
            self.dealer = Dealer(
                members,
                config.dealt,
                total=self._total,
                epoch_share=config.epoch_share,
                parts=config.parts,
            )

    @property
    def warm_start_is_over(self) -> bool:
        # "Warmstarting model training with only a single replica before unleashing the other
        # replicas" makes more replicas usable (Dean et al. 2012, section 4.1).
        replicas = self._members.of("replica")
        # Without replica 0 nobody would ever end the warm start.
        return self.warm_start_left <= 0 or len(replicas) < 2 or not replicas[0].is_alive

    def tick(self) -> None:
        """Look again at what all replicas hold: those that are lost hold nothing."""
        self._looks_again = True

    def progressed(self, record: RoleRecord, message: Progress) -> None:
        """Count steps of replica 0; `record` is as it was before the message."""
        if record.index == 0:
            self.warm_start_left -= max(0, message.step - record.step)

    def release(self) -> list[tuple[Address, StartTraining]]:
        """Return `StartTraining` for every role that may begin and has not been asked to."""
        replicas = self._members.of("replica")
        if not self._releases.is_due(len(replicas)):
            return []
        first = self._members.of("coordinator")
        begins: list[tuple[Address, StartTraining]] = []
        here = [replica for replica in replicas if replica.introduced_at is not None]
        if self._metrics.training_since is None and len(here) < self._n_wanted():
            return []
        for record in (*first, *(replicas if self.warm_start_is_over else replicas[:1])):
            if record.introduced_at is None or record.begun or not record.is_alive:
                continue
            record.begun = True
            if self.dealer is not None:
                self.dealer.began(record)
                ranges = self._deal(record, repeats=True)
                begins.append((record.name, ranges or StartTraining(ranges=())))
                continue
            self._bounds.pop(record.name, None)  # a new incarnation holds nothing yet
            if 0.0 <= (allowed := record.counters.get("samples_allowed", -1.0)) < 2.0**53:
                self._bounds[record.name] = int(allowed)  # by another supervisor
                self._pool -= max(int(allowed) - self._samples(record), 0)
            self._raise_bound(record)
            begins.append((record.name, StartTraining(samples=self._bounds.get(record.name))))
        return begins

    def _n_wanted(self) -> int:
        alive = [replica for replica in self._members.of("replica") if replica.is_alive]
        return min(self._replicas_min, len(alive))

    def after_progress(self, record: RoleRecord) -> StartTraining | None:
        """Return the new bound of a replica that has reported progress, if it rose."""
        if self.dealer is not None:
            return self._deal(record, repeats=False) if record.begun else None
        if not (record.begun and self._raise_bound(record)):
            return None
        return StartTraining(samples=self._bounds.get(record.name))

    def repeat(self, record: RoleRecord) -> StartTraining | None:
        """Return the request to repeat at a role's heartbeat, if it has not arrived."""
        if self.dealer is not None and record.kind == "replica":
            return self._deal(record, repeats=True)
        if self._total is None or record.kind != "replica":
            return None if record.progressed else StartTraining()
        bound = self._bounds.get(record.name)
        if bound is not None and self._samples(record) >= bound:
            # A replica at its bound waits and does not report again: its last report may be lost.
            self._metrics.count(record.name, self._samples(record))
        self._raise_bound(record)
        heard = record.counters.get("samples_allowed")
        if record.progressed and heard == self._bounds.get(record.name):
            return None
        return StartTraining(samples=self._bounds.get(record.name))

    def _deal(self, record: RoleRecord, *, repeats: bool) -> StartTraining | None:
        assert self.dealer is not None
        return self.dealer.deal(record, lambda: self._wanted(record), repeats=repeats)

    def _samples(self, record: RoleRecord) -> int:
        reported = self._metrics.samples_of.get(record.name, 0)
        reported_now = record.counters.get("samples", 0.0)
        return max(reported, int(reported_now)) if 0.0 <= reported_now < 2.0**53 else reported

    def _raise_bound(self, record: RoleRecord) -> bool:
        if self._total is None or record.kind != "replica":
            return False
        name, samples = record.name, self._samples(record)
        if name in self._bounds and samples < self._low.get(name, 0):
            return False
        before = self._bounds.get(name)
        bound = max(self._bounds.setdefault(name, samples), samples)
        more = min(self._wanted(record).ahead - (bound - samples), self._in_pool())
        if more > 0:
            bound += more
            self._bounds[name] = bound
            self._pool -= more
        self._low[name] = bound - (bound - samples) // 2
        return self._bounds[name] != before

    def _wanted(self, record: RoleRecord) -> Wanted:
        is_due = self._rates_again.is_due(len(self._members.of("replica")))
        if is_due or self._rates is None:  # never without: the first would get half of the job
            self._rates = self._usual_rates()
        n_replicas, usual, all_together, n_untrained = self._rates
        own = record.rate.per_second
        own = usual if own is None else own
        share = own / all_together if all_together else 1.0 / max(n_replicas, 1)
        # Bounds rise with reports, which are more seldom than heartbeats.
        each = AHEAD_SECONDS_EACH if self.dealer is None else 0.0
        seconds = max(self._ahead_seconds, each * n_replicas)
        # Never more than its share: a short job would leave the others without work.
        fair = share * self._left
        most = max(AHEAD_SECONDS_MAX, seconds) * own if own else math.inf
        part_min, dealer = 0, self.dealer
        if dealer is not None:
            most = max(most, dealer.two_pushes)
        wanted = min(max(fair / 2, own * seconds), fair, most)
        if dealer is not None and n_untrained is not None and own:
            # Each part is a push of its own, so it takes a while; asked for as long before.
            part, fair = self._batches(own * seconds), share * n_untrained
            if max(fair, own * seconds) < 1.5 * dealer.two_pushes:
                # Rounded down, or the first to ask would train two steps while others train none.
                wanted, part_min = max(fair // self._batch_size * self._batch_size, part), part
        return Wanted(self._batches(wanted), part_min=part_min)

    def _batches(self, samples: float) -> int:
        """Return the samples of so many, rounded up to whole batches, at least one."""
        return -int(-max(samples, 1.0) // self._batch_size) * self._batch_size

    def _usual_rates(self) -> tuple[int, float, float, int | None]:
        replicas = [r for r in self._members.of("replica") if r.is_alive]
        if self.dealer is not None:  # what is dealt now need not last for those who wait for hosts
            replicas = [r for r in replicas if r.presence in _COMING]
        rates = [r.rate.per_second for r in replicas]
        known = [rate for rate in rates if rate is not None]
        usual = sum(known) / len(known) if known else 0.0
        together = sum(usual if rate is None else rate for rate in rates)
        n_untrained = None
        if self.dealer is not None and self._total is not None and self._cuts_pushes:
            n_untrained = self.dealer.n_untrained(len(rates))
        return len(rates), usual, together, n_untrained

    @property
    def _left(self) -> int:
        if self.dealer is not None:
            return self.dealer.n_left
        assert self._total is not None
        return self._total - self._metrics.samples

    def _in_pool(self) -> int:
        replicas = self._members.of("replica")
        # A step leaves the pool as it is: less is left, and its replica holds less.
        if len(replicas) > FEW and not self._looks_again:
            return self._pool
        self._looks_again = False
        held = 0
        for record in replicas:
            # A dead or silent replica holds nothing: others get its samples. If it goes on
            # after all, they are trained beyond the job's bound.
            if record.silence_reported or record.presence is not Presence.PRESENT:
                self._bounds.pop(record.name, None)
            samples = self._samples(record)
            bound = self._bounds.get(record.name, samples)
            held += max(bound, samples) - self._metrics.samples_of.get(record.name, 0)
        self._pool = self._left - held
        return self._pool
