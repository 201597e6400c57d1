"""What happens in a job, as log events with fields; `WORDS` is the one place that words them."""

from collections.abc import Mapping
from typing import Final, Literal

import msgspec

from distbelief.core import formatting


Level = Literal["info", "warning", "error"]

WORDS: Final[Mapping[str, tuple[Level, str]]] = {
    # --- roles, as the supervisor sees them
    "role_back": ("info", "{role} is back after {seconds:.1f} s"),
    "role_died_at_end": ("warning", "{role} {reason} while it was stopping"),
    "role_failed": ("error", "{role} failed: {reason}"),
    "role_killed": ("warning", "{role} takes too long for {detail}: killed"),
    "role_left_out": (
        "error",
        "{role} {reason}; left out after {n} restarts, none of which lasted {limit:g} s",
    ),
    "role_restarted": ("warning", "{role} {reason}: restarting it"),
    "role_silent": (
        "warning",
        "{role} silent for {seconds:.1f} s; counts as dead after {limit:g} s",
    ),
    "role_waits": ("info", "{role} waits for a host with free cores (distbelief join)"),
    "role_warns": ("warning", "{role}: {reason}"),
    "group_left_out": ("error", "{roles} left out with {role}: they are of one model"),
    "guest_away": ("info", "{role} silent for {seconds:.1f} s: going on without it"),
    # --- shards
    "shard_restored": ("warning", "{role} {reason}: restarting it from {detail}"),
    "shard_restored_with_loss": (
        "warning",
        (
            "{role} {reason}: restarting it from {detail}; "
            "about {n:,} acknowledged pushes will be lost"
        ),
    ),
    "run_restored": (
        "warning",
        "{role} {reason}: restarting it from {detail}; the run goes on from there",
    ),
    "backup_takes_over": (
        "warning",
        "{role} {reason}: {other} takes over, nothing acknowledged is lost; restarting {role}",
    ),
    "primary_alone": (
        "warning",
        "{role} {reason}: {other} goes on alone, nothing acknowledged is lost; restarting {role}",
    ),
    "other_copy_dead": ("warning", "{role} {reason}: restarting it; {other} is dead too"),
    "other_copy_silent": (
        "warning",
        "{role} {reason}: restarting it; {other}, which is in sync, is silent",
    ),
    "backup_in_sync": ("info", "{role} is in sync: it holds every acknowledged push"),
    "backup_unresponsive": (
        "info",
        "{other} does not answer {role}, which continues without a backup",
    ),
    # --- the job
    "stalled": ("warning", "no step in the last {seconds:.0f} s ({detail})"),
    "stopping": ("info", "{reason}: stopping"),
    "not_saved": ("error", "{role} could not save its checkpoint: {reason}"),
    "ended_early": (
        "warning",
        "the coordinator ended early: the run resumes from its last checkpoint",
    ),
    "no_answer": ("warning", "{roles} did not answer in time: ending without it"),
    # --- hosts, as the supervisor sees them
    "hosts_awaited": ("info", "waiting for hosts: {n}"),
    "hosts_missing": ("warning", "{n} of {total} hosts came within {limit:.0f} s: beginning"),
    "host_joined": ("info", "{host} has joined: {n} cores, {detail}"),
    "host_ready": ("info", "{host} is ready: {detail}"),
    "host_given": ("info", "{roles}: on {host}"),
    "host_lost": ("warning", "{host} {reason}"),
    "host_lost_with": ("warning", "{host} {reason}: {roles} lost with it"),
    "host_leaving": ("info", "{host} is leaving"),
    "host_left": ("info", "{host} has left"),
    "host_blocked": ("warning", "{host} gets no more roles: {n} died there too soon"),
    # --- a host, as its own user sees it
    "taken": ("info", "run {detail}"),
    "prepared": ("info", "ready"),
    "refused": ("error", "{reason}"),
    "supervisor_silent": (
        "warning",
        (
            "no message from the supervisor for {seconds:.1f} s: all roles ended; "
            "waiting for it to return"
        ),
    ),
    "supervisor_gone": (
        "warning",
        "{reason}: the job is over; this host does not know how it ended",
    ),
    "leaving": ("info", "{reason}: leaving once the roles of this host have been moved"),
    "released": ("info", "released: {reason}"),
    "released_for_now": ("info", "offering again: {reason}"),
    "rejected": ("warning", "rejected: {reason}; waiting for another job"),
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
        return formatting.without_control_characters(WORDS[self.what][1].format(**fields))


def _label(role: str) -> str:
    return role.replace("-", " ")
