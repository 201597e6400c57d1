"""Speakers: which key may speak as which role, by the allow-list and by introduction.

    key of          may speak as
    worker          worker-...
    server          supervisor, shard-...

Rules:

* A name belongs to the key that it was introduced with (`introduce`), else to the first
  that spoke under it: nobody goes on under the name of somebody else.
* Beside the allow-list, which is read again when it has changed, the key that this side
  was told of by its own user (a server's address) is trusted as a server.
* A side that cannot read its allow-list lets in nobody.
"""

from collections.abc import Callable
from typing import Final, final

from distbelief.errors import DistBeliefError
from distbelief.transport.key_files import KeyFiles


SPEAKS_AS: Final[dict[str, tuple[str, ...]]] = {
    "worker": ("worker-",),
    "server": ("supervisor", "shard-"),
}
"""Roles of the allow-list, and the names of roles; those with a dash are beginnings."""

N_NAMES_MAX: Final = 1024
"""Under which one key has spoken; the oldest are forgotten beyond that."""


@final
class Speakers:
    """Of one transport.

    Args:
        files: With the allow-list.
        trusted: Keys, and their roles, that are not on it.
        warn: Told why the list cannot be read, once until it changes.
    """

    def __init__(
        self,
        files: KeyFiles,
        *,
        trusted: dict[str, tuple[str, ...]],
        warn: Callable[[str], None],
    ) -> None:
        self._files = files
        self._trusted = trusted
        self._warn = warn
        self._read_at: tuple[int, int] | None = None
        self._roles: dict[str, tuple[str, ...]] = {}
        self._names: dict[str, dict[str, None]] = {}  # of each key, oldest first
        self._owners: dict[str, str] = {}  # of each name, its key

    @property
    def keys(self) -> frozenset[str]:
        """Every key that may open a connection."""
        return frozenset(self._roles)

    def refresh(self) -> bool:
        """Read the allow-list again if it has changed; return whether it had."""
        changed_at = self._files.changed_at
        if changed_at == self._read_at:
            return False
        self._read_at = changed_at
        roles = dict(self._trusted)
        try:
            for entry in self._files.allowed():
                both = (*roles.get(entry.key, ()), *entry.roles)
                roles[entry.key] = tuple(dict.fromkeys(both))
        except DistBeliefError as error:
            self._warn(f"{error}. Until then nobody is let in by it")
        self._roles = roles
        for key in self._names.keys() - roles.keys():
            self._forget(key)
        return True

    def may_speak(self, key: str, name: str) -> bool:
        """Return whether what this key's holder sends may name this sender."""
        owner = self._owners.get(name)
        if owner is not None:
            return owner == key
        if not self._is_of_roles(key, name):
            return False
        self._give(name, key)
        return True

    def introduce(self, name: str, key: str) -> bool:
        """Give this name to this key, if its roles allow that."""
        if not self._is_of_roles(key, name):
            return False
        if self._owners.get(name) != key:
            self._take_away(name)
            self._give(name, key)
        return True

    def _is_of_roles(self, key: str, name: str) -> bool:
        beginnings = (b for role in self._roles.get(key, ()) for b in SPEAKS_AS[role])
        return any(
            name.startswith(b) if b.endswith("-") else name == b for b in beginnings
        )

    def _give(self, name: str, key: str) -> None:
        names = self._names.setdefault(key, {})
        if len(names) >= N_NAMES_MAX:
            self._take_away(next(iter(names)))
        names[name] = None
        self._owners[name] = key

    def _take_away(self, name: str) -> None:
        owner = self._owners.pop(name, None)
        if owner is not None:
            del self._names[owner][name]

    def _forget(self, key: str) -> None:
        for name in self._names.pop(key):
            del self._owners[name]
