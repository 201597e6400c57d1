"""Speakers: which key may speak as which role, by the allow-list and by introduction.

    key of          may speak as
    worker          worker-...
    server          supervisor, shard-...
    host            host-..., and the roles that the supervisor has placed there
    (the job's)     supervisor, and all its roles

Rules:

* A name belongs to the key that it was introduced with (`introduce`), else to the first
  that spoke under it: nobody goes on under the name of somebody else.
* Beside the allow-list, which is read again when it has changed, the key that this side
  was told of by its own user (a server's address) is trusted as a server.
* A member of a job believes its supervisor: whoever that introduces has the name, and
  is let in, though the allow-list does not have it; but not who was taken from that.
* A job has no workers: whose key is allowed as nothing else is not let in, and so is
  told at once. Inside, nobody would listen to it, nor say so.
* A side that cannot read its allow-list lets in nobody.
"""

from collections.abc import Callable
from typing import Final, final

from distbelief.errors import DistBeliefError
from distbelief.roles import SUPERVISOR
from distbelief.transport.key_files import KeyFiles


SPEAKS_AS: Final[dict[str, tuple[str, ...]]] = {
    "worker": ("worker-",),
    "server": ("supervisor", "shard-"),
    "host": ("host-",),
    "job": ("supervisor", "host-", "shard-", "replica-", "evaluator", "evaluator.", "coordinator"),
    "guest": (),
}
"""Roles of keys, and the names of roles; those with a dash or dot are beginnings."""

N_NAMES_MAX: Final = 8192
"""Under which one key has spoken; the oldest are forgotten beyond that."""


@final
class Speakers:
    """Of one transport.

    Args:
        files: With the allow-list.
        trusted: Keys, and their roles, that are not on it.
        warn: Told why the list cannot be read, once until it changes.
        is_of_job: Whether this is the transport of a role of a job.
        believes: Whether whoever is introduced has the name.
    """

    def __init__(
        self,
        files: KeyFiles,
        *,
        trusted: dict[str, tuple[str, ...]],
        warn: Callable[[str], None],
        is_of_job: bool = False,
        believes: bool = False,
    ) -> None:
        self.is_of_job = is_of_job
        self.believes = believes
        self._useless = ("worker",) if is_of_job else ()
        self._files = files
        self._trusted = trusted
        self._warn = warn
        self._read_at: tuple[int, int] | None = None
        self._roles: dict[str, tuple[str, ...]] = {}
        self._listed: set[str] = set()  # keys that are on the list, or were
        self._revoked: set[str] = set()  # of these, who were, when it was last read
        self._names: dict[str, dict[str, None]] = {}  # of each key, oldest first
        self._owners: dict[str, str] = {}  # of each name, its key

    @property
    def keys(self) -> frozenset[str]:
        """Every key that may open a connection."""
        return frozenset(key for key in (*self._roles, *self._names) if self.admit(key))

    def admit(self, key: str) -> bool:
        """Return whether this key may open a connection."""
        believed = self.believes and key in self._names and key not in self._revoked
        return believed or key in self._roles

    def refresh(self) -> bool:
        """Read the allow-list again if it has changed; return whether it had."""
        changed_at = self._files.changed_at
        if changed_at == self._read_at:
            return False
        self._read_at = changed_at
        roles = dict(self._trusted)
        try:
            for entry in self._files.allowed():
                useful = tuple(r for r in entry.roles if r not in self._useless)
                both = (*roles.get(entry.key, ()), *useful)
                if both:
                    roles[entry.key] = tuple(dict.fromkeys(both))
        except DistBeliefError as error:
            self._warn(f"{error}. Until then nobody is let in by it")
        else:
            self._listed |= roles.keys()
            self._revoked = self._listed - roles.keys()
        self._roles = roles
        for key in self._names.keys() - roles.keys():
            if not self.believes:
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
        """Give this name to this key, if its roles allow that, or it has it already."""
        if self._owners.get(name) == key:
            return True
        believed = self.believes and name != SUPERVISOR
        if not (believed or self._is_of_roles(key, name)):
            return False
        self._take_away(name)
        self._give(name, key)
        return True

    def entrust(self, name: str, to: str, *, own: str) -> None:
        """Give this name to the key that has the name `to`; else to one's own."""
        key = self._owners.get(to, own)
        if self._owners.get(name) != key:
            self._take_away(name)
            self._give(name, key)

    def _is_of_roles(self, key: str, name: str) -> bool:
        beginnings = (b for role in self._roles.get(key, ()) for b in SPEAKS_AS[role])
        return any(name.startswith(b) if b[-1] in "-." else name == b for b in beginnings)

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
