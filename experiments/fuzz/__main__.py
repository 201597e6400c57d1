"""Every decoder on mutated bytes: how many it accepted, how fast, and what went wrong.

    python -m experiments.fuzz [NAME ...] [--executions 1e7] [--seconds 60] [--seed 1]

One process for each decoder, one after the other. A finding is an exception that is no
refusal, memory taken because bytes say so, or code that runs, is unpickled or is started.
The exit code is 1 if there is one.
"""

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import msgspec
from rich.console import Console
from rich.table import Table

from experiments.fuzz.decoders import DECODERS
from experiments.fuzz.trial import Trial, Watch, bound_process


@final
@dataclass(frozen=True, kw_only=True)
class Result:
    """What one process found."""

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
    table = Table("decoder", "executions", "accepted", "per second", "findings")
    for name, result in found.items():
        rate = result.n / result.seconds if result.seconds else 0.0
        accepted = f"{result.n_accepted / max(1, result.n):.1%}"
        table.add_row(name, f"{result.n:,}", accepted, f"{rate:,.0f}", str(len(result.findings)))
    Console(width=110).print(table)
    figures = {
        "decoders": len(found),
        "executions_least": min(result.n for result in found.values()),
        "findings": sum(len(result.findings) for result in found.values()),
    }
    print(json.dumps({"benchmark": "fuzz", "figures": figures}))
    if figures["findings"]:
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
