"""One decoder under trial: mutated bytes, bounded memory, and a watch for what none may do.

Python tells of code that runs, is unpickled or is started (audit events, PEP 578), also deep
within a library, and in spite of any `except`.
"""

import math
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, final

from experiments.fuzz.decoders import Decoder
from experiments.fuzz.mutating import Mutator, numbers


FORBIDDEN: Final = frozenset(
    {
        *("pickle.find_class", "marshal.loads", "marshal.load", "code.__new__"),
        *("exec", "compile", "import", "cpython.run_command", "ctypes.dlopen"),
        *("os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn"),
        *("subprocess.Popen", "socket.connect", "os.remove", "os.rename"),
    }
)
MEMORY_BYTES_MAX: Final = 1 << 30  # beyond what the process has at the beginning
N_FINDINGS_MAX: Final = 8
SECONDS_GRACE: Final = 60
N_BETWEEN_LOOKS: Final = 1024  # executions between two looks at the clock


@final
class Watch:
    """Notes forbidden audit events within `on`.

    An audit hook cannot be removed: have one watch for a process.

    Args:
        hears: Whether to install the hook; otherwise nothing is seen.
    """

    def __init__(self, *, hears: bool = True) -> None:
        self.seen: list[str] = []
        self._is_on = False
        if hears:
            sys.addaudithook(self._hear)

    @contextmanager
    def on(self) -> Iterator[None]:
        self._is_on = True
        try:
            yield
        finally:
            self._is_on = False

    def _hear(self, event: str, arguments: tuple[object, ...]) -> None:
        if self._is_on and event in FORBIDDEN:
            self.seen.append(f"{event}{arguments!r:.200}")


@final
@dataclass(slots=True, kw_only=True)
class Trial:
    """One decoder under trial."""

    decoder: Decoder
    watch: Watch
    n: int = 0  # executions so far
    n_accepted: int = 0  # of them, with bytes that were accepted
    seconds: float = 0.0  # of a processor
    findings: list[str] = field(default_factory=list)  # each with the bytes

    def execute(self, data: bytes) -> bool:
        self.n += 1
        accepted = False
        try:
            accepted = self.decoder.accepts(data)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            self._find(f"{type(error).__name__}: {error!s:.200}", data)
        if self.watch.seen:
            self._find("; ".join(self.watch.seen), data)
        self.watch.seen.clear()
        self.n_accepted += accepted
        return accepted

    def warm_up(self) -> None:
        # What is imported and compiled for legal bytes is so once, before anybody watches.
        for data in self.decoder.seeds:
            assert self.execute(data), f"{self.decoder.what}: {data!r} is no seed"
        self.n = self.n_accepted = 0

    def mutate(self, *, n: int, seconds: float, seed: int) -> None:
        """Try `n` mutations, or for so many seconds of processor time."""
        mutator = Mutator(self.decoder.seeds, draw=numbers(seed))
        begun = time.process_time()
        with self.watch.on():
            while self.n < n and len(self.findings) < N_FINDINGS_MAX:
                data = mutator.next()
                if self.execute(data):
                    mutator.accepted(data)
                if self.n % N_BETWEEN_LOOKS == 0 and time.process_time() - begun > seconds:
                    break
        self.seconds = time.process_time() - begun

    def _find(self, what: str, data: bytes) -> None:
        self.findings.append(f"{what} by {data[:400]!r}")


def bound_process(seconds: float) -> None:
    """Bound memory, so that trusting a size that is read fails, and time: a hang is a finding."""
    n_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    n_bytes = n_pages * resource.getpagesize() + MEMORY_BYTES_MAX
    resource.setrlimit(resource.RLIMIT_AS, (n_bytes, n_bytes))
    if math.isfinite(seconds):
        most = round(time.process_time() + seconds + SECONDS_GRACE)
        resource.setrlimit(resource.RLIMIT_CPU, (most, most))
