"""How bytes for a decoder are found: by mutations of our own, or by atheris.

Each engine calls `try_` with bytes, so often as it is told to. Memory is bounded while
it does, so that what believes a size that it reads fails, and is found.
"""

import math
import os
import re
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Final, final

from experiments.fuzz.mutating import N_BYTES_MAX, TOKENS, Mutator, numbers
from experiments.fuzz.targets import Decoder
from experiments.fuzz.watching import Watch


MEMORY_BYTES_MAX: Final = 1 << 30
"""Beyond what the process has at the beginning."""

N_FINDINGS_MAX: Final = 8
N_SECONDS_GRACE: Final = 60
N_SECONDS_WALL: Final = 10**6
"""Of one execution, by the clock on the wall: a process that is stopped is no hang.

Not 0, for then atheris' own alarm ends the process as soon as a second begins.
"""

N_WORD_BYTES_MAX: Final = 64  # of libFuzzer
_WORD: Final = re.compile(rb"[A-Za-z_]{3,}")
N_BETWEEN_LOOKS: Final = 1024  # at the clock


@final
@dataclass(slots=True, kw_only=True)
class Trial:
    """One decoder under trial.

    Attributes:
        decoder: That.
        watch: Of what none may do.
        seconds_max: Of a processor; then that is all.
        n: Executions so far.
        n_taken: Of them, of bytes that were taken.
        findings: What went wrong, each with the bytes.
    """

    decoder: Decoder
    watch: Watch
    seconds_max: float = math.inf
    n: int = 0
    n_taken: int = 0
    findings: list[str] = field(default_factory=list)

    def try_(self, data: bytes) -> bool:
        """Let the decoder read; return whether it took that."""
        self.n += 1
        taken = False
        try:
            taken = self.decoder.takes(data)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            self._find(f"{type(error).__name__}: {error!s:.200}", data)
        if self.watch.seen:
            self._find("; ".join(self.watch.seen), data)
        self.watch.seen.clear()
        self.n_taken += taken
        return taken

    def end(self) -> None:
        """Let that be all, soon."""
        self.seconds_max = 0.0

    def is_over(self, begun: float) -> bool:
        """Return whether there is no point in going on, or no time.

        Args:
            begun: By the clock of this process's processor time.
        """
        if len(self.findings) >= N_FINDINGS_MAX:
            return True
        is_time = self.n % N_BETWEEN_LOOKS == 0
        return is_time and time.process_time() - begun > self.seconds_max

    def _find(self, what: str, data: bytes) -> None:
        self.findings.append(f"{what} by {data[:400]!r}")


def warm_up(trial: Trial) -> None:
    """Read what is legal, before anybody watches.

    What is imported and compiled then is imported and compiled once, whoever sends
    what: nothing of that kind is left for what comes later.
    """
    for data in trial.decoder.seeds:
        assert trial.try_(data), f"{trial.decoder.what}: {data!r} is no seed"


def bound_memory() -> None:
    """Let this process have no more than so much beyond what it has."""
    n_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    n_bytes = n_pages * resource.getpagesize() + MEMORY_BYTES_MAX
    resource.setrlimit(resource.RLIMIT_AS, (n_bytes, n_bytes))


def bound_time(seconds: float) -> None:
    """Let this process end if it takes much more: its decoder hangs then."""
    if math.isfinite(seconds):
        most = round(time.process_time() + seconds + N_SECONDS_GRACE)
        resource.setrlimit(resource.RLIMIT_CPU, (most, most))


def mutate(trial: Trial, *, n: int, seed: int) -> float:
    """Try so many mutations; return the seconds of processor that took."""
    mutator = Mutator(trial.decoder.seeds, draw=numbers(seed))
    begun = time.process_time()
    with trial.watch.on():
        while trial.n < n and not trial.is_over(begun):
            data = mutator.next()
            if trial.try_(data):
                mutator.accepted(data)
    return time.process_time() - begun


def fuzz(trial: Trial, folder: Path, *, n: int, seed: int, ended: Callable[[float], None]) -> None:
    """Let atheris try so many; it ends the process.

    Args:
        trial: What is tried.
        folder: For what it finds worth keeping, and has found before.
        n: Executions.
        seed: Of its chance.
        ended: Told how long it took.
    """
    atheris = import_module("atheris")  # not everybody has it
    folder.mkdir(parents=True, exist_ok=True)
    for index, data in enumerate(trial.decoder.seeds):
        (folder / f"seed-{index}").write_bytes(data)
    draw = numbers(seed)
    mutator = Mutator(trial.decoder.seeds, draw=draw)
    begun = time.process_time()

    def other(data: bytes, n_bytes_max: int, _seed: int) -> bytes:
        match draw(4):
            case 0:
                mutated: bytes = atheris.Mutate(data, n_bytes_max)
            case 1:
                mutated = mutator.of(data)
            case _:
                mutated = mutator.next()
        return mutated[:n_bytes_max]

    def once(data: bytes) -> None:
        with trial.watch.on():
            taken = trial.try_(data)
        if taken:
            mutator.accepted(data)
        if trial.n >= n or trial.is_over(begun):
            ended(time.process_time() - begun)
            sys.stdout.flush()
            os._exit(0)

    words = folder.with_suffix(".words")  # it cannot see what msgspec compares with
    words.write_text("".join(_words(trial.decoder.seeds)), encoding="ascii")
    options = [f"-runs={2 * n}", f"-seed={seed + 1}", f"-max_len={N_BYTES_MAX}"]
    options += [f"-dict={words}", "-keep_seed=1", "-len_control=0", "-verbosity=0"]
    options += ["-handle_term=0", f"-timeout={N_SECONDS_WALL}"]
    argv = [sys.argv[0], *options, str(folder)]
    atheris.Setup(argv, once, custom_mutator=other)
    atheris.Fuzz()


def _words(seeds: Iterable[bytes]) -> Iterator[str]:
    """Yield lines of libFuzzer's dictionary: our tokens, and the words of the seeds."""
    spoken = {word for data in seeds for word in _WORD.findall(data)}
    for word in (*TOKENS, *sorted(spoken)):
        if len(word) <= N_WORD_BYTES_MAX:
            yield '"' + "".join(f"\\x{byte:02x}" for byte in word) + '"\n'
