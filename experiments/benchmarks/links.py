"""Share of a lone loop's steps that loops keep over slow links, beside torch's ways.

    python experiments/benchmarks/links.py [--only CASE] [--periods 3] [--torchft PYTHON] [--small]

The paper's speech net (41,777,152 parameters, 167 MB), batches of 64, plain SGD, hosts in network
namespaces at a switch. Two processors carry all hosts, so a loop *sleeps* 0.2 s in place of forward
and backward of each step; its optimizer, and all that is sent, are real.

    local_100mbit    2 loops at 100 Mbit/s each, their server at 1 Gbit/s; 64 steps per exchange
    local_1gbit_4    4 loops and their server at 1 Gbit/s each; 16 steps per exchange
    own_loop_1gbit   1 loop and its server at 1 Gbit/s; an exchange in each step
    blocking_1gbit   the same, and each step waits for a fetch that has its push
    straggler        4 loops, of which the last sleeps five times as long; a tiny net
    int4_100mbit_4   4 loops, and a server at 100 Mbit/s for all of them; 64 steps per exchange
    sparse_1gbit_4   4 loops and their server at 1 Gbit/s each; an exchange in each step
    ring             2 and 4 hosts at 1 Gbit/s that sum a vector as long as the net; no loop

    alone              sends nothing
    exchange           `Exchange`, numbers="bfloat16"
    exchange_float32   the same with numbers="float32"
    downpour           `DownpourSGD`: a push and a fetch in each step
    blocking           the same with blocking=True; `blocking_apart`: and each fetch begins when all
                       shards have applied the push, not shard by shard
    ddp, ddp_fp16      DistributedDataParallel over gloo; with its hook that sends float16
    ddp_power_sgd      with its hook of rank 4, in one bucket: callbacks of several come in another
                       order on each rank, and gloo then breaks off
    torch_local_sgd    torch's PostLocalSGDOptimizer: an average of the parameters per exchange
    torchft_diloco     torchft's DiLoCo, in the Python that --torchft names, which has it installed
    quorum, ssp        `Exchange` with the presets decoupled-diloco (a quorum of 3 of 4) and ssp (3)
    int4               the first of these, with 4 bits both ways
    bfloat16           `DownpourSGD` with bfloat16 both ways
    threshold, top_k   the same with steps of one size, for 0.1 to 0.2 % of the elements, and with
                       the largest 1 %; what has changed is fetched

Loops of `exchange` begin an equal share of an exchange apart (4 that push at the same moment would
wait for the server's card together). At 100 Mbit/s the last six run at once, each with a switch of
its own. Bytes are those that the interfaces of the loops' hosts have counted, both ways.
Not in `make bench`: only root may make network namespaces.

    CASE_share_NAME    of the steps per second of `alone`
    CASE_fewer_NAME    bytes per sample of `downpour`, over those of NAME
    own_loop_1gbit     seconds of a step, over those in which the link carries the net one way
    blocking_1gbit     seconds of a step of blocking_apart, over those of blocking
    NAME_over_ddp      steps per second of threshold or top_k, over those of ddp
    ring_over_ddp_N    of N hosts: seconds of gloo's all-reduce, as DDP uses it, over our ring's
"""

import argparse
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Final

import msgspec

from experiments.benchmarks.bare.paced_loop import (
    APART,
    BLOCKING,
    POWER_SGD,
    SERVED,
    SERVER,
    Moment,
    Setting,
)
from experiments.benchmarks.measuring import measurement
from experiments.benchmarks.measuring.workers import Program, Workers, module
from experiments.benchmarks.network.hosts import INTERFACE, Lan, obstacle, switched


N_PARAMETERS: Final = 41_777_152
BATCH_SIZE: Final = 64
SERVER_BITS: Final = 1e9
OURS: Final = ("exchange", "exchange_float32", "downpour", *BLOCKING, *SERVED)
LOCAL: Final = ("exchange", "exchange_float32", "int4", "torch_local_sgd", "torchft_diloco")
SPARSE: Final = ("threshold", "top_k")
HOOKS: Final = ("ddp_fp16", POWER_SGD)
RING: Final = "ring"
N_IN_RING: Final = (2, 4)
ASYNCHRONOUS: Final = (*OURS, "alone")  # in the first period less is under way than later
N_ALONE: Final = 16  # steps of a period of `alone`
N_STRAGGLING: Final = 5 * 64  # of the fast loops beside a slow one
_ROOT: Final = Path(__file__).parents[2]
_LIGHTHOUSE_PORT: Final = 29_510


@dataclass(frozen=True, kw_only=True)
class Case:
    n_loops: int
    bits_per_second: float  # of the card of each loop's host
    every: int  # steps between two exchanges of those that take local steps
    slower: int = 1  # times as long the last loop sleeps
    server_bits: float = SERVER_BITS  # per second, of its card
    heats: Sequence[Sequence[str]]  # contestants that run at the same time


_PEERS: Final = ("ddp", "ddp_fp16", "torch_local_sgd", "torchft_diloco")

CASES: Final[Mapping[str, Case]] = {
    "local_100mbit": Case(
        n_loops=2,
        bits_per_second=1e8,
        every=64,
        heats=[["alone"], ["exchange"], ["exchange_float32", "downpour", *_PEERS]],
    ),
    "local_1gbit_4": Case(
        n_loops=4,
        bits_per_second=1e9,
        every=16,
        heats=[[name] for name in ("alone", "exchange", "downpour", *_PEERS)],
    ),
    "own_loop_1gbit": Case(
        n_loops=1, bits_per_second=1e9, every=1, heats=[["alone"], ["downpour"]]
    ),
    "blocking_1gbit": Case(
        n_loops=1, bits_per_second=1e9, every=1, heats=[[name] for name in ("alone", *BLOCKING)]
    ),
    "straggler": Case(
        n_loops=4,
        bits_per_second=1e9,
        every=64,
        slower=5,
        heats=[[name] for name in ("alone", "quorum", "downpour", "ssp", "ddp")],
    ),
    "int4_100mbit_4": Case(
        n_loops=4, bits_per_second=1e9, every=64, server_bits=1e8, heats=[["alone"], ["int4"]]
    ),
    "sparse_1gbit_4": Case(
        n_loops=4,
        bits_per_second=1e9,
        every=1,
        heats=[[name] for name in ("alone", *SPARSE, "bfloat16", "downpour", "ddp", *HOOKS)],
    ),
}
SMALL: Final = {  # with a tiny net
    "step_seconds": 0.005,
    "only": ["local_100mbit", RING],
    "without": ["exchange_float32", "torch_local_sgd", "torchft_diloco", "ddp_fp16"],
}


@dataclass(frozen=True, kw_only=True)
class Result:
    periods: tuple[float, ...]  # seconds of each, of all loops
    n_steps: int  # of a period
    bytes_per_sample: float  # of one loop's interface, both ways
    processors: float  # that were busy meanwhile, on average

    @property
    def step(self) -> measurement.Spread:
        return measurement.Spread.of(self.periods, scale=1.0 / self.n_steps)


def run(name: str, case: Case, options: argparse.Namespace, folder: Path) -> Result:
    """Let one contestant train over a network of its own, or raise RuntimeError."""
    if name == "torchft_diloco" and options.torchft is None:
        raise RuntimeError("not installed: give --torchft")
    is_local = name in LOCAL
    n_steps = case.every if is_local else N_ALONE if name == "alone" else 1
    n_warm = 1 if name in ASYNCHRONOUS or not is_local else 0
    n_warm = 3 if name == POWER_SGD else n_warm  # its first steps send whole gradients
    exchange_seconds = case.every * options.step_seconds
    with switched(case.n_loops + 1, bits_per_second=case.bits_per_second) as lan:
        lan.limit(lan.hosts[0], bits_per_second=case.server_bits)
        setting = Setting(
            contestant=name,
            every=case.every,
            addresses=[host.address for host in lan.hosts],
            step_seconds=options.step_seconds,
            slower=case.slower,
            stagger_seconds=exchange_seconds / case.n_loops if is_local and name in OURS else 0.0,
            small=options.small or case.slower != 1,
        )
        with _server(setting, lan, folder, options) as address:
            setting = msgspec.structs.replace(setting, server=address)
            programs = _loops(setting, lan, options)
            with Workers(f"{name}-loops", programs, folder) as loops:
                with measurement.usage(lambda: 0.0) as used:
                    moments = loops.ask(
                        n_steps * (n_warm + options.periods)
                        if case.slower == 1
                        else N_STRAGGLING // (case.slower if name == "ddp" else 1)
                    )
                loops.signal(signal.SIGKILL)
    if case.slower != 1:
        return _unequal(moments, processors=used.others)
    return _result(moments, n_steps=n_steps, n_warm=n_warm, processors=used.others)


def _result(
    moments: Sequence[Sequence[Moment]], *, n_steps: int, n_warm: int, processors: float
) -> Result:
    ends = [of_loop[n_warm * n_steps :: n_steps] for of_loop in moments]
    n_samples = BATCH_SIZE * n_steps * (len(ends[0]) - 1)  # of each loop
    return Result(
        periods=tuple(b[0] - a[0] for each in ends for a, b in pairwise(each)),
        n_steps=n_steps,
        bytes_per_sample=fmean((each[-1][1] - each[0][1]) / n_samples for each in ends),
        processors=processors,
    )


def _unequal(moments: Sequence[Sequence[Moment]], *, processors: float) -> Result:
    """Return the result of loops of several speeds: of the steps that they took in a second."""
    end = min(each[-1][0] for each in moments)  # later, they would not wait for each other
    rates = [(sum(at <= end for at, _ in each) - 1) / (end - each[0][0]) for each in moments]
    n_bytes = sum(each[-1][1] - each[0][1] for each in moments)
    return Result(
        periods=(1.0 / fmean(rates),),
        n_steps=1,
        bytes_per_sample=n_bytes / (BATCH_SIZE * sum(len(each) - 1 for each in moments)),
        processors=processors,
    )


@contextmanager
def _server(setting: Setting, lan: Lan, folder: Path, options: argparse.Namespace) -> Iterator[str]:
    host, name = lan.hosts[0], setting.contestant
    if name in OURS:
        program = module("bare.paced_loop", setting, SERVER, host=host)
        with Workers(f"{name}-server", [program], folder) as server:
            (address,) = server.ask(None)
            yield address
    elif name == "torchft_diloco":
        at, n_loops = f"{host.address}:{_LIGHTHOUSE_PORT}", f"{len(lan.hosts) - 1}"
        command = [str(Path(options.torchft).with_name("torchft_lighthouse")), "--bind", at]
        command += ["--min_replicas", n_loops, "--join_timeout_ms", "1000"]
        program = Program(command=command, host=host)
        with Workers(f"{name}-lighthouse", [program], folder, serve=False) as lighthouse:
            yield f"http://{at}"
            lighthouse.signal(signal.SIGKILL)
    else:
        yield ""


def _loops(setting: Setting, lan: Lan, options: argparse.Namespace) -> list[Program]:
    environment = {"GLOO_SOCKET_IFNAME": INTERFACE, "PYTHONPATH": f"{_ROOT}"}
    programs = [
        module("bare.paced_loop", setting, rank, host=host, environment=environment)
        for rank, host in enumerate(lan.hosts[1:])
    ]
    if setting.contestant == "torchft_diloco":
        return [replace(one, command=[options.torchft, *one.command[1:]]) for one in programs]
    return programs


def results_of(
    case: Case, options: argparse.Namespace, folder: Path
) -> tuple[dict[str, Result], dict[str, str]]:
    results: dict[str, Result] = {}
    failures: dict[str, str] = {}

    def enter(name: str) -> None:
        begun = time.monotonic()
        try:
            results[name] = run(name, case, options, folder)
        except (RuntimeError, OSError) as error:
            failures[name] = str(error).strip().splitlines()[-1]
        found = failures.get(name) or f"{_cells(name, results)}"
        print(f"{time.monotonic() - begun:.0f} s  {name}  {found}", flush=True)

    for heat in case.heats:
        with ThreadPoolExecutor(len(heat) or 1) as threads:
            list(threads.map(enter, heat))
    return results, failures


def _ring(options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Let rings and gloo take turns; return how many times as long gloo takes."""
    n_numbers = 100_000 if options.small else N_PARAMETERS
    figures: dict[str, float] = {}
    for n in N_IN_RING:
        with switched(n, bits_per_second=SERVER_BITS) as lan, ExitStack() as stack:
            contestants = [
                stack.enter_context(_summing(kind, n_numbers, lan, folder))
                for kind in (RING, "gloo")
            ]
            for one in measurement.turns(contestants, n_rounds=options.periods):
                one.turn()
            ring, gloo = contestants
            figures[f"ring_over_ddp_{n}"] = gloo.step.median / ring.step.median
            rows = {one.name: one.row() for one in contestants}
            measurement.show(f"{RING}: {n} hosts sum {n_numbers:,} numbers", rows)
    return figures


def _summing(kind: str, n_numbers: int, lan: Lan, folder: Path) -> Workers:
    n, own = len(lan.hosts), folder / f"{kind}-{len(lan.hosts)}"
    own.mkdir()
    programs = [
        module(
            "bare.ring",
            *(kind, n_numbers, rank, n, host.address, own),
            host=host,
            environment={"GLOO_SOCKET_IFNAME": INTERFACE},
        )
        for rank, host in enumerate(lan.hosts)
    ]
    return Workers(kind, programs, own)


def _compared(name: str, results: Mapping[str, Result]) -> dict[str, float]:
    """Return the share of steps, and by how many times bytes are fewer."""
    found, one = {}, results[name]
    if "alone" in results:
        found["share"] = results["alone"].step.median / one.step.median
    if "downpour" in results and name != "alone":
        found["fewer"] = results["downpour"].bytes_per_sample / one.bytes_per_sample
    return found


def _cells(name: str, results: Mapping[str, Result]) -> dict[str, str]:
    result = results[name]
    return {
        "seconds": measurement.Spread.of(result.periods).show(2),
        "steps": f"{result.n_steps}",
        "bytes per sample": f"{result.bytes_per_sample:,.0f}",
        "busy processors": f"{result.processors:.1f}",
        **{word: f"{value:.3g}" for word, value in _compared(name, results).items()},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--only", action="append", choices=[*CASES, RING])
    parser.add_argument("--without", nargs="+", default=[], help="contestants to leave out")
    parser.add_argument("--periods", type=int, default=3, help="that are measured of each")
    parser.add_argument("--step-seconds", type=float, default=0.2, help="slept in each step")
    parser.add_argument("--torchft", help="a Python that has torchft installed")
    options = measurement.options_of(parser, arguments, small=SMALL)
    if (why := obstacle()) is not None:
        raise SystemExit(why)
    figures: dict[str, float] = {}
    for key in options.only or [*CASES, RING]:
        if key == RING:
            with TemporaryDirectory(prefix="links-") as folder:
                figures |= _ring(options, Path(folder))
            continue
        case = CASES[key]
        heats = [[name for name in heat if name not in options.without] for heat in case.heats]
        case = replace(case, heats=heats)
        with TemporaryDirectory(prefix="links-") as folder:
            results, failures = results_of(case, options, Path(folder))
        names = [name for heat in heats for name in heat]
        rows = {
            name: _cells(name, results) if name in results else {"seconds": failures[name]}
            for name in names
        }
        measurement.show(f"{key}: {case.n_loops} loops, steps that sleep", rows)
        figures |= _figures(key, case, results)
    measurement.conclude("links", figures)


def _figures(key: str, case: Case, results: Mapping[str, Result]) -> dict[str, float]:
    if key == "own_loop_1gbit":
        seconds, downpour = N_PARAMETERS * 32 / case.bits_per_second, results.get("downpour")
        return {} if downpour is None else {key: downpour.step.median / seconds}
    if key == "blocking_1gbit" and set(BLOCKING) <= results.keys():
        return {key: results[APART].step.median / results["blocking"].step.median}
    sparse = {name: results[name] for name in SPARSE if name in results and "ddp" in results}
    over = {
        f"{name}_over_ddp": results["ddp"].step.median / one.step.median
        for name, one in sparse.items()
    }
    return over | {
        f"{key}_{word}_{name}": value
        for name in results
        if name != "alone"
        for word, value in _compared(name, results).items()
    }


if __name__ == "__main__":
    main()
