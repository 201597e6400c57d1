"""Every decoder, so many times: what it took, how fast, and what went wrong.

    python -m experiments.fuzz [NAME ...] [--executions 1e7] [--seconds 60] [--seed 1]
        [--engine atheris] [--keep FOLDER]

One process for each decoder, one after the other. A finding is an exception that is no
refusal, memory taken because bytes say so, or anything that `watching` forbids: code
run, unpickled or started. The exit code is 1 if there is one.

With a folder to keep, runs add up there (`tally`), and atheris goes on from what it has
found: a decoder that has had its executions by this engine, as it is now, is not tried
again. Each run begins from a seed of its own.
"""

import argparse
import json
import math
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import msgspec
from rich.console import Console
from rich.table import Table

from experiments.fuzz import engines, own, remote
from experiments.fuzz.engines import Trial
from experiments.fuzz.tally import Run, Tally, fingerprint
from experiments.fuzz.targets import Decoder, Open
from experiments.fuzz.watching import Watch


DECODERS: Final[Mapping[str, Open]] = {**remote.DECODERS, **own.DECODERS}
ENGINES: Final = ("own", "atheris")


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    if options.child is not None:
        _try(options)
        return
    tally = _tally(options)
    found: dict[str, list[Run]] = {}
    told: list[int] = []  # to end: the process that tries does so, too, and is heard
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    for name in options.names or DECODERS:
        if told:
            break
        run = _run(name, options)
        if run.n or run.findings:
            tally.add(run)
        found[name] = tally.runs(name, run.fingerprint) or [run]
        print(_line(run, of=found[name]), flush=True)
        for finding in run.findings:
            print(f"    {finding}", flush=True)
    _show(found)
    n_findings = sum(len(run.findings) for runs in found.values() for run in runs)
    figures = {
        "decoders": len(found),
        "executions_least": min(sum(run.n for run in runs) for runs in found.values()),
        "findings": n_findings,
    }
    print(json.dumps({"benchmark": "fuzz", "figures": figures}))
    if n_findings:
        raise SystemExit(1)


def _run(name: str, options: argparse.Namespace) -> Run:
    """Try one decoder in a process of its own."""
    with TemporaryDirectory(prefix="distbelief-fuzz-") as folder:
        words = [sys.executable, "-m", "experiments.fuzz", name, "--child", folder]
        words += ["--executions", str(options.executions), "--seed", str(options.seed)]
        words += ["--engine", options.engine, "--seconds", str(options.seconds)]
        words += [] if options.keep is None else ["--keep", str(options.keep)]
        said = subprocess.run(words, stdout=subprocess.PIPE, check=False)
        last = said.stdout.splitlines()[-1] if said.stdout else b""
        try:
            return msgspec.json.decode(last, type=Run)
        except msgspec.DecodeError:
            finding = f"its process ended with {said.returncode}"
            return Run(
                name=name,
                what="?",
                fingerprint="?",
                engine=options.engine,
                seed=options.seed,
                n=0,
                n_taken=0,
                seconds=0.0,
                findings=[finding],
            )


def _try(options: argparse.Namespace) -> None:
    """Be that process."""
    name = options.names[0]
    with DECODERS[name]() as decoder:
        _try_decoder(name, decoder, options)


def _try_decoder(name: str, decoder: Decoder, options: argparse.Namespace) -> None:
    code = fingerprint(decoder)
    before = _tally(options).runs(name, code)
    n = int(options.executions)
    n -= sum(run.n for run in before if run.engine == options.engine)
    seed = options.seed + len(before)
    warm = Trial(decoder=decoder, watch=Watch(hears=False))
    engines.warm_up(warm)
    trial = Trial(decoder=decoder, watch=Watch(), seconds_max=float(options.seconds))
    signal.signal(signal.SIGTERM, lambda *_: trial.end())

    def ended(seconds: float) -> None:
        run = Run(
            name=name,
            what=decoder.what,
            fingerprint=code,
            engine=options.engine,
            seed=seed,
            n=trial.n,
            n_taken=trial.n_taken,
            seconds=seconds,
            findings=trial.findings,
        )
        print(msgspec.json.encode(run).decode(), flush=True)

    engines.bound_memory()
    engines.bound_time(trial.seconds_max)
    if n <= 0:
        ended(0.0)
    elif options.engine == "atheris":
        folder = Path(options.child) if options.keep is None else options.keep / name
        engines.fuzz(trial, folder, n=n, seed=seed, ended=ended)
    else:
        ended(engines.mutate(trial, n=n, seed=seed))


def _tally(options: argparse.Namespace) -> Tally:
    return Tally(None if options.keep is None else options.keep / "tally.jsonl")


def _line(run: Run, *, of: Sequence[Run]) -> str:
    rate = run.n / run.seconds if run.seconds else 0.0
    return (
        f"{run.name:>8}  {run.n:>12,} executions of {sum(r.n for r in of):>12,}  "
        f"{rate:>9,.0f}/s  {len(run.findings)} findings"
    )


def _show(found: Mapping[str, Sequence[Run]]) -> None:
    table = Table(title="Decoders, as they are now")
    for column in ("decoder", "of"):
        table.add_column(column)
    for column in (*ENGINES, "taken", "per second", "findings"):
        table.add_column(column, justify="right")
    for name, runs in found.items():
        n, seconds = sum(run.n for run in runs), sum(run.seconds for run in runs)
        by = {e: sum(run.n for run in runs if run.engine == e) for e in ENGINES}
        table.add_row(
            name,
            runs[0].what,
            *(f"{by[engine]:,}" for engine in ENGINES),
            f"{sum(run.n_taken for run in runs) / max(1, n):.1%}",
            f"{n / seconds:,.0f}" if seconds else "",
            str(sum(len(run.findings) for run in runs)),
        )
    Console(width=110).print(table)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.fuzz", description=(__doc__ or "").split("\n", 1)[0]
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="all by default")
    parser.add_argument("--executions", type=float, default=1e6, help="of each")
    parser.add_argument("--seconds", type=float, default=math.inf, help="of a processor, for each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", choices=ENGINES, default="own")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="runs add up there")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in DECODERS]
    if unknown:
        parser.error(f"{unknown[0]!r} is no decoder: {', '.join(DECODERS)}")
    return options
