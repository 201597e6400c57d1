"""Measures models of the zoo, each in a process of its own, and keeps the results.

    python -m experiments.zoo.measure gpt2 [capture] [plan] [verify]

It prints a line of JSON for each stage; the line of one that fails has the reason.
"""

import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from distbelief.graph.append_loss import append_loss
from distbelief.graph.capture import InputSpec, capture
from distbelief.graph.graph import INPUT, Layer, LayerGraph
from distbelief.graph.operator import Call, Step, operator_of
from distbelief.job.launch.local import LocalLauncher
from distbelief.job.verify import verify
from distbelief.plans.cluster import Cluster, Machine
from distbelief.plans.cluster_file import load_cluster
from distbelief.plans.planner.planner import Request, planning_request
from distbelief.plans.planner.planning_result import PlanningResult, planning_result
from distbelief.task.task import ModelSpec, build_on_meta
from experiments.zoo.models import MODELS, Size


COUNTS: Final = (2, 4, 8)
LOSS: Final = "cross_entropy"
# Machines so slow, and a network so fast, that the planner splits whatever can be split.
SLOW: Final = Cluster(
    name="slow machines", machines=(Machine(flops=1e6, memory_rate=1e6, bandwidth=1e12),) * 2
)
_N_STEPS: Final = 1
Found = dict[str, Any]
_DTYPES: Final = (torch.float32, torch.int64)


def captured(name: str) -> Found:
    """Capture the published size, without its memory."""
    size = MODELS[name].published
    model = _without_memory(size)
    capture(nn.Linear(2, 2), [InputSpec(shape=(2,))])  # imports torch's compiler
    begun = time.process_time()
    graph = capture(model, size.inputs)
    seconds = time.process_time() - begun
    graph = append_loss(graph, LOSS)
    return {
        "parameters": graph.n_parameters,
        "layers": len(graph.layers),
        "capture_seconds": seconds,
        **_shares(graph, model),
    }


def planned(name: str) -> Found:
    """Capture the published size, and plan it for a rack."""
    size = MODELS[name].published
    model = _without_memory(size)
    capture(nn.Linear(2, 2), [InputSpec(shape=(2,))])
    begun = time.process_time()
    result = _plans(name, model, size, cluster=load_cluster("rack-10g"), counts=COUNTS)
    return {
        "plan_seconds": time.process_time() - begun,  # of capture too
        "speed_ups": [done.speed_up for done in result.planned],
        "used": [len(done.used) for done in result.planned],
    }


def verified(name: str) -> Found:
    """Run the small size on two ranks, every layer split that can be, and in one process."""
    begun = time.monotonic()
    size = MODELS[name].small
    factory = f"experiments.zoo.models:{name}"
    model = build_on_meta(ModelSpec(factory=factory))
    plans = _plans(name, model, size, cluster=SLOW, counts=[len(SLOW)], search=False)
    with LocalLauncher() as launcher:
        found = verify(
            plans,
            factory=factory,
            loss=LOSS,
            n_cores=len(os.sched_getaffinity(0)),
            launcher=launcher,
            n_steps=_N_STEPS,
        )
    errors = {word: (each.plan, each.one_process) for word, each in found.errors.items()}
    gradients = [word for word in errors if word not in {"outputs", "loss"}]
    return {
        "verify_seconds": time.monotonic() - begun,
        "outputs": errors["outputs"],
        "loss": errors["loss"],
        "gradients": errors[gradients[-1]],
        "double": max((each.double or 0.0 for each in found.errors.values()), default=0.0),
        "differing": [word for word, each in found.errors.items() if not each.agrees][:5],
        "bytes": sum(link.sent_bytes for link in found.links),
        "bytes_exact": all(link.sent_bytes == link.predicted_bytes for link in found.links),
        "agrees": found.passed,
    }


STAGES: Final[Mapping[str, Callable[[str], Found]]] = {
    "capture": captured,
    "plan": planned,
    "verify": verified,
}


def _without_memory(size: Size) -> nn.Module:
    try:
        with torch.device("meta"):
            return size.make()
    except NotImplementedError:  # some read tensors while they are built
        return size.make()


def _plans(
    name: str,
    model: nn.Module,
    size: Size,
    *,
    cluster: Cluster,
    counts: Sequence[int],
    search: bool = True,
) -> PlanningResult:
    asked = Request(
        model=name, inputs=size.inputs, batch=size.batch, loss=LOSS, counts=counts, cluster=cluster
    )
    request = planning_request(model, asked)
    if not search:
        request = replace(request, search=False, micro_batches=False, solver_seconds=1.0)
    return planning_result(request, counts)


# --- share of the arithmetic that can be split ---


def _shares(graph: LayerGraph, model: nn.Module) -> Found:
    total = whole = 0.0
    reasons: dict[str, float] = {}
    for layer in graph.layers:
        if layer.kind == INPUT:
            continue
        work = _work(graph, layer, model)
        total += work
        if not _can_be_split(layer):
            whole += work
            what = str(layer.options.get("operation", layer.kind))
            reasons[what] = reasons.get(what, 0.0) + work
    most = sorted(reasons, key=lambda what: -reasons[what])[:5]
    return {
        "split_share": 1 - whole / total,
        "whole": {what: reasons[what] / total for what in most},
        "why": sorted({layer.whole for layer in graph.layers if layer.whole})[:5],
    }


def _can_be_split(layer: Layer) -> bool:
    kind = operator_of(layer)
    parts = any(layer.shape[cut.dim] > cut.unit for cut in kind.cuts(layer))
    return parts or kind.partial is not None


def _work(graph: LayerGraph, layer: Layer, model: nn.Module) -> float:
    """Return the operations of a layer, forward: what it says, or what torch counts if more."""
    kind = operator_of(layer)
    said = kind.work(layer, layer.region).forward
    if _can_be_split(layer):
        return said
    call = Call(
        layer=layer,
        region=layer.region,
        inputs=[
            torch.empty(1, *shape, device="meta", dtype=_DTYPES[graph[source].is_integer])
            for source, shape in zip(layer.inputs, layer.input_shapes, strict=True)
        ],
        tensors={
            word: torch.empty(use.shape, device="meta") for word, use in layer.tensors.items()
        },
        step=Step(training=True, modules=dict(model.named_modules())),
    )
    try:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            kind.compute(call)
    except Exception:  # noqa: BLE001 -- an operation without a meta kernel
        return said
    return max(said, float(counter.get_total_flops()))


def main() -> None:
    name, *wanted = sys.argv[1:]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for stage in wanted or STAGES:
        found: Found = {"error": None}
        try:
            found |= STAGES[stage](name)
        except Exception as error:  # noqa: BLE001 -- the table says what it was
            traceback.print_exc()
            found["error"] = f"{type(error).__name__}: {error}"[:600]
        print(json.dumps({stage: found}), flush=True)


if __name__ == "__main__":
    main()
