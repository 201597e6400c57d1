"""Who is a member of a job, what it is doing, and how it ends."""

from typing import Annotated

import msgspec

from distbelief.protocol.fields import AnyMessage, Count, Name, Text


Warnings = Annotated[tuple[Text, ...], msgspec.Meta(max_length=8)]


class Join(AnyMessage, frozen=True):
    """Role -> supervisor: I live, and can be reached here."""

    endpoint: Name
    host: Name  # roles of equal host share memory
    pid: Count
    warnings: Warnings = ()


class PeerEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Where one role is to be found."""

    name: Name
    incarnation: Count
    endpoint: Name
    host: Name


class Peers(AnyMessage, frozen=True):
    """Supervisor -> role: you are a member; these are the others you may need."""

    entries: tuple[PeerEntry, ...]
    gone: tuple[Name, ...] = ()  # of your own group: have ended, will not come back


class Heartbeat(AnyMessage, frozen=True):
    """Role -> supervisor: what I am doing; sent whether or not anything changed."""

    state: Name
    counters: dict[Name, float]


class HeartbeatAck(AnyMessage, frozen=True):
    """Supervisor -> role: I live too."""


class StartTraining(AnyMessage, frozen=True):
    """Supervisor -> replica: train (a warm start releases replicas one by one).

    Said again with another bound before the replica gets there; the newest counts.
    """

    samples: Count | None = None  # in all your lives: begin no step then; None: no end


class Stop(AnyMessage, frozen=True):
    """Supervisor -> role: end your work.

    A replica finishes its step and its final push, then says `Finished`; any other
    role says `Finished` when nothing of its own is under way. Then it halts.
    """

    reason: Text


class Finished(AnyMessage, frozen=True):
    """Role -> supervisor: what I was asked to end has ended."""

    counters: dict[Name, float]


class Failed(AnyMessage, frozen=True):
    """Role -> supervisor: I cannot go on."""

    error: Text
    culprit_is_job: bool  # the user's model, data or numbers; a restart cannot mend it


class Progress(AnyMessage, frozen=True):
    """Replica -> supervisor: one or more steps done since the last report."""

    step: Count
    samples: Count  # since this replica's first life began
    loss: float  # mean over the samples since the last report
    seconds_computing: float  # total of this life
    seconds_waiting: float


class Evaluate(AnyMessage, frozen=True):
    """Supervisor -> evaluator: fetch, and measure the held-out data now."""

    request: Count
    whole: bool  # all held-out samples, not the usual subset


class EvaluationDone(AnyMessage, frozen=True):
    """Evaluator -> supervisor: held-out figures of the parameters just fetched."""

    request: Count
    loss: float
    metric: float
    n_samples: Count
    clock: float  # mean over shards of the clock at which they were read


class SaveCheckpoint(AnyMessage, frozen=True):
    """Supervisor -> shard: persist a snapshot. A coordinator passes it on."""

    label: Name
    last: bool = False  # of this life: apply no push that it would not have


class CheckpointSaved(AnyMessage, frozen=True):
    """Shard -> supervisor: it is safe, or why not. A coordinator answers for all."""

    label: Name
    clock: Count
    error: Text | None = None
