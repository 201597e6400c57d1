"""The settings of a job's supervisor, from its tables and what the preflight has found."""

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Final, Literal, cast

from distbelief.config.algorithms import algorithm_of, coordinator_of, facts_of
from distbelief.config.job import EvaluationTable, Job, OutputTable, Passes
from distbelief.core.errors import JobError
from distbelief.core.units import parse_count
from distbelief.job.launch.local import IMPORT_SECONDS_MAX
from distbelief.job.launch.preflight import PreflightResult
from distbelief.job.run.resume import PreviousRun
from distbelief.parameter_server.codecs import Threshold, TopK
from distbelief.parameter_server.layout import Layout
from distbelief.plans.plan import load
from distbelief.protocol.role import Address
from distbelief.supervisor.stop_rules import StopRules
from distbelief.supervisor.supervisor_config import SupervisorConfig
from distbelief.worker.build import Split, pushing_ranks, roster_of
from distbelief.worker.member import heartbeat_seconds


FIRST_EVALUATION_SECONDS: Final = 1.0  # so that a short job has a curve, too


def check_data(job: Job, answer: PreflightResult) -> None:
    """Reject more replicas than there are samples, where each has a part of its own.

    And epochs of a stream without length.
    """
    train, facts = answer.task.train, facts_of(job)
    if job.stop.steps is not None and coordinator_of(job) is not None:
        raise JobError(
            f"[stop] steps = {job.stop.steps}: under a coordinator replicas take no steps of their "
            "own: use [algorithm] max_iterations, or [stop] samples"
        )
    every = job.evaluation.every
    share = None if facts.policy is None else facts.policy.n_epochs
    in_epochs = {
        '[algorithm.exchange] every = "... epochs"': share is not None,
        "[stop] epochs": job.stop.epochs is not None,
        '[evaluation] every = "... epochs"': isinstance(every, Passes) and every.of == "epoch",
    }
    if train is not None and not train.has_length and any(in_epochs.values()):
        key = next(key for key, is_given in in_epochs.items() if is_given)
        raise JobError(
            f"{key} is given, and the stream of [data.train] has no length: give it __len__, or "
            "limit = N in [data.train] (an epoch of N samples), or count in samples or steps"
        )
    pieces, left = answer.pieces, facts.warm_start_left
    is_stuck = pieces is not None and pieces.is_placed and not pieces.can_fetch
    if train is not None and is_stuck and left(0, train.n_samples, job.cluster.n_replicas):
        raise JobError(
            "[algorithm] has warm_start_steps, in which replica 0 trains alone, and pieces of "
            "[data.train] lie on other hosts: leave them out, or give its object fetch(piece)"
        )
    if train is not None and facts.epochs is None and 1 < job.cluster.n_replicas > train.n_samples:
        raise JobError(
            f"[cluster] replicas = {job.cluster.n_replicas}, but [data.train] "
            f"has {train.n_samples} samples: each replica needs at least one"
        )


def read_again(job: Job, answer: PreflightResult) -> str | None:
    """Return a warning if each replica reads what others train."""
    train, n = answer.task.train, job.cluster.n_replicas
    if train is None or train.order != "stream" or n == 1 or train.has_parts:
        return None
    return (
        f"[data.train] is a stream, so each of {n} replicas reads all of it, and trains what it is "
        "dealt. If reading is slow, let its function take replica and replicas, and return a part"
    )


def short_epochs(job: Job, answer: PreflightResult) -> str | None:
    """Return a warning if every exchange is cut short by the end of its epoch."""
    epochs, train = facts_of(job).epochs, answer.task.train
    if epochs is None or train is None:
        return None
    found = epochs(train.n_samples, answer.pieces, job.cluster.n_replicas)
    n_samples, n_push, n_batches = (
        train.n_samples,
        found.n_push,
        found.n_batches(0, train.n_samples),
    )
    wanted, mean = n_push * found.batch_size, n_samples / found.n_pushes
    if found.pieces is not None and mean < wanted / 2:
        return (
            f"pieces of [data.train] are small: a push ends with its piece, so it has {mean:.0f} "
            f"samples in the mean, not {wanted}. Join pieces, or let each host read all (no here)"
        )
    if n_batches >= n_push:
        return None
    batches = "1 batch" if n_batches == 1 else f"{n_batches} batches"
    return (
        f"an epoch of {n_samples:,} samples has {batches}, and exchanges are {n_push} steps apart: "
        f"they end with their epoch, so that {n_push} is never reached. Let every (or n_push) be "
        f"{n_batches} at most, and best a divisor of it, or use smaller batches"
    )


def warnings_of(job: Job, answer: PreflightResult) -> list[str]:
    """Return what the user should know of a job before it runs, however it runs."""
    found = read_again(job, answer), short_epochs(job, answer), bursts(job)
    return [*filter(None, found), *_void_settings(job, answer)]


def _void_settings(job: Job, answer: PreflightResult) -> list[str]:
    """Return a warning for each setting that a job of this length never comes to."""
    train, facts = answer.task.train, facts_of(job)
    if train is None:
        return []
    total = StopRules(job.stop, n_train=train.n_samples, batch_size=job.batch_size).total_samples
    found = _never_measured(job, n_train=train.n_samples, total=total)
    is_batch, n_replicas = coordinator_of(job) is not None, job.cluster.n_replicas
    if total is None:
        return found
    if facts.warm_start_samples >= total and (is_batch or n_replicas > 1):
        found.append(
            f"[algorithm] the warm start takes {facts.warm_start_samples:,} samples, and [stop] "
            f"ends the job after {total:,}: nothing comes after it. Use a shorter one"
        )
    if is_batch:
        return found
    name, every = _between_exchanges(job, answer, train.n_samples)
    for rule in () if facts.rule is None else facts.rule.rules:
        warm_up = rule.schedule.n_warm_up
        if isinstance(warm_up, int):
            n, n_pushes = warm_up * every * job.batch_size, total / every / job.batch_size
            how = f"{warm_up:,} pushes, and until [stop] come about {math.ceil(n_pushes):,}"
        else:  # "3 epochs"
            count, of = cast(
                "tuple[float, Literal['epoch', 'sample', 'step']]", parse_count(warm_up)
            )
            n = Passes(n=count, of=of).n_samples(n_train=train.n_samples, batch_size=job.batch_size)
            how = f"{warm_up}, and [stop] ends the job after {total:,} samples"
        if n >= total > 0 < n:
            found.append(
                f"schedule: n_warm_up is {how}: the rate never rises to its value. Use fewer"
            )
    n_batches = -(-total // job.batch_size)
    n_steps = n_batches / n_replicas
    if n_batches < n_replicas:
        found.append(
            f"[cluster] replicas = {n_replicas:,}, and [stop] ends the job after "
            f"{n_batches:,} batch{'es' * (n_batches > 1)} of {job.batch_size}: some replicas "
            "train nothing. Use fewer replicas, smaller batches or a longer job"
        )
        return found
    staleness = facts.policy.staleness or 0 if facts.policy is not None else 0
    # Of dealt data each epoch ends an exchange.
    ends = facts.epochs is not None and total > train.n_samples
    for key, n, what in (
        (name, every * (not ends), "they exchange nothing before the end"),
        ("n_fetch", getattr(job.algorithm, "n_fetch", 1), "none ever sees what others learn"),
        (f"{name} * staleness", every * staleness, "none is ever so far ahead that it waits"),
    ):
        if n > n_steps and n_replicas > 1:
            found.append(
                f"{key} = {n:,} steps, and until [stop] each of {n_replicas:,} replicas takes "
                f"about {n_steps:.3g}: {what}. Use {key} = {max(1, int(n_steps / 10)):,} or fewer, "
                "or a longer job"
            )
            break
    return found


def _between_exchanges(job: Job, answer: PreflightResult, n_train: int) -> tuple[str, int]:
    """Return the key that says how many steps of a replica are between two pushes, and them."""
    facts, n_replicas = facts_of(job), job.cluster.n_replicas
    n_push, n_summed = (getattr(job.algorithm, name, 1) for name in ("n_push", "accumulate"))
    if facts.epochs is not None:
        every = facts.epochs(n_train, answer.pieces, n_replicas).n_push
    elif facts.policy is None or facts.policy.every in {1, "auto"}:
        every = n_push * n_summed
    else:
        n_pass = Fraction(n_train, n_replicas * job.batch_size)
        every = int(facts.policy.steps_of(n_pass).every)
    return "n_push" if n_push > 1 else "accumulate" if n_summed > 1 else "every", every


def _never_measured(job: Job, *, n_train: int, total: int | None) -> list[str]:
    """Return a warning for each measurement, or file, that comes with the end alone."""
    every, seconds, patience = job.evaluation.every, job.stop.seconds, job.stop.patience
    length, unit, found = seconds, "s", list[str]()
    n_needed = 0 if patience is None else patience + 1  # the first is what others must improve
    if isinstance(every, Passes):
        n = every.n_samples(n_train=n_train, batch_size=job.batch_size)
        length, unit, what = total, "samples", "only the last evaluation comes"
        found = _beyond("[evaluation] every", n, length, f"{unit}: {what}")
        key, at = f"{n_needed} times [evaluation] every", float(n * n_needed)
    else:
        key, at = f"the time of evaluation {n_needed}", _nth_evaluation(every, n_needed)
        if every != EvaluationTable().every and _nth_evaluation(every, 2) > (seconds or math.inf):
            what = "s: the first and the last evaluation alone come"
            found = _beyond("[evaluation] every", every, seconds, what)
    if job.data.test is None:  # there are none at all
        found = []
    elif not found:
        what = f"patience = {patience} never ends it"
        found = _beyond(key, at, length, f"{unit}: {what}")
    for key, what in (
        ("report_every", "s: curve and metrics have one point"),
        ("snapshot_every", "s: only the last checkpoint comes, and none to resume from"),
    ):
        if (value := getattr(job.output, key)) != getattr(OutputTable(directory="any"), key):
            found += _beyond(f"[output] {key}", value, seconds, what)
    return found


def _nth_evaluation(every: float, n: int) -> float:
    """Return the seconds to evaluation n: gaps double until they are `every` (`Evaluations`)."""
    at, gap = 0.0, min(every, FIRST_EVALUATION_SECONDS)
    while n and gap < every:
        at, gap, n = at + gap, min(every, 2 * gap), n - 1
    return at + n * gap


def _beyond(key: str, n: float, length: float | None, what: str) -> list[str]:
    if length is None or n <= length:
        return []
    unit = what.partition(":")[0]
    return [f"{key} is {n:,g} {unit}, and [stop] ends the job after {length:,g} {what}"]


def bursts(job: Job) -> str | None:
    """Return a warning if an adaptive rule meets sparse pushes ."""
    facts = facts_of(job)
    rule, codec = facts.rule, facts.policy.push_codec if facts.policy else None
    if rule is None or not rule.adaptive or not isinstance(codec, TopK | Threshold):
        return None
    return (
        f"push.codec is {codec.form!r} and rule {rule.name!r} adapts its rates: an element that "
        "waits comes as a burst, and rates follow how often it comes, not how large it is. Losses "
        'were 2 to 7 % higher than with rule = { name = "sgd" }'
    )


def supervisor_config(
    job: Job, answer: PreflightResult, *, previous: PreviousRun | None = None
) -> SupervisorConfig:
    """Return the supervisor's config, the same for processes and for virtual time."""
    previous = previous or PreviousRun()
    facts = facts_of(job)
    assert answer.task.train is not None
    n_train, n_done = answer.task.train.n_samples, sum(previous.before.samples.values())
    n_replicas = job.cluster.n_replicas
    dealt = facts.epochs(n_train, answer.pieces, n_replicas) if facts.epochs else None
    every, n_samples = job.evaluation.every, None
    if isinstance(every, Passes):
        n_samples = every.n_samples(n_train=n_train, batch_size=job.batch_size)
    seconds = every if isinstance(every, float) else math.inf
    return SupervisorConfig(
        roster=tuple(roster_of(job, ranks=answer.ranks)),
        stop=StopRules(
            job.stop,
            n_train=n_train,
            batch_size=job.batch_size,
            higher_is_better=answer.higher_is_better,
            has_test=job.data.test is not None,
        ),
        metric_name=answer.metric_name,
        other_metrics=answer.other_metrics,
        higher_is_better=answer.higher_is_better,
        judged_by=answer.judged_by,
        min_delta=job.stop.min_delta or 0.0,
        batch_size=job.batch_size,
        in_ring=facts.in_ring,
        replicas_min=job.cluster.replicas_min,
        warm_start_steps=facts.warm_start_left(n_done, n_train, n_replicas),
        dealt=dealt,
        parts=None if dealt is None else _parts(job, answer),
        epoch_share=facts.epoch_share,
        # Some steps move a replica less than many do; gradients may be divided by those of a push.
        cuts_pushes=facts.policy is not None and facts.policy.send == "delta",
        evaluate_every=seconds,
        first_evaluation=min(seconds, FIRST_EVALUATION_SECONDS),
        evaluate_samples=n_samples,
        snapshot_every=job.output.snapshot_every,
        report_every=job.output.report_every,
        heartbeat_seconds=heartbeat_seconds("replica-0", job.cluster.shard_copies, n_replicas),
        import_seconds_max=IMPORT_SECONDS_MAX,
        first_incarnation=previous.incarnation,
        first_label=previous.label,
        before=previous.before,
        fields=tuple(algorithm_of(job).fields),
        verdict=facts.verdict,
    )


def _parts(job: Job, answer: PreflightResult) -> Mapping[Address, Sequence[int]] | None:
    if not answer.ranks:
        return None
    layout = Layout.of(answer.tensors, n_shards=job.cluster.shards, dtype=answer.dtype)
    plan = load(answer.plans[answer.ranks[0]])
    return pushing_ranks(Split(plan=plan, graph=plan.captured_graph(), modules={}), layout)
