"""Run directories as a run would leave them, made without one."""

import fcntl
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from distbelief.dashboard.reader import now
from distbelief.job.run.directory import Status
from distbelief.job.run.metrics_file import Measurement
from distbelief.supervisor.view import HostView, JobView, Message, Point, RoleView


def measurement(n: int, *, metric_name: str = "accuracy") -> Measurement:
    """Return the n-th line of a curve: a falling loss with noise, evaluated at every tenth."""
    share = 1.0 - math.exp(-n / 80)
    metric = round(0.1 + 0.85 * (1.0 - math.exp(-(n // 10) / 8)), 4) if n >= 10 else None
    return Measurement(
        time=n + 1.0,
        step=20 * n,
        samples=640 * n,
        loss=2.3 * (1 - share) + 0.15 + 0.12 * math.sin(n * 12.9898) ** 3,
        held_out_loss=None if metric is None else 2.3 - 2.2 * metric,
        metric_name=metric_name,
        metric=metric,
        metrics={} if metric is None else {metric_name: metric},
        samples_per_second=640 + 60 * math.sin(n / 7) + 30 * math.sin(n * 78.233),
        staleness_mean=1.5 + 0.5 * math.sin(n / 20),
        staleness_p95=4.0,
        bytes_in=1_000_000 * n,
        bytes_out=1_050_000 * n,
        n_checkpoints=n // 30,
        pushes_refused=3 * (n > 70),
    )


def roles(n_replicas: int, *, n_hosts: int = 1, seconds: float = 100.0) -> tuple[RoleView, ...]:
    shards = [
        RoleView(
            name=f"shard-{n}",
            state="serving",
            rate=21.5,
            last_heartbeat_age=0.2,
            pid=100 + n,
            counters={"pushes_applied": 900.0, "staleness_mean": 1.4, "bytes_in": 9e7},
        )
        for n in range(2)
    ]
    replicas = [
        RoleView(
            name=f"replica-{n}",
            state="restarting" if n == 1 else "computing" if n % 3 else "waiting for shard-1",
            rate=None if n == 1 else 200.0 + 20 * (n % 5),
            last_heartbeat_age=None if n == 1 else 0.1,
            restarts=int(n == 1),
            counters={
                "staleness_mean": 1.2 + 0.1 * (n % 7),
                "bytes_in": 1e6 * seconds,
                "bytes_out": 1e6 * seconds,
                "spent_computing": (0.7 - 0.02 * (n % 9)) * seconds,
                "spent_fetching": 0.12 * seconds,
                "spent_reading": 0.03 * (n % 3) * seconds,
            },
            at="" if n_hosts == 1 or n % n_hosts == 0 else f"node{n % n_hosts}",
        )
        for n in range(n_replicas)
    ]
    return (*shards, *replicas)


def view(n_points: int = 120, n_replicas: int = 4, *, n_hosts: int = 1) -> JobView:
    last = measurement(n_points)
    hosts = [
        HostView(
            name=f"host-{n}",
            label=f"node{n}",
            cores=8,
            state="ready",
            memory_bytes=32 << 30,
            bandwidth=1.1e8,
        )
        for n in range(1, n_hosts)
    ]
    messages = [
        Message(number=1, seconds=12.0, text="node1 has joined: 8 cores", what="host_joined"),
        Message(
            number=2,
            seconds=55.0,
            text="replica 1 died (signal 9): restarting it",
            level="warning",
            what="role_restarted",
        ),
        Message(number=3, seconds=58.5, text="replica 1 is back after 3.5 s", what="role_back"),
    ]
    return JobView(
        phase="training",
        now=1000.0 + n_points,
        seconds=last.time,
        training_seconds=last.time - 0.5,
        step=last.step,
        samples=last.samples,
        total_samples=2 * last.samples,
        progress=0.5,
        eta_seconds=last.time,
        loss=last.loss,
        held_out_loss=last.held_out_loss,
        metric=last.metric,
        metrics=last.metrics,
        best_metric=last.metric,
        samples_per_second=last.samples_per_second,
        staleness_mean=last.staleness_mean,
        staleness_p95=last.staleness_p95,
        bytes_in=last.bytes_in,
        bytes_out=last.bytes_out,
        pushes_applied=last.step,
        pushes_refused=3,
        n_checkpoints=last.n_checkpoints,
        roles=roles(n_replicas, n_hosts=n_hosts, seconds=last.time),
        hosts=tuple(hosts),
        messages=tuple(messages),
        history=(Point(seconds=1.0, samples=640, loss=2.0),),
    )


def make(
    path: Path,
    *,
    n_points: int = 120,
    shown: JobView | None = None,
    ended: bool = False,
    name: str = "speech",
    error: str | None = None,
) -> Path:
    """Make a run directory."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "job.toml").write_text("")
    append(path, range(n_points))
    write_status(path, shown or view(n_points), ended=ended, name=name, error=error)
    return path


def append(path: Path, numbers: range) -> None:
    with (path / "metrics.jsonl").open("ab") as file:
        file.writelines(msgspec.json.encode(measurement(n)) + b"\n" for n in numbers)


def write_status(
    path: Path,
    shown: JobView,
    *,
    ended: bool = False,
    name: str = "speech",
    error: str | None = None,
) -> None:
    status = Status(name=name, pid=os.getpid(), written=now(), view=shown, ended=ended, error=error)
    (path / "status.new").write_bytes(msgspec.json.encode(status))
    (path / "status.new").replace(path / "status.json")


@contextmanager
def running(path: Path) -> Iterator[None]:
    """Hold the lock of a run directory, as the process that runs it."""
    with (path / "lock").open("w") as file:
        file.write(f"{os.getpid()}\n")
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
