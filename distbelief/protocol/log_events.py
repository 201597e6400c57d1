"""What happens in a job, as log events with fields; `WORDS` is the one place that words them."""

from collections.abc import Mapping
from typing import Final, Literal

import msgspec

from distbelief.core import formatting


Level = Literal["info", "warning", "error"]

_TEXTS: Final[Mapping[Level, Mapping[str, str]]] = {
    "info": {
        "role_back": "{role} is back after {seconds:.1f} s",
        "role_waits": "{role} waits for a host with free cores (distbelief join)",
        "guest_away": "{role} {reason}: going on without it",
        "backup_in_sync": "{role} is in sync: it holds every acknowledged push",
        "backup_unresponsive": "{other} does not answer {role}, which continues without a backup",
        "stopping": "{reason}: stopping",
        "hosts_awaited": "waiting for hosts: {n}",
        "host_joined": "{host} has joined: {n} cores, {detail}",
        "host_ready": "{host} is ready: {detail}",
        "replica_formed": "{role} {detail}",
        "host_given": "{roles}: on {host}",
        "host_leaving": "{host} is leaving",
        "host_left": "{host} has left",
        "taken": "run {detail}",
        "prepared": "ready",
        "leaving": "{reason}: leaving once the roles of this host have been moved",
        "released": "released: {reason}",
        "released_for_now": "offering again: {reason}",
    },
    "warning": {
        "role_died_at_end": "{role} {reason} while it was stopping",
        "role_killed": "{role} takes too long for {detail}: killed",
        "role_restarted": "{role} {reason}: restarting it",
        "role_silent": "{role} silent for {seconds:.1f} s; counts as dead after {limit:g} s",
        "role_warns": "{role}: {reason}",
        "shard_restored": "{role} {reason}: restarting it from {detail}",
        "shard_restored_with_loss": (
            "{role} {reason}: restarting it from {detail}; about {n:,} acknowledged pushes will be "
            "lost"
        ),
        "run_restored": "{role} {reason}: restarting it from {detail}; the run goes on from there",
        "backup_takes_over": (
            "{role} {reason}: {other} takes over, nothing acknowledged is lost; restarting {role}"
        ),
        "primary_alone": (
            "{role} {reason}: {other} goes on alone, nothing acknowledged is lost; restarting "
            "{role}"
        ),
        "other_copy_dead": "{role} {reason}: restarting it; {other} is dead too",
        "other_copy_silent": "{role} {reason}: restarting it; {other}, which is in sync, is silent",
        "stalled": "no step in the last {seconds:.0f} s ({detail})",
        "ended_early": "the coordinator ended early: the run resumes from its last checkpoint",
        "no_answer": "{roles} did not answer in time: ending without it",
        "hosts_missing": "{n} of {total} hosts came within {limit:.0f} s: beginning",
        "cut_off": "all {n} hosts are silent: waiting for them for {limit:.0f} s at most",
        "host_lost": "{host} {reason}",
        "host_lost_with": "{host} {reason}: {roles} lost with it",
        "copies_together": "{role} and {other} are on one host: there is no other",
        "host_blocked": "{host} gets no more roles: {n} died there too soon",
        "supervisor_silent": (
            "no message from the supervisor for {seconds:.1f} s: all roles ended; waiting for it "
            "to return"
        ),
        "supervisor_gone": "{reason}: the job is over; this host does not know how it ended",
        "rejected": "rejected: {reason}; waiting for another job",
    },
    "error": {
        "role_failed": "{role} failed: {reason}",
        "role_left_out": (
            "{role} {reason}; left out after {n} restarts, none of which lasted {limit:g} s"
        ),
        "pieces_missing": "no host that takes part has {detail}: going on with the others",
        "group_left_out": "{roles} left out with {role}: they are of one model",
        "not_saved": "{role} could not save its checkpoint: {reason}",
        "not_kept": "the best values so far could not be saved: {reason}",
        "refused": "{reason}",
    },
}
WORDS: Final[Mapping[str, tuple[Level, str]]] = {
    what: (level, text) for level, texts in _TEXTS.items() for what, text in texts.items()
}


class LogEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """Something that happened. Its level and its words follow from `what`, a key of `WORDS`."""

    what: str
    role: str = ""
    incarnation: int = 0  # of the role
    roles: tuple[str, ...] = ()
    other: str = ""  # another role: the other copy of a shard
    host: str = ""
    seconds: float = 0.0
    limit: float = 0.0  # a time that was exceeded, or will be
    n: int = 0
    total: int = 0
    reason: str = ""
    detail: str = ""

    @property
    def level(self) -> Level:
        return WORDS[self.what][0]

    @property
    def text(self) -> str:
        """Return the event in words, for logs and screens."""
        fields = msgspec.structs.asdict(self) | {
            "role": _label(self.role),
            "other": _label(self.other),
            "roles": ", ".join(map(_label, self.roles)),
        }
        # Names and reasons may be text of other processes.
        return formatting.plain(WORDS[self.what][1].format(**fields))


def _label(role: str) -> str:
    return role.replace("-", " ")
