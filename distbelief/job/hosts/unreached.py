"""Roles of other machines that cannot reach a shard, or it not them: told once each.

A firewall that lets machines speak to the supervisor, and not to each other, says
nothing: roles join, and wait for a minute until they give up.
"""

from collections.abc import Iterable
from typing import Final, final

from distbelief.job.hosts.records import HostRecord
from distbelief.job.supervision.books import Books
from distbelief.job.supervision.membership import RoleRecord
from distbelief.roles import Action, Address, Seconds


WAITING_SECONDS: Final = 10.0
"""For a shard that is there, before a role has done anything."""

_WAITING: Final = "waiting for "


@final
class Unreached:
    """Of one job.

    Args:
        books: Of its supervisor.
    """

    def __init__(self, books: Books) -> None:
        self._books = books
        self._since: dict[tuple[Address, int], Seconds | None] = {}  # None: told

    def look(self, hosts: Iterable[HostRecord], now: Seconds) -> list[Action]:
        """Return what is to be told now; called now and then."""
        since, self._since = self._since, {}
        actions: list[Action] = []
        for host in hosts:
            for life in host.duties.items():
                record = self._books.members.get(life[0])
                shard = None if record is None else self._awaited(record)
                if record is None or shard is None:
                    continue
                begun = self._since[life] = since.get(life, now)
                if begun is None or now - begun < WAITING_SECONDS:
                    continue
                self._since[life] = None
                text = (
                    f"{record.label} on {host.offer.label} and "
                    f"{shard.label} do not reach each other: a firewall has to let all "
                    "machines of a job call each other, at any port"
                )
                actions.append(self._books.figures.tell(text, now, "warning"))
        return actions

    def _awaited(self, record: RoleRecord) -> RoleRecord | None:
        """Return the shard for which a role waits that has not done anything yet."""
        works = record.progressed or record.counters.get("samples", 0.0)
        if works or not (record.has_joined and record.state.startswith(_WAITING)):
            return None
        shard = self._books.members.get(Address(record.state.removeprefix(_WAITING)))
        is_there = shard is not None and shard.kind == "shard" and shard.has_joined
        return shard if is_there else None
