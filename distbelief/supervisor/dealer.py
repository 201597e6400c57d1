"""Dealt data: which replica reads which samples, so that each sample of an epoch counts once.

    done     positions that every shard has applied, that were skipped, or that are left out
    held     ranges that a replica present was dealt, and that are not done
    pool     all others, up to where the job ends, or to the end of the next epoch

A shard applies no position twice, and tells what it has applied (`SamplesApplied`). So whatever is
dealt twice counts once, and the dealer need only deal, again and again, what is not done: what a
lost replica held, what a restored shard has lost, and what a resumed run has not reached.

A replica is dealt more before it has read what it holds: as much as `Allowances` lets it hold.
At the end of the job it is dealt its share of what is left, to the batch: all replicas end at about
the same time.

Of data in pieces that lie on some hosts, a replica is dealt the pieces on its own first. If it can
fetch others, it is dealt these from the end of an epoch, whole ones first, while those that have
them begin at its begin. Nobody is more than one epoch ahead, so that a host with few rows does not
train them more often than others do theirs.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import and_
from typing import Final, NamedTuple, final

from distbelief.core.spans import NOTHING, Epochs, Span, Spans, in_part
from distbelief.protocol import StartTraining
from distbelief.protocol.role import Address, Seconds
from distbelief.supervisor.membership import Membership, Presence, RoleRecord, Seldom


# For shards to tell of the last pushes of a range; then what is missing is dealt anew.
SETTLE_SECONDS: Final = 3.0
N_BATCHES_FIRST: Final = 64  # that a replica holds at first at most; later twice what it has read
N_RANGES_MAX: Final = 64  # in a message, and so at most dealt at once
# That all replicas wait for pieces which none of them has; then the job ends, and may be resumed.
MISSING_SECONDS_MAX: Final = 60.0


class Wanted(NamedTuple):
    """What a replica may be dealt."""

    ahead: int  # samples that it may hold and has not trained
    part_min: int = 0  # samples of a part of a push; 0: pushes are dealt whole


@dataclass(slots=True)
class Hand:
    """What one incarnation of a replica was dealt."""

    incarnation: int
    n_dealt: int = 0  # ranges
    n_samples: int = 0  # in these; by this supervisor only
    unheard: list[Span] = field(default_factory=list)  # the last ones, until it reports them
    held: dict[int, Span] = field(default_factory=dict)  # by number
    read_at: dict[int, Seconds] = field(default_factory=dict)  # when it had pushed all of them
    fetched: list[int] = field(default_factory=list)  # pieces that it was dealt from other hosts


@final
class Dealer:
    def __init__(
        self,
        members: Membership,
        epochs: Epochs,
        *,
        total: int | None,
        epoch_share: float,
        parts: Mapping[Address, Sequence[int]] | None = None,  # ranks that push to each shard
    ) -> None:
        self._members = members
        self._epochs = epochs
        self._total = total
        self._epoch_share = epoch_share
        self._shards = sorted({shard.shard for shard in members.of("shard")})
        self._parts = parts or dict.fromkeys(self._shards, (0,))
        self._applied: dict[Address, list[Spans]] = {}  # of each shard, by rank, as told last
        self._in_no_push = NOTHING  # skipped, or left out
        self._done = NOTHING
        self._n_beyond = 0  # samples: those of a run whose [stop] is earlier now, or mere claims
        self.hands: dict[Address, Hand] = {}
        self._cuts: list[int] = []
        # As of a while ago, where replicas are many, less what was dealt since.
        self._pool, self._looks_again = NOTHING, Seldom()
        self._near: dict[Address, tuple[object, Spans]] = {}  # positions that it reads, and of what
        self._idle_since: Seconds | None = None  # nobody can read what is left

    @property
    def two_pushes(self) -> int:
        """Samples of two pushes: while shards apply one, a replica computes the next."""
        return 2 * self._epochs.push_size

    @property
    def knows_all(self) -> bool:
        """Whether every shard has told what it has applied: nothing is dealt before."""
        return len(self._applied) == len(self._shards)

    @property
    def n_dealt(self) -> int:
        """Ranges dealt to the replicas present."""
        return sum(hand.n_dealt for hand in self.hands.values())

    @property
    def n_done(self) -> int:
        is_over = self._total is not None and not self.n_left
        return self._done.n_positions + (self._n_beyond if is_over else 0)

    @property
    def n_left(self) -> int:
        """Samples up to where the job ends, or up to the end of the next epoch."""
        return self._limit - self._done.n_positions

    def n_untrained(self, n_replicas: int) -> int | None:
        """Return how many of those no replica has trained, as far as these have told.

        None while they are many: at most three pushes of a replica are trained and not applied.
        """
        if self.n_left > 3 * n_replicas * self.two_pushes:
            return None
        n_trained = 0
        for name, hand in self.hands.items():
            record = self._members.get(name)
            if hand.held and record is not None and _lives(record, hand):
                spans = hand.held.values()
                n = sum(
                    stop - start for start, stop in spans if not self._done.overlaps((start, stop))
                )
                n_trained += max(n - self._n_ahead(record, hand, n), 0)
        return max(self.n_left - n_trained, 0)

    def applied(self, shard: Address, spans: Iterable[int]) -> None:
        """Note what a shard has applied, which may be less than before."""
        found = Spans.from_wire(spans)
        self._applied[shard] = [in_part(found, part) for part in self._parts[shard]]
        self._cuts = self._find_cuts()
        self._count()

    def lost(self, shard: Address) -> None:
        """Its primary is gone: the next one may have applied less."""
        self._applied.pop(shard, None)
        self._cuts = self._find_cuts()

    def skipped(self, record: RoleRecord, spans: Iterable[int]) -> None:
        """Note what a replica has skipped; what it does not hold, it cannot skip."""
        held = Spans(self._hand_of(record).held.values())
        more = (Spans.from_wire(spans) & held) - self._in_no_push
        if more:
            self._in_no_push |= more
            self._count()

    def adopt(self, hands: Mapping[Address, Hand]) -> None:
        """Go on where another supervisor has come to."""
        self.hands = dict(hands)
        for hand in self.hands.values():
            hand.n_samples = 0
            hand.read_at.clear()  # by another clock

    def began(self, record: RoleRecord) -> None:
        """Forget what earlier incarnations of this replica held."""
        if self._hand_of(record).incarnation != record.incarnation:
            del self.hands[record.name]

    def _hand_of(self, record: RoleRecord) -> Hand:
        # Another supervisor may have dealt to it just before it was killed: numbers go on, and what
        # that was may be dealt to another replica, too.
        n = int(_count(record, "ranges"))
        hand = self.hands.setdefault(record.name, Hand(record.incarnation))
        hand.n_dealt = max(hand.n_dealt, n)
        return hand

    def deal(
        self, record: RoleRecord, wanted: Callable[[], Wanted], *, repeats: bool
    ) -> StartTraining | None:
        """Deal more to a replica if it holds less than half of what it may; return what is news.

        `repeats`: also what it was dealt and has not reported.
        """
        hand = self._hand_of(record)
        self._heard(hand, record)
        n_before = hand.n_dealt
        if self.knows_all:
            self._fill(record, hand, wanted())
        n_heard = hand.n_dealt - len(hand.unheard)
        is_silent = "ranges" not in record.counters  # it does not know that it may begin
        if hand.n_dealt == n_before and not (repeats and (hand.unheard or is_silent)):
            return None
        return StartTraining(ranges=tuple(hand.unheard), n_before=n_heard)

    def _heard(self, hand: Hand, record: RoleRecord) -> None:
        n_unheard = hand.n_dealt - int(_count(record, "ranges"))
        del hand.unheard[: max(len(hand.unheard) - max(n_unheard, 0), 0)]
        n_read, now = int(_count(record, "ranges_done")), record.heard_at
        for number, span in list(hand.held.items()):
            if number < n_read:
                hand.read_at.setdefault(number, now)
            is_late = now - hand.read_at.get(number, now) > SETTLE_SECONDS
            if is_late or self._done.contains(span):
                del hand.held[number]
                hand.read_at.pop(number, None)

    def _fill(self, record: RoleRecord, hand: Hand, may: Wanted) -> None:
        n_held = (Spans(hand.held.values()) - self._done).n_positions
        # What is wanted may be far too much: by a speed that was measured in messages which had
        # waited for another supervisor, or as those that come soon are not there yet.
        n_read = hand.n_samples - n_held
        at_first = max(N_BATCHES_FIRST * self._epochs.batch_size, self.two_pushes)
        wanted = min(may.ahead, max(2 * n_read, at_first))
        n_ahead = self._n_ahead(record, hand, n_held)
        if n_ahead > (may.part_min or wanted // 2):
            return
        cuts = self._cuts
        if self._looks_again.is_due(len(self._members.of("replica"))):
            self._pool = self._pooled()
        first = n_ahead
        for start, stop in self._offers(record, hand):
            at = start
            while at < stop and n_ahead < wanted and len(hand.unheard) < N_RANGES_MAX:
                n_before = bisect_right(cuts, at)
                last = min([stop, *cuts[n_before : n_before + 1]])
                end = self._end_of_range(
                    at, last, n_wanted=wanted - n_ahead, in_parts=may.part_min > 0
                )
                hand.held[hand.n_dealt] = at, end
                hand.unheard.append((at, end))
                hand.n_dealt += 1
                n_ahead, at = n_ahead + end - at, end
                if may.part_min:  # the rest later: by then it is known better
                    wanted = n_ahead
            if n_ahead >= wanted or len(hand.unheard) >= N_RANGES_MAX:
                break
        if n_ahead > first:
            self._pool -= Spans(hand.held.values())
        hand.n_samples = n_read + n_held + n_ahead - first

    def _n_ahead(self, record: RoleRecord, hand: Hand, n_held: int) -> int:
        """Return the samples that it holds and has not trained; others wait to be applied."""
        if "samples_ahead" not in record.counters:
            return n_held
        ahead = int(_count(record, "samples_ahead"))
        ahead += sum(stop - start for start, stop in hand.unheard)
        # Two pushes wait, and it trains for a third, whatever it says. It may have more ahead than
        # is held: what a lost replica had pushed in a round was dealt anew, and then applied.
        return max(ahead, n_held - 3 * self._epochs.push_size)

    def _offers(self, record: RoleRecord, hand: Hand) -> Iterator[Span]:
        """Yield what of the pool this replica may be dealt, the best first."""
        order = self._epochs.pieces
        if order is None:
            yield from self._pool
            return
        here = self._pieces_of(record)
        if here is None:
            return
        near = self._positions(record.name, here | Spans((k, k + 1) for k in hand.fetched))
        yield from self._pool & near
        if not order.pieces.can_fetch:
            return
        n = self._epochs.n_samples
        far = sorted(
            (span != order.at_position(span[0])[1], span[0] // n, -span[0], span)
            for span in self._by_piece(self._pool - near)
        )
        for *_, span in far:
            hand.fetched.append(order.at_position(span[0])[0])
            yield span

    def _by_piece(self, spans: Spans) -> Iterator[Span]:
        for start, stop in spans:
            at = start
            while at < stop:
                end = min(self._epochs.whole(at)[1], stop)
                yield at, end
                at = end

    def _pieces_of(self, record: RoleRecord) -> Spans | None:
        """Return the pieces on the hosts of all its ranks; None: they are not known."""
        ranks = [record, *self._members.ranks_with(record)] if record.ranks > 1 else [record]
        known = [rank.pieces for rank in ranks if rank.pieces is not None]
        return reduce(and_, known) if len(known) == len(ranks) else None

    def _positions(self, name: Address, pieces: Spans) -> Spans:
        """Return where these pieces are in the epochs that are dealt."""
        order, epoch = self._epochs.pieces, self._first_open // self._epochs.n_samples
        assert order is not None
        key, found = self._near.get(name, (None, NOTHING))
        if key != (pieces, epoch):
            found = Spans(span for k in (epoch, epoch + 1) for span in order.spans(k, pieces))
            self._near[name] = (pieces, epoch), found
        return found

    def missing(self, now: Seconds) -> tuple[tuple[str, ...], Seconds]:
        """Return the pieces which are not done and on no host, and how long all wait for them.

        None are while a replica is on its way that may have them.
        """
        order, since = self._epochs.pieces, self._idle_since
        self._idle_since = None
        if order is None or order.pieces.can_fetch or not self.knows_all:
            return (), 0.0
        known: list[Spans] = []
        for record in self._members.of("replica"):
            pieces = self._pieces_of(record)
            if record.presence is Presence.PRESENT and pieces is not None:
                known.append(pieces)
            elif record.presence in {Presence.LAUNCHED, Presence.PRESENT}:
                return (), 0.0
        absent = Spans([(0, len(order.rows))]) - Spans(span for one in known for span in one)
        left = self._pooled()
        far = left & self._positions(Address(""), absent)
        held = Spans(span for hand in self.hands.values() for span in hand.held.values())
        if far and far == left and not held - self._done:
            self._idle_since = now if since is None else since
        names = sorted({order.at_position(start)[0] for start, _ in self._by_piece(far)})
        waited = 0.0 if self._idle_since is None else now - self._idle_since
        return tuple(order.pieces.names[k] for k in names), waited

    def _find_cuts(self) -> list[int]:
        """Return where ranges must end: shards may have applied pushes that were cut otherwise.

        A shard leaves out a push of which it has a part. With a part in each of two shards, the
        rest would never be applied.
        """
        spans = (span for parts in self._applied.values() for part in parts for span in part)
        return sorted({end for span in spans for end in span})

    def _end_of_range(self, start: int, stop: int, *, n_wanted: int, in_parts: bool) -> int:
        """Return the end of a range: that of a push, or of the epoch, or of what is left."""
        n, size = self._epochs.n_samples, self._epochs.batch_size
        if in_parts:
            end, part = self._epochs.stop(start), -(-n_wanted // size) * size
            return min(end if end - start - part <= 1 else start + part, stop)
        return min(self._epochs.stop(start + n_wanted - 1), start - start % n + n, stop)

    def _pooled(self) -> Spans:
        """Return what may be dealt: what is neither done nor held by a replica that lives."""
        held: list[Span] = []
        for record in self._members.of("replica"):
            hand = self.hands.get(record.name)
            # If it is only silent and goes on, its pushes of what others have pushed do not count.
            if hand and (record.silence_reported or not _lives(record, hand)):
                hand.held.clear()
            held += hand.held.values() if hand else ()
        limit = self._limit
        if self._epochs.pieces is not None:
            n = self._epochs.n_samples
            limit = min(limit, (self._first_open // n + 2) * n)
        return Spans([(0, limit)]) - self._done - Spans(held)

    @property
    def _limit(self) -> int:
        if self._total is not None:
            return self._total
        n = self._epochs.n_samples
        return (self._first_open // n + 2) * n

    @property
    def _first_open(self) -> int:
        first = next(iter(self._done), (0, 0))
        return first[1] if first[0] == 0 else 0

    def _count(self) -> None:
        if not self.knows_all:
            return
        applied = (part for parts in self._applied.values() for part in parts)
        self._done = reduce(and_, applied) | self._in_no_push
        # Nothing farther is dealt, whatever shards claim.
        n = self._done.n_positions
        self._done -= Spans([(self._limit, 1 << 63)])
        self._n_beyond = n - self._done.n_positions
        if self._epoch_share < 1.0:
            self._leave_out()

    def _leave_out(self) -> None:
        n = self._epochs.n_samples
        last = max((stop for _, stop in self._done), default=0)
        for epoch in range(self._first_open // n, last // n + 1):
            whole = Spans([(epoch * n, (epoch + 1) * n)])
            if (whole - self._done).n_positions <= (1.0 - self._epoch_share) * n:
                self._in_no_push |= whole - self._done
                self._done |= whole

    def validate(self) -> None:
        """Check what holds after every event; only simulations call it."""
        for name, hand in self.hands.items():
            assert all(number < hand.n_dealt for number in hand.held), f"{name} holds {hand.held}"
            assert len(hand.unheard) <= hand.n_dealt, f"{name} has not heard {hand.unheard}"
        assert all(start < stop <= self._limit for start, stop in self._done), f"{self._done}"


def _lives(record: RoleRecord, hand: Hand) -> bool:
    # One of a supervisor that was killed is not heard at first, and has what it was dealt.
    if record.presence is Presence.LAUNCHED:
        return record.incarnation == hand.incarnation
    return record.presence is Presence.PRESENT


def _count(record: RoleRecord, counter: str) -> float:
    value = record.counters.get(counter, 0.0)
    return value if 0.0 <= value < 2.0**53 else 0.0
