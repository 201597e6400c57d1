"""The figures of runs as text for Prometheus, after its exposition format 0.0.4.

Names are in base units (seconds, bytes), and end in `_total` if they only rise.
"""

from collections.abc import Iterator, Sequence
from typing import Final

from distbelief.dashboard.reader import RunReader


Value = float | int | None

_OF_RUN: Final[dict[str, tuple[str, str]]] = {  # name -> field of JobView, what it is
    "distbelief_samples_total": ("samples", "samples trained on"),
    "distbelief_steps_total": ("step", "steps of all replicas"),
    "distbelief_seconds_total": ("seconds", "time of the job, earlier sessions included"),
    "distbelief_pushes_total": ("pushes_applied", "pushes applied"),
    "distbelief_pushes_refused_total": ("pushes_refused", "pushes refused"),
    "distbelief_pushes_lost_total": ("pushes_lost", "pushes acknowledged, then lost"),
    "distbelief_checkpoints_total": ("n_checkpoints", "checkpoints of shards"),
    "distbelief_evaluations_total": ("n_evaluations", "evaluations"),
    "distbelief_received_bytes_total": ("bytes_in", "received by all shards"),
    "distbelief_sent_bytes_total": ("bytes_out", "sent by all shards"),
    "distbelief_samples_per_second": ("samples_per_second", "over the last few seconds"),
    "distbelief_loss": ("loss", "training loss, mean since the one before"),
    "distbelief_held_out_loss": ("held_out_loss", "as last measured"),
    "distbelief_staleness_pushes": ("staleness_mean", "mean staleness of applied pushes"),
    "distbelief_progress_ratio": ("progress", "share of the job that is done"),
}
_OF_ROLE: Final[dict[str, tuple[str, str]]] = {  # field of RoleView, or one of its counters
    "distbelief_role_restarts_total": ("restarts", "restarts of a role"),
    "distbelief_role_per_second": ("rate", "samples of a replica, pushes applied of a shard"),
    "distbelief_role_heartbeat_age_seconds": ("last_heartbeat_age", "since its last heartbeat"),
    "distbelief_role_memory_stalled_seconds_total": (
        "seconds_stalled_for_memory",
        "in which its host or container waited for memory, since it was started",
    ),
}


def exposition(readers: Sequence[RunReader]) -> str:
    """Return the figures of these runs; those that were not measured yet are left out."""
    up = [({"run": r.state.path}, int(r.state.state == "running")) for r in readers]
    lines = [*_family("distbelief_run_up", "whether the run is running", up)]
    shown = [(r, r.status.view) for r in readers if r.status is not None]
    for name, (field, text) in _OF_RUN.items():
        values = [({"run": r.state.path}, getattr(view, field)) for r, view in shown]
        lines += _family(name, text, values)
    measured = [
        ({"run": r.state.path, "metric": name}, value)
        for r, view in shown
        for name, value in view.metrics.items()
    ]
    lines += _family("distbelief_metric", "held out, as last measured", measured)
    for name, (field, text) in _OF_ROLE.items():
        labelled = [
            (
                {"run": r.state.path, "role": each.name},
                getattr(each, field, each.counters.get(field)),
            )
            for r, view in shown
            for each in view.roles
        ]
        lines += _family(name, text, labelled)
    return "\n".join([*lines, ""])


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
