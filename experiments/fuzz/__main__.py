"""Every decoder on mutated bytes: how many it accepted, how fast, and what went wrong.

    python -m experiments.fuzz [NAME ...] [--executions 1e7] [--seconds 60] [--seed 1]

One process for each decoder, one after the other. A finding is an exception that is no
refusal, memory taken because bytes say so, or code that runs, is unpickled or is started.
The exit code is 1 if there is one.
"""

import argparse
import math
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from experiments.benchmarks.measuring import measurement
from experiments.fuzz.decoders import DECODERS, Decoder
from experiments.fuzz.inputs import Mutator, numbers


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


class Watch:
    """Notes forbidden audit events within `on`.

    An audit hook cannot be removed: have one watch for a process.
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


@dataclass(slots=True, kw_only=True)
class Trial:
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
            assert self.execute(data), f"{data!r} is no seed"
        self.n = self.n_accepted = 0

    def mutate(self, *, n: int, seconds: float, seed: int) -> None:
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


@dataclass(frozen=True, kw_only=True)
class Result:
    n: int = 0
    n_accepted: int = 0
    seconds: float = 0.0
    findings: list[str]


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    if options.child:
        _try(options)
        return
    found = {name: _run(name, options) for name in options.names or DECODERS}
    rows = {
        name: {
            "executions": f"{result.n:,}",
            "accepted": f"{result.n_accepted / max(1, result.n):.1%}",
            "per second": f"{result.n / result.seconds if result.seconds else 0.0:,.0f}",
            "findings": f"{len(result.findings)}",
        }
        for name, result in found.items()
    }
    measurement.show("decoders", rows)
    n_findings = sum(len(result.findings) for result in found.values())
    least = min(result.n for result in found.values())
    figures = {"decoders": len(found), "executions_least": least, "findings": n_findings}
    measurement.conclude("fuzz", figures)
    if n_findings:
        raise SystemExit(1)


def _run(name: str, options: argparse.Namespace) -> Result:
    words = [sys.executable, "-m", "experiments.fuzz", name, "--child"]
    words += [f"--{key}={getattr(options, key)}" for key in ("executions", "seconds", "seed")]
    process = subprocess.run(words, stdout=subprocess.PIPE, check=False)
    try:
        result = msgspec.json.decode(process.stdout, type=Result)
    except msgspec.DecodeError:
        result = Result(findings=[f"its process ended with {process.returncode}"])
    print(f"{name:>8}  {result.n:>12,} executions  {len(result.findings)} findings", flush=True)
    for finding in result.findings:
        print(f"    {finding}", flush=True)
    return result


def _try(options: argparse.Namespace) -> None:
    with DECODERS[options.names[0]]() as decoder:
        Trial(decoder=decoder, watch=Watch(hears=False)).warm_up()
        trial = Trial(decoder=decoder, watch=Watch())
        bound_process(options.seconds)
        trial.mutate(n=int(options.executions), seconds=options.seconds, seed=options.seed)
        result = Result(
            n=trial.n, n_accepted=trial.n_accepted, seconds=trial.seconds, findings=trial.findings
        )
        print(msgspec.json.encode(result).decode(), flush=True)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.fuzz", description=(__doc__ or "").split("\n", 1)[0]
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="all by default")
    parser.add_argument("--executions", type=float, default=1e6, help="of each")
    parser.add_argument("--seconds", type=float, default=math.inf, help="of a processor, for each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in DECODERS]
    if unknown:
        parser.error(f"{unknown[0]!r} is no decoder: {', '.join(DECODERS)}")
    return options


if __name__ == "__main__":
    main()
