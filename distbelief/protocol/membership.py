"""Messages between the supervisor and every role: join, heartbeat, start, stop, report."""

from typing import Annotated, Final

import msgspec

from distbelief.protocol.fields import Amount, AnyMessage, Count, Duration, Name, Text


METRICS_MAX: Final = 32  # of one evaluation
N_SPANS_MAX: Final = 4096  # of pieces, in a message
N_APPLIED_MAX: Final = 1 << 16  # of what is applied: every replica may work at a place of its own
Warnings = Annotated[tuple[Text, ...], msgspec.Meta(max_length=8)]


class Join(AnyMessage, frozen=True):
    """Role -> supervisor: this incarnation runs, and listens here."""

    endpoint: Name
    host: Name  # roles of equal host share memory
    pid: Count
    warnings: Warnings = ()


class PeerEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Where one role listens."""

    name: Name
    incarnation: Count
    endpoint: Name
    host: Name


class Peers(AnyMessage, frozen=True):
    """Supervisor -> role: you are a member; these are the peers that you may need."""

    entries: tuple[PeerEntry, ...]
    gone: tuple[Name, ...] = ()  # ranks of your own group that will not come back


class Heartbeat(AnyMessage, frozen=True):
    """Role -> supervisor: what I am doing; sent at a fixed interval."""

    state: Name
    counters: dict[Name, float]
    # Of data in pieces: those on its host, as ranges [start, stop, start, stop, ...) of their order
    # by name. Unset: it has no such data, or does not know yet.
    pieces: (
        Annotated[tuple[Amount, ...], msgspec.Meta(max_length=2 * N_SPANS_MAX)] | msgspec.UnsetType
    ) = msgspec.UNSET


class HeartbeatAck(AnyMessage, frozen=True):
    """Supervisor -> role: the supervisor is alive."""


class StartTraining(AnyMessage, frozen=True):
    """Supervisor -> replica: train (a warm start releases replicas one by one).

    Sent again with a higher bound before the replica gets there; the newest counts.
    """

    samples: Amount | None = None  # over all incarnations: begin no step beyond; None: no bound
    # Where data are dealt: ranges [start, stop) of positions, after the first `n_before` that this
    # incarnation was dealt. Those that it has are ignored.
    ranges: tuple[tuple[Amount, Amount], ...] | None = None
    n_before: Count = 0


class Stop(AnyMessage, frozen=True):
    """Supervisor -> role: end your work.

    A replica completes its step and its final push, then sends `Finished`. Any other role
    sends `Finished` when its own work is done. Then it exits.
    """

    reason: Text


class Finished(AnyMessage, frozen=True):
    """Role -> supervisor: my work has ended as asked."""

    counters: dict[Name, float]


class Failed(AnyMessage, frozen=True):
    """Role -> supervisor: I cannot go on."""

    error: Text
    culprit_is_job: bool  # the user's model, data or settings; a restart does not help
    restart_helps: bool = True  # false too for a saved state that is not that of this role


class Progress(AnyMessage, frozen=True):
    """Replica -> supervisor: the steps since the last report; of a coordinator, an iteration."""

    step: Amount
    samples: Amount  # over all incarnations of this replica
    loss: float  # mean over the samples since the last report
    seconds_computing: Duration  # total of this incarnation
    seconds_waiting: Duration
    # Positions [start, stop, start, stop, ...) whose gradients were skipped, as not finite, and
    # are in no push; the newest of this incarnation.
    skipped: tuple[Amount, ...] = ()
    # Of an iteration, which gets a line of metrics: those of its heartbeats that it has changed
    counters: dict[Name, float] | msgspec.UnsetType = msgspec.UNSET


class SamplesApplied(AnyMessage, frozen=True):
    """Shard -> supervisor: my values contain the pushes of these positions, where data are dealt.

    Sent when it begins to serve, and while that changes. A restored shard may have fewer. With more
    spans than the limit these are the first: what lies between them is dealt first, and joins them.
    """

    spans: Annotated[
        tuple[Amount, ...], msgspec.Meta(max_length=2 * N_APPLIED_MAX)
    ]  # start, stop, ...


class Evaluate(AnyMessage, frozen=True):
    """Supervisor -> evaluator: fetch, and evaluate on the held-out data now."""

    request: Count
    whole: bool  # all held-out samples, not the usual subset


class EvaluationDone(AnyMessage, frozen=True, omit_defaults=True):
    """Evaluator -> supervisor: held-out loss and metrics of the parameters just fetched."""

    request: Count
    loss: float
    metric: float
    n_samples: Amount
    clock: float  # mean over shards of the clock at which they were read
    # The metrics behind the first
    others: Annotated[tuple[float, ...], msgspec.Meta(max_length=METRICS_MAX)] = ()
    unsaved: Text | None = None  # why these values, the best so far, could not be saved


class SaveCheckpoint(AnyMessage, frozen=True):
    """Supervisor -> shard: save a checkpoint. A coordinator passes it on."""

    label: Name
    last: bool = False  # of this incarnation: apply no push after it


class CheckpointSaved(AnyMessage, frozen=True):
    """Shard -> supervisor: saved, or why not. A coordinator answers for all shards."""

    label: Name
    clock: Count
    error: Text | None = None
