"""What no decoder may do, whatever it reads: run code, unpickle, start something.

Python tells of these (audit events, PEP 578), wherever they happen: also deep within a
library, and in spite of any `except`.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, final


FORBIDDEN: Final = frozenset(
    {
        *("pickle.find_class", "marshal.loads", "marshal.load", "code.__new__"),
        *("exec", "compile", "import", "cpython.run_command", "ctypes.dlopen"),
        *("os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn"),
        *("subprocess.Popen", "socket.connect", "os.remove", "os.rename"),
    }
)


@final
class Watch:
    """Takes note of what is forbidden while somebody is within `on`.

    There can be no end of an audit hook: have one watch for a process.

    Args:
        hears: Whether there is one; else nothing is seen.
    """

    def __init__(self, *, hears: bool = True) -> None:
        self.seen: list[str] = []
        self._is_on = False
        if hears:
            sys.addaudithook(self._hear)

    @contextmanager
    def on(self) -> Iterator[None]:
        """Look, from here to there."""
        self._is_on = True
        try:
            yield
        finally:
            self._is_on = False

    def _hear(self, event: str, arguments: tuple[object, ...]) -> None:
        if self._is_on and event in FORBIDDEN:
            self.seen.append(f"{event}{arguments!r:.200}")
