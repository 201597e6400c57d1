"""The figures of runs as text for Prometheus, after its exposition format 0.0.4.

Names are in base units (seconds, bytes), and end in `_total` if they only rise.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from distbelief.dashboard.reader import RunReader
from distbelief.supervisor.view import JobView, RoleView


Value = float | int | None

_OF_RUN: Final[dict[str, tuple[str, Callable[[JobView], Value]]]] = {
    "distbelief_samples_total": ("samples trained on", lambda view: view.samples),
    "distbelief_steps_total": ("steps of all replicas", lambda view: view.step),
    "distbelief_seconds_total": (
        "time of the job, earlier sessions included",
        lambda view: view.seconds,
    ),
    "distbelief_pushes_total": ("pushes applied", lambda view: view.pushes_applied),
    "distbelief_pushes_refused_total": ("pushes refused", lambda view: view.pushes_refused),
    "distbelief_pushes_lost_total": (
        "pushes acknowledged, then lost",
        lambda view: view.pushes_lost,
    ),
    "distbelief_checkpoints_total": ("checkpoints of shards", lambda view: view.n_checkpoints),
    "distbelief_evaluations_total": ("evaluations", lambda view: view.n_evaluations),
    "distbelief_received_bytes_total": ("received by all shards", lambda view: view.bytes_in),
    "distbelief_sent_bytes_total": ("sent by all shards", lambda view: view.bytes_out),
    "distbelief_samples_per_second": (
        "over the last few seconds",
        lambda view: view.samples_per_second,
    ),
    "distbelief_loss": ("training loss, mean since the one before", lambda view: view.loss),
    "distbelief_held_out_loss": ("as last measured", lambda view: view.held_out_loss),
    "distbelief_staleness_pushes": (
        "mean staleness of applied pushes",
        lambda view: view.staleness_mean,
    ),
    "distbelief_progress_ratio": ("share of the job that is done", lambda view: view.progress),
}
_OF_ROLE: Final[dict[str, tuple[str, Callable[[RoleView], Value]]]] = {
    "distbelief_role_restarts_total": ("restarts of a role", lambda role: role.restarts),
    "distbelief_role_per_second": (
        "samples of a replica, pushes applied of a shard",
        lambda role: role.rate,
    ),
    "distbelief_role_heartbeat_age_seconds": (
        "since its last heartbeat",
        lambda role: role.last_heartbeat_age,
    ),
    "distbelief_role_memory_stalled_seconds_total": (
        "in which its host or container waited for memory, since it was started",
        lambda role: role.counters.get("seconds_stalled_for_memory"),
    ),
}


def exposition(readers: Sequence[RunReader]) -> str:
    """Return the figures of these runs; those that were not measured yet are left out."""
    lines = [*_family("distbelief_run_up", "whether the run is running", _running(readers))]
    shown = [(r, r.status.view) for r in readers if r.status is not None]
    for name, (text, of_run) in _OF_RUN.items():
        values = [({"run": r.state.path}, of_run(view)) for r, view in shown]
        lines += _family(name, text, values)
    measured = [
        ({"run": r.state.path, "metric": name}, value)
        for r, view in shown
        for name, value in view.metrics.items()
    ]
    lines += _family("distbelief_metric", "held out, as last measured", measured)
    for name, (text, of_role) in _OF_ROLE.items():
        labelled = [
            ({"run": r.state.path, "role": role.name}, of_role(role))
            for r, view in shown
            for role in view.roles
        ]
        lines += _family(name, text, labelled)
    return "\n".join([*lines, ""])


def _running(readers: Sequence[RunReader]) -> list[tuple[dict[str, str], Value]]:
    return [({"run": r.state.path}, int(r.state.state == "running")) for r in readers]


def _family(name: str, text: str, values: Sequence[tuple[dict[str, str], Value]]) -> Iterator[str]:
    known = [(labels, value) for labels, value in values if value is not None]
    if not known:
        return
    kind = "counter" if name.endswith("_total") else "gauge"
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"
    for labels, value in known:
        inside = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
        yield f"{name}{{{inside}}} {value!r}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
