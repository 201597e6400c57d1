"""When a run will reach its target, and what more machines would change: `distbelief forecast`.

    loss(x) = c + a (1 + x / s)^-b        x: samples so far

Fitted by relative errors, to the whole curve and to its later parts. An
interval has three sources: residuals drawn again (the bootstrap of Efron 1979); where the fit
begins; and how wrong the same fits of the first part of the run were about the rest of it. It says
that it cannot tell where there are few points, no fall, or no bend yet.

Batch methods, whose loss falls on after each pause, are often below all such curves. So half
of theirs goes on as the run has: by falls of a few iterations each, drawn again (blocks of a time
series, Kunsch 1989).
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Final, Literal, final

import msgspec
import numpy as np
from numpy.typing import NDArray

from distbelief.config.algorithms import coordinator_of, facts_of
from distbelief.config.job import Job
from distbelief.core.errors import DistBeliefError
from distbelief.core.formatting import is_loss, is_share
from distbelief.dashboard.bottleneck import (
    OBSERVED_SECONDS_MIN,
    SPENT,
    seconds_spent,
    session_seconds,
)
from distbelief.job.run.metrics_file import Measurement
from distbelief.supervisor.view import JobView


Point = tuple[float, float]  # samples so far, and what was measured
Interval = tuple[float, float, float]  # quantiles 5 %, 50 % and 95 %
_Array = NDArray[np.float64]

N_POINTS_MIN: Final = 8
N_BACK_MIN: Final = 5  # of an earlier forecast
N_DRAWN: Final = 300  # curves
N_PARAMETERS: Final = 4  # of a curve
BEGINS: Final = (0.0, 0.2, 0.4)  # of the points: what is left out at the start
BLOCK: Final = 3  # iterations of a batch method that are drawn together
BACK_TO: Final = (0.5, 0.65, 0.8)  # of the points: what earlier forecasts knew
AHEAD_MAX: Final = 10.0  # times the samples so far
LINE: Final = 1.2  # times the curve's squared error: a line is as good
LARGEST: Final = 1e60  # squares of a loss and of its inverse must be finite
N_MORE: Final = 2  # replicas
FEW: Final = 0.98  # of the gain, if batches limit it so far, they are named
RISES: Final = 2.0  # standard errors of the slope of the last half
_QUANTILES: Final = (0.05, 0.5, 0.95)


class CannotTellError(DistBeliefError):
    """What was measured does not say how the curve goes on."""


@final
class Outlook(msgspec.Struct, frozen=True, kw_only=True):
    """What a run's curve and rates say of its future; intervals of 90 %."""

    n_points: int
    held_out: bool = True  # the loss; without [data.test] that of training
    samples: int  # so far
    rate: float  # samples a second
    ended: bool = False  # what is said of the time to come holds if the run is resumed
    done: bool = False  # by a rule of the job file, which must allow more before it goes on
    left: float | None = None  # seconds, until [stop] ends the run whatever it has reached
    loss_at_end: Interval | None = None  # at the samples of [stop]
    target: str = ""  # "loss 0.3", of [stop]
    met: float | None = None  # seconds of the job after which it was measured
    seconds: Interval | None = None  # until it is reached; infinite beyond `AHEAD_MAX`
    reached: float | None = None  # share of the curves that reach it within `AHEAD_MAX`
    n_replicas: int = 0
    exchange: float | None = None  # share of their time, with the shards or without samples
    busy: float | None = None  # share of the time, at work, of the shard with most; None: not known
    # Samples a second with two more replicas, over those now: if all of the exchange is waiting for
    # what is busy, and at most.
    two_more: tuple[float, float] | None = None
    parts: str = ""  # what all replicas share, if that is too little for more of them
    not_told: str = ""  # why there is no forecast
    more_not_told: str = ""  # why nothing is said of more replicas


def curve_of(
    measurements: Sequence[Measurement],
    of: Literal["held_out_loss", "loss", "metric"] = "held_out_loss",
) -> list[Point]:
    """Return each value where it first appeared; of an accuracy what it lacks to 1."""
    points: list[Point] = []
    last = None
    for one in measurements:
        value: float | None = getattr(one, of)
        if value is None and of != "loss" and one.metrics:
            value = math.nan  # which JSON has not
        shown = value, one.held_out_loss  # another evaluation may find the same accuracy
        if value is not None and one.samples and shown != last:
            points.append((float(one.samples), 1.0 - value if of == "metric" else value))
            last = shown
    return points


def loss_at(samples: float, points: Sequence[Point], *, is_batch: bool = False) -> Interval:
    """Return the loss at so many samples, with an interval of 90 %; or raise CannotTellError."""
    drawn = _drawn(points, np.array([samples]), is_batch=is_batch)
    low, middle, high = np.quantile(drawn[:, 0], _QUANTILES)
    return float(low), float(middle), float(high)


def samples_until(
    value: float, points: Sequence[Point], *, is_batch: bool = False
) -> tuple[Interval, float]:
    """Return the samples at which a curve falls to a value, and how many of the curves do.

    Infinite beyond ten times the samples so far. CannotTellError if the curve does not say it.
    """
    ahead = np.geomspace(1.0, AHEAD_MAX, 200) * (points[-1][0] if points else 1.0)
    falls = _drawn(points, ahead, is_batch=is_batch) <= value
    first = np.where(falls.any(axis=1), ahead[falls.argmax(axis=1)], math.inf)
    low, middle, high = np.quantile(first, _QUANTILES, method="nearest")
    return (float(low), float(middle), float(high)), float(falls.any(axis=1).mean())


# --- curves ---


def _drawn(points: Sequence[Point], ahead: _Array, *, is_batch: bool) -> _Array:
    """Draw curves that what was measured allows, at the samples `ahead`: (curves, samples).

    `is_batch`: they are of a batch method.
    """
    # A run that ends measures twice at one place, and one that was resumed may have gone back.
    points = sorted(dict(points).items())
    if len(points) < N_POINTS_MIN:
        n = len(points)
        noun = "measurement" if n == 1 else "measurements"
        raise CannotTellError(f"cannot tell: {n} {noun}, and {N_POINTS_MIN} are needed")
    if ahead[-1] > AHEAD_MAX * points[-1][0]:
        raise CannotTellError(f"cannot tell: {ahead[-1]:,.0f} samples are too far ahead")
    x, y = np.array(points, dtype=np.float64).T
    if not ((y > 1.0 / LARGEST) & (y < LARGEST)).all():  # NaN is not
        raise CannotTellError("cannot tell: not all that was measured is a finite number above 0")
    _check_shape(x, y)
    random = np.random.default_rng(0)
    past = [0.0, *_errors_so_far(x, y)]
    horizon = np.log(np.maximum(ahead / x[-1], 1.0))
    n_each, drawn = N_DRAWN // len(BEGINS), []
    for begin in BEGINS:
        n_out = min(int(begin * len(x)), len(x) - N_POINTS_MIN)
        own_x, own_y = x[n_out:], y[n_out:]
        fit = _fitted(own_x, own_y[None], own_x)[0]
        errors = np.log(own_y / fit) * math.sqrt(len(own_x) / (len(own_x) - N_PARAMETERS))
        again = fit * np.exp(random.choice(errors, (n_each, len(own_x))))
        wrong = random.choice(past, (n_each, 1)) * random.choice((-1.0, 1.0), (n_each, 1))
        noise = wrong * horizon + random.choice(errors, (n_each, 1))
        drawn.append(_fitted(own_x, again, ahead) * np.exp(noise))
    if is_batch:
        falls = np.convolve(np.diff(np.log(y)), np.ones(BLOCK), "valid")
        at = np.maximum(ahead - x[-1], 0.0) / (BLOCK * np.diff(x).mean())
        rows = random.choice(falls, (N_DRAWN, int(at[-1]) + 1)).cumsum(axis=1)
        ends = np.arange(rows.shape[1] + 1)
        drawn.append(y[-1] * np.exp([np.interp(at, ends, [0.0, *row]) for row in rows]))
    return np.concatenate(drawn)


def _fitted(x: _Array, y: _Array, ahead: _Array) -> _Array:
    """Return the values at `ahead` of the best curve for each row of y: (rows, samples).

    b and s are taken from a grid; for each, the best c and a of at least 0 are those of a linear
    problem: least squares of relative errors.
    """
    slopes, scales = np.geomspace(0.1, 3.0, 14), np.geomspace(x[0] / 10, 3 * x[-1], 12)
    b, s = (grid.reshape(-1, 1) for grid in np.meshgrid(slopes, scales))
    falls = (1.0 + x / s) ** -b  # (grid, n)
    weights = 1.0 / y  # (rows, n)
    cc, ca, aa = (weights**2 @ (falls**k).T for k in range(3))  # (rows, grid)
    c1, a1 = weights.sum(axis=1, keepdims=True), weights @ falls.T
    determinant = np.maximum(cc * aa - ca**2, 1e-12 * cc * aa)
    c, a = (c1 * aa - a1 * ca) / determinant, (a1 * cc - c1 * ca) / determinant
    c, a = np.where(c < 0.0, 0.0, c), np.where(c < 0.0, a1 / aa, a)
    c, a = np.where(a < 0.0, c1 / cc, c), np.where(a < 0.0, 0.0, a)
    best = np.argmax(c * c1 + a * a1, axis=1)
    rows = np.arange(len(y))
    found = (1.0 + ahead / s[best]) ** -b[best]
    return np.asarray(c[rows, best, None] + a[rows, best, None] * found)


def _errors_so_far(x: _Array, y: _Array) -> list[float]:
    # Of the logarithm, for each unit of the logarithm of samples ahead.
    errors = []
    for share in BACK_TO:
        n = int(share * len(x))
        if n >= N_BACK_MIN:
            late = slice(max(n, len(x) - 3), None)
            wrong = np.log(y[late] / _fitted(x[:n], y[None, :n], x[late])[0])
            errors.append(float(wrong.mean() / np.log(x[late].mean() / x[n - 1])))
    return errors


def _check_shape(x: _Array, y: _Array) -> None:
    half = len(x) // 2
    late_x, late_y = x[half:], y[half:]
    (slope, start), cover = np.polyfit(late_x, late_y, 1, cov="unscaled")
    left = late_y - (slope * late_x + start)
    error = math.sqrt(cover[0, 0] * (left @ left) / max(len(late_x) - 2, 1))
    if slope > RISES * error:
        raise CannotTellError("cannot tell: the loss does not fall any more")
    line = np.polyval(np.polyfit(x, y, 1), x)
    curve = _fitted(x, y[None], x)[0]
    if ((1.0 - line / y) ** 2).sum() <= LINE * ((1.0 - curve / y) ** 2).sum():
        raise CannotTellError(
            "cannot tell: the loss still falls in a line, which has no bend yet: ask again later"
        )


# --- a run ---


def outlook(
    job: Job, view: JobView, measurements: Sequence[Measurement], *, ended: bool = False
) -> Outlook:
    """Return what a run's curve and counters say of its future."""
    timed = [one for one in measurements if one.samples]
    # At its end a run evaluates and saves; a session before this one may have had other replicas.
    end = next((k for k, one in enumerate(timed) if one.samples == timed[-1].samples), 0)
    rated = timed[: end + 1] if ended else timed
    last = rated[-1].time if ended and rated else view.seconds
    since = last - session_seconds(view.roles)
    late = [one for one in rated[len(rated) // 2 :] if one.time >= since]
    seconds = late[-1].time - late[0].time if late else 0.0
    rate = view.samples_per_second or 0.0
    if seconds > 0.0:
        rate = (late[-1].samples - late[0].samples) / seconds
    held_out, is_batch = job.data.test is not None, coordinator_of(job) is not None
    points = curve_of(measurements, "held_out_loss" if held_out else "loss")
    found = Outlook(
        n_points=len(points),
        held_out=held_out,
        samples=view.samples,
        rate=rate,
        ended=ended,
        done=ended and _is_over(job, view),
        left=None if ended else view.eta_seconds,
    )
    name, aimed = view.metric_name, points
    target, value = "", None
    if job.stop.loss is not None:
        target, value = f"loss {job.stop.loss:g}", job.stop.loss
    elif job.stop.accuracy is not None:
        target = f"{name} {job.stop.accuracy:g}"
        if is_share(name):
            value, aimed = 1.0 - job.stop.accuracy, curve_of(measurements, "metric")
        elif is_loss(name):
            value = job.stop.accuracy
    none_left = ended and (view.progress or 0.0) >= 1.0
    more = _of_replicas(job, view, timed, none_left=none_left)
    changes: dict[str, object] = {"target": target, **more}
    if value is not None:
        first = next((x for x, y in aimed if y <= value), None)
        changes["met"] = next((one.time for one in timed if one.samples == first), None)
    try:
        if view.total_samples is not None and view.total_samples > view.samples:
            changes["loss_at_end"] = loss_at(view.total_samples, points, is_batch=is_batch)
        if target and value is None:
            raise CannotTellError(f"cannot tell: {name} is no loss and no accuracy")  # noqa: TRY301
        if value is not None and changes["met"] is None:
            rises = name if aimed is not points else ""
            until, changes["reached"] = _target_in(target, value, aimed, rises, is_batch=is_batch)
            if rate > 0.0:
                changes["seconds"] = tuple(max(0.0, n - view.samples) / rate for n in until)
    except CannotTellError as error:
        changes["not_told"] = str(error)
    return msgspec.structs.replace(found, **changes)


def _is_over(job: Job, view: JobView) -> bool:
    """Return whether a rule has ended a run, and would end it again."""
    patience, coordinator = job.stop.patience, coordinator_of(job)
    counters = next((role.counters for role in view.roles if role.name == coordinator), {})
    return (
        (view.progress or 0.0) >= 1.0
        or (patience is not None and view.evaluations_without_gain >= patience)
        or (coordinator is not None and view.stop_reason == facts_of(job).verdict(counters).reason)
    )


def _target_in(
    target: str, value: float, aimed: Sequence[Point], rises: str, *, is_batch: bool
) -> tuple[Interval, float]:
    """As `samples_until`; its error names the target, and the metric that lacks so much to 1."""
    try:
        return samples_until(value, aimed, is_batch=is_batch)
    except CannotTellError as error:
        text = str(error)
        if rises:
            text = text.replace("loss does not fall", f"{rises} does not rise")
            text = text.replace("loss still falls", f"{rises} still rises")
        raise CannotTellError(f"{target}: {text}") from error


def _of_replicas(
    job: Job, view: JobView, measurements: Sequence[Measurement], *, none_left: bool
) -> dict[str, object]:
    spent = _spent(view)
    totals = [(_exchanged(one), sum(one.values())) for one in spent]
    shares = [exchanged / total for exchanged, total in totals if total]
    exchange = sum(shares) / len(shares) if shares else None
    found: dict[str, object] = {"n_replicas": len(spent), "exchange": exchange}
    busy = _busy(view)
    if exchange is not None and coordinator_of(job) is None:
        found["busy"] = max(busy, default=None)
    try:
        _check_more(job, [total for _, total in totals])
        if exchange is not None and coordinator_of(job) is not None:
            found["two_more"], found["parts"] = _more_for_batches(job, measurements, spent)
        elif exchange is not None:
            found["two_more"], found["parts"] = _more_for_samples(
                job, None if none_left else view, len(spent), exchange, busy
            )
    except CannotTellError as error:
        found["more_not_told"] = str(error)
    return found


def _check_more(job: Job, seconds: Sequence[float]) -> None:
    if facts_of(job).in_ring:
        raise CannotTellError("cannot tell: with each replica a ring has more to send")
    if any(seconds) and max(seconds) < OBSERVED_SECONDS_MIN:
        raise CannotTellError("cannot tell: they have trained for less than a second")


def _spent(view: JobView) -> list[dict[str, float]]:
    """Return the seconds of each replica by activity; of a split one those of a rank.

    Of the ranks it is the one that has most to do with shards. What it waits for others of its
    replica counts as computing.
    """
    found: dict[str, dict[str, float]] = {}
    for role in view.roles:
        if role.name.startswith("replica-"):
            replica, spent = role.name.partition(".")[0], seconds_spent(role.counters, {})
            inside = f"{SPENT}waiting for {replica}."
            waited = sum(n for name, n in role.counters.items() if name.startswith(inside))
            if waited:
                spent["computing"] = spent.get("computing", 0.0) + waited
                spent["waiting for roles"] -= waited
            found[replica] = max(found.get(replica, spent), spent, key=_exchanged)
    return [*found.values()]


def _busy(view: JobView) -> tuple[float, float] | tuple[()]:
    """Return the shares of time, of the shard where each is largest; none if not all count.

    What takes longer with each push, and all that it does: several clients may share a copy, or a
    turn of its event loop.
    """
    shares: list[tuple[float, float]] = []
    for role in view.roles:
        if role.name.startswith("shard-"):
            spent = seconds_spent(role.counters, {})
            saving = role.counters.get(f"{SPENT}saving", 0.0)
            total = sum(n for name, n in role.counters.items() if name.startswith(SPENT)) - saving
            if total <= 0.0:
                return ()
            handled = role.counters.get("seconds_handling", 0.0)
            each, copied = spent.get("computing", 0.0), spent.get("copying", 0.0)
            shares.append((each / total, min(max(each + copied, handled) / total, 1.0)))
    return (max(a for a, _ in shares), max(b for _, b in shares)) if shares else ()


def _exchanged(spent: Mapping[str, float]) -> float:
    # Waiting for shards, or for the supervisor to deal samples, and copying.
    names = ("waiting for shards", "copying", "waiting for samples")
    return sum(spent.get(name, 0.0) for name in names)


def _more_for_batches(
    job: Job, measurements: Sequence[Measurement], spent: Sequence[Mapping[str, float]]
) -> tuple[tuple[float, float], str]:
    """Return the gain of two more replicas that share each batch, and its parts if these are few.

    A replica computes whole parts. What is neither computing nor, at most, exchange takes as long
    with more replicas: above all the coordinator's commands.
    """
    facts, n = facts_of(job), len(spent)
    counted = [
        (one.samples, one.figures["evaluations"])
        for one in measurements
        if "evaluations" in one.figures
    ]
    sizes = [(s - s0) / (e - e0) for (s0, e0), (s, e) in itertools.pairwise(counted) if e > e0]
    if facts.parts is None or facts.warm_start_samples:
        raise CannotTellError("cannot tell of a program, nor of a job with a warm start")
    if not sizes:
        raise CannotTellError("cannot tell: no two evaluations of the loss have ended")
    numbers = n, n + N_MORE
    parts = [facts.parts(round(median(sizes)), k) for k in numbers]
    # Of the replica with the most parts, as shares of a batch.
    now, then = (_most(m, k) / m for m, k in zip(parts, numbers, strict=True))
    seconds = sum(sum(one.values()) for one in spent) / n
    computing = sum(one.get(name, 0.0) for one in spent for name in ("computing", "reading"))
    shared = (computing, computing + sum(map(_exchanged, spent)))
    low, high = (seconds / (seconds - min(s, seconds / now) * (now - then)) for s in shared)
    is_few = parts[1] < 4 * numbers[1]
    return (low, high), f"a batch has {parts[1]} parts to share" if is_few else ""


def _more_for_samples(
    job: Job, view: JobView | None, n: int, exchange: float, busy: tuple[float, float] | tuple[()]
) -> tuple[tuple[float, float], str]:
    """Return the gain of two more replicas, and the batches that are left if these are few.

    Replicas whose exchange runs beside their steps do not wait for shards that are half busy: so
    what these do in a second limits it, too. In a round replicas wait, and share a part of it.
    """
    low, high = gain_of_more(exchange, n, n_more=N_MORE)
    facts = facts_of(job)
    if busy and (facts.policy is None or facts.policy.round is None):
        with_push, in_all = busy
        high = max(1.0, min(high, 1.0 / with_push if with_push else high))
        low = min(low, high, _gain_of_queue(in_all / n, n, n_more=N_MORE))
    if facts.epochs is None or view is None or view.total_samples is None:
        return (low, high), ""
    left = _most(max(view.total_samples - view.samples, 0), facts.batch_size)
    most = _most(left, n) / _most(left, n + N_MORE) if left else 1.0
    few = f"{left:,} batches are left to deal" if most < FEW * high else ""
    return (min(low, most), min(high, most)), few


def _most(n_parts: int, n: int) -> int:
    return -(-n_parts // n)


def gain_of_more(exchange: float, n: int, *, n_more: int) -> tuple[float, float]:
    """Return by what `n_more` clients multiply the throughput of n: at least, and at most.

    At least: all of their exchange is one queue at the shards, in a closed network that mean value
    analysis solves (Reiser & Lavenberg 1980). At most: none of it is.
    """
    if not n:
        return 1.0, 1.0
    low, high = 0.0, exchange
    for _ in range(60):  # the service whose wait is `exchange` of a step, with n clients
        middle = (low + high) / 2
        if _closed(middle, 1.0 - exchange, n)[1] < exchange:
            low = middle
        else:
            high = middle
    before, after = (_closed(high, 1.0 - exchange, clients)[0] for clients in (n, n + n_more))
    return after / before, (n + n_more) / n


def _gain_of_queue(service: float, n: int, *, n_more: int) -> float:
    """Return the gain if each step of n clients has this service, as a share of it, in a queue.

    As if no step went on meanwhile: of those that do, fewer wait.
    """
    low, high = 0.0, 1.0
    for _ in range(60):  # the rest of the step
        middle = (low + high) / 2
        if middle + _closed(service, middle, n)[1] < 1.0:
            low = middle
        else:
            high = middle
    return _closed(service, low, n + n_more)[0] / n


def _closed(service: float, thinking: float, n: int) -> tuple[float, float]:
    # Throughput of n clients, and how long each waits and is served.
    queue = throughput = wait = 0.0
    for clients in range(1, n + 1):
        wait = service * (1.0 + queue)
        throughput = clients / max(thinking + wait, 1e-12)
        queue = throughput * wait
    return throughput, wait
