"""Every decoder, so many times: what it took, how fast, and what went wrong.

    python -m experiments.fuzz [NAME ...] [--executions 1e7] [--seconds 60] [--seed 1]
        [--engine atheris]

One process for each decoder, one after the other. A finding is an exception that is no
refusal, memory taken because bytes say so, or anything that `watching` forbids: code
run, unpickled or started. The exit code is 1 if there is one.
"""

import argparse
import json
import math
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
from experiments.fuzz.targets import Open
from experiments.fuzz.watching import Watch


DECODERS: Final[Mapping[str, Open]] = {**remote.DECODERS, **own.DECODERS}


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one decoder."""

    name: str
    what: str
    n: int
    n_taken: int
    seconds: float
    findings: list[str]


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    if options.child is not None:
        _try(options)
        return
    verdicts = []
    for name in options.names or DECODERS:
        verdict = _run(name, options)
        verdicts.append(verdict)
        print(_line(verdict), flush=True)
        for finding in verdict.findings:
            print(f"    {finding}", flush=True)
    _show(verdicts, engine=options.engine)
    n_findings = sum(len(verdict.findings) for verdict in verdicts)
    figures = {
        "decoders": len(verdicts),
        "executions_least": min(verdict.n for verdict in verdicts),
        "findings": n_findings,
    }
    print(json.dumps({"benchmark": "fuzz", "figures": figures}))
    if n_findings:
        raise SystemExit(1)


def _run(name: str, options: argparse.Namespace) -> Verdict:
    """Try one decoder in a process of its own."""
    with TemporaryDirectory(prefix="distbelief-fuzz-") as folder:
        words = [sys.executable, "-m", "experiments.fuzz", name, "--child", folder]
        words += ["--executions", str(options.executions), "--seed", str(options.seed)]
        words += ["--engine", options.engine, "--seconds", str(options.seconds)]
        said = subprocess.run(words, stdout=subprocess.PIPE, check=False)
        last = said.stdout.splitlines()[-1] if said.stdout else b""
        try:
            return msgspec.json.decode(last, type=Verdict)
        except msgspec.DecodeError:
            finding = f"its process ended with {said.returncode}"
            return Verdict(
                name=name, what="?", n=0, n_taken=0, seconds=0.0, findings=[finding]
            )


def _try(options: argparse.Namespace) -> None:
    """Be that process."""
    name, n = options.names[0], int(options.executions)
    with DECODERS[name]() as decoder:
        trial = Trial(
            decoder=decoder, watch=Watch(), seconds_max=float(options.seconds)
        )

        def ended(seconds: float) -> None:
            verdict = Verdict(
                name=name,
                what=decoder.what,
                n=trial.n,
                n_taken=trial.n_taken,
                seconds=seconds,
                findings=trial.findings,
            )
            print(msgspec.json.encode(verdict).decode(), flush=True)

        engines.bound_memory()
        if options.engine == "atheris":
            folder = Path(options.child)
            engines.fuzz(trial, folder, n=n, seed=options.seed, ended=ended)
        else:
            ended(engines.mutate(trial, n=n, seed=options.seed))


def _line(verdict: Verdict) -> str:
    rate = verdict.n / verdict.seconds if verdict.seconds else 0.0
    return (
        f"{verdict.name:>8}  {verdict.n:>12,} executions  {rate:>9,.0f}/s  "
        f"{len(verdict.findings)} findings"
    )


def _show(verdicts: Sequence[Verdict], *, engine: str) -> None:
    table = Table(title=f"Decoders under {engine}")
    for column in ("decoder", "of"):
        table.add_column(column)
    for column in ("executions", "taken", "per second of processor", "findings"):
        table.add_column(column, justify="right")
    for verdict in verdicts:
        table.add_row(
            verdict.name,
            verdict.what,
            f"{verdict.n:,}",
            f"{verdict.n_taken / max(1, verdict.n):.1%}",
            f"{verdict.n / verdict.seconds:,.0f}" if verdict.seconds else "",
            str(len(verdict.findings)),
        )
    Console(width=110).print(table)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.fuzz",
        description=(__doc__ or "").split("\n", 1)[0],
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="all by default")
    parser.add_argument("--executions", type=float, default=1e6, help="of each")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="of a processor, for each"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", choices=("own", "atheris"), default="own")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in DECODERS]
    if unknown:
        parser.error(f"{unknown[0]!r} is no decoder: {', '.join(DECODERS)}")
    return options
