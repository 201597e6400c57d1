"""A job on machines that a Ray cluster lends, beside the same on this one alone.

    python experiments/benchmarks/ray_hosts.py [--rounds 2] [--steps 400] [--job FILE]
        [--small]

Not in `make bench`: it needs the extra `ray`, a large package.

The cluster is made here: a head without cores, and nodes of a core each. Of a job's two replicas
`local` starts both on this machine; on `ray` one of them is at a node. Turns alternate.

    start_over_local         seconds from the command to the first samples, over local
    throughput_over_local    samples a second while it trains, over local
    ended_well               1 if a job goes on, and ends with exit code 0, though the
                             node of its replica is removed in mid-run
    away_seconds             until that replica trains again, at another node
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Final, cast

from distbelief.job.run.directory import RunDirectory
from experiments.benchmarks.measuring import measurement
from experiments.benchmarks.measuring.workers import Program, Workers
from experiments.benchmarks.simulated.truth import JOB


SECONDS_MAX: Final = 300.0
SMALL: Final = {"rounds": 1, "steps": 150}
TICK_SECONDS: Final = 0.02
N_TICKS: Final = 100  # that the replica is seen to train before its node is removed
ON_RAY: Final = ("--on", "ray", "--hosts", "1", "--cores", "1", "--hosts-seconds", "60")


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    start_seconds: float  # from the command to the first samples
    rate: float  # samples a second from then on
    exit_code: int  # of the command
    away_seconds: float | None  # from a node's end to the replica's restart; None: none ended


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=2, help="0: only a node removed")
    parser.add_argument("--steps", type=int, default=400, help="of a replica")
    parser.add_argument("--job", type=Path, help="a job file of your own")
    options = measurement.options_of(parser, arguments, small=SMALL)
    try:
        from ray.cluster_utils import Cluster  # noqa: PLC0415 -- an extra
    except ImportError as error:
        raise SystemExit(f"{error}: pip install 'distbelief[ray]'") from None
    head = {"num_cpus": 0, "include_dashboard": False}
    cluster = cast("Any", Cluster)(initialize_head=True, head_node_args=head)
    try:
        nodes = [cluster.add_node(num_cpus=1)]
        cluster.wait_for_nodes()
        found = measurement.interleaved(
            {
                "local": lambda: _run("local", options, (), cluster.address),
                "ray": lambda: _run("ray", options, ON_RAY, cluster.address),
            },
            n_rounds=options.rounds,
        )

        def remove() -> None:
            # At once, as if its power were gone: nothing is shut down in order.
            cluster.remove_node(nodes.pop(), allow_graceful=False)
            cluster.add_node(num_cpus=1)

        lost = _run("a node removed", options, ON_RAY, cluster.address, attack=remove)
    finally:
        cluster.shutdown()
    report(found, lost)


def report(found: dict[str, list[Course]], lost: Course) -> None:
    figures = {
        "ended_well": float(lost.exit_code == 0 and lost.away_seconds is not None),
        "away_seconds": lost.away_seconds or float("nan"),
    }
    if all(found.values()):
        starts = {name: [c.start_seconds for c in found[name]] for name in found}
        rates = {name: [c.rate for c in found[name]] for name in found}
        rows = {
            name: {
                "start, s": measurement.Spread.of(starts[name]).show(),
                "samples/s": measurement.Spread.of(rates[name]).show(0),
            }
            for name in found
        }
        measurement.show("Two replicas", rows)
        figures |= {
            "start_over_local": median(starts["ray"]) / median(starts["local"]),
            "throughput_over_local": median(rates["ray"]) / median(rates["local"]),
        }
    measurement.conclude("ray_hosts", figures)


def _run(
    name: str,
    options: argparse.Namespace,
    words: Sequence[str],
    address: str,
    *,
    attack: Callable[[], None] | None = None,
) -> Course:
    with TemporaryDirectory(prefix="distbelief-ray-") as place:
        folder = Path(place)
        job, run = folder / "job.toml", folder / "run"
        job.write_text(JOB if options.job is None else options.job.read_text())
        command = [sys.executable, "-c", "from distbelief.cli.entry import main; main()"]
        command += ["train", str(job), *words, "--set", "cluster.replicas=2"]
        command += ["--set", f"algorithm.max_steps={options.steps}"]
        command += ["--set", f"output.directory={run}", "--set", "output.report_every=250 ms"]
        program = Program(command=command, environment={"RAY_ADDRESS": address})
        with Workers("job", [program], folder, serve=False) as process:
            begun = time.monotonic()
            views: list[tuple[float, int]] = []  # when, samples
            attacked = back = None
            n_ticks, pid_before = 0, 0
            while process.status is None and time.monotonic() < begun + SECONDS_MAX:
                time.sleep(TICK_SECONDS)
                now, (samples, pid, is_training) = time.monotonic(), _look(run)
                if samples and (not views or samples != views[-1][1]):
                    views.append((now, samples))
                n_ticks += is_training
                if attack is not None and attacked is None and n_ticks > N_TICKS:
                    attack()
                    attacked, pid_before = time.monotonic(), pid
                elif attacked and back is None and is_training and pid != pid_before:
                    back = now
        exit_code, output = process.status, process.log.read_text()
    if len(views) < 2 or exit_code is None:
        raise SystemExit(f"the job ended with {exit_code}: {output}")
    (first_at, first), (last_at, last) = views[0], views[-1]
    course = Course(
        start_seconds=first_at - begun,
        rate=(last - first) / (last_at - first_at),
        exit_code=exit_code,
        away_seconds=None if attacked is None or back is None else back - attacked,
    )
    print(
        f"{name}: start {course.start_seconds:.1f} s, {course.rate:,.0f} samples/s, "
        f"exit code {exit_code}, away {course.away_seconds}",
        flush=True,
    )
    if course.away_seconds is not None:
        print(output, flush=True)
    return course


def _look(run: Path) -> tuple[int, int, bool]:
    status = RunDirectory(run, lock=None).read_status()
    if status is None:
        return 0, 0, False
    for role in status.view.roles:
        if role.name == "replica-1":
            return status.view.samples, role.pid or 0, bool(role.pid and role.rate)
    return status.view.samples, 0, False


if __name__ == "__main__":
    main()
