"""Plan verification (`distbelief partition --verify`): runs a plan and compares with one process.

Outputs, loss and gradients are compared; step seconds and bytes per link, with their prediction.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Final, final

import msgspec
import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from torch import nn

from distbelief.config.load import resolve
from distbelief.core.errors import JobError
from distbelief.core.files import scratch
from distbelief.core.signals import ended_by_signals
from distbelief.graph.graph import LayerGraph
from distbelief.graph.ops.call import is_module
from distbelief.graph.ops.linear import Embedding
from distbelief.job.launch.computation import compute
from distbelief.job.launch.local import LocalLauncher
from distbelief.plans.compiler import compile_plan
from distbelief.plans.plan import Plan
from distbelief.plans.planner.plan_report import seconds
from distbelief.plans.planner.planning_result import PlanningResult
from distbelief.task.data import Batch, Path as Keys
from distbelief.task.forward import Sample
from distbelief.task.losses import Loss, loss_function
from distbelief.task.task import ModelSpec, build_model
from distbelief.worker.batches import step_seed
from distbelief.worker.computation import SEED, Computation
from distbelief.worker.proof import (
    LARGE,
    Agreement,
    Results,
    Tensors,
    compared,
    in_precision,
    reference,
)


# --- result ---


@final
class Link(msgspec.Struct, frozen=True, rename={"sender": "from", "receiver": "to"}):
    sender: int
    receiver: int
    predicted_bytes: int
    sent_bytes: int


@final
class VerificationResult(msgspec.Struct, frozen=True, kw_only=True):
    machines: int
    cores: int  # of this host
    errors: dict[str, Agreement]  # of "outputs", "loss" and gradients, by tensor; the worst last
    links: list[Link]
    predicted_seconds: float | None  # of a step
    measured_seconds: float  # of a step
    one_process_seconds: float  # of a step of one process
    cluster: str  # of the prediction

    @property
    def passed(self) -> bool:
        exact = all(link.predicted_bytes == link.sent_bytes for link in self.links)
        return exact and all(each.agrees for each in self.errors.values())

    def plain(self) -> dict[str, object]:
        return {"passed": self.passed, **msgspec.to_builtins(self)}

    def show(self, console: Console) -> None:
        table = Table(title=f"the plan for {self.machines} machines, run here")
        table.add_column("what")
        for column in ("plan", "one process", ""):
            table.add_column(column, justify="right")
        for name, each in self.errors.items():
            verdict = "agrees" if each.agrees else "[red]differs[/red]"
            verdict += "" if each.double is None else f" in float64: {each.double:.0e}"
            table.add_row(name, f"{each.plan:.1e}", f"{each.one_process:.1e}", verdict)
        console.print(table)
        links = Table()
        for column in ("link", "bytes a step, predicted", "sent"):
            links.add_column(column, justify="right")
        for link in self.links:
            ends = f"{link.sender} -> {link.receiver}"
            links.add_row(ends, f"{link.predicted_bytes:,}", f"{link.sent_bytes:,}")
        if self.links:
            console.print(links)
        for line in self._remarks():
            console.print(f" {line}", style="dim", markup=False, soft_wrap=True)

    def _remarks(self) -> list[str]:
        measured = seconds(self.measured_seconds)
        alone = seconds(self.one_process_seconds)
        speed_up = self.one_process_seconds / self.measured_seconds
        lines = [
            "Errors are from float64, relative to the largest number.",
            f"A step took {measured}, and {alone} in one process: {speed_up:.2f}x.",
        ]
        if self.predicted_seconds is not None:
            said = seconds(self.predicted_seconds)
            ratio = self.measured_seconds / self.predicted_seconds
            lines.append(
                f"Predicted for cluster {self.cluster!r}: {said}; here it is "
                f"{ratio:.2f} times that."
            )
        if self.machines > self.cores:
            lines.append(
                f"{self.machines} machines share {self.cores} cores here: steps take longer."
            )
        lines.append("All agrees." if self.passed else "The plan is NOT right here.")
        return lines


N_STEPS: Final = 12
N_WARM: Final = 3
_SHARE_TRUE: Final = 0.8  # of a mask
Counters = Sequence[Mapping[str, float]]  # of each rank, at its end


def verify(
    result: PlanningResult,
    show: Callable[[str], None] = lambda _: None,
    *,
    factory: str,
    loss: str,
    n_cores: int,
    launcher: LocalLauncher,
    n_steps: int = N_STEPS,
) -> VerificationResult:
    """Run a plan for some steps, and compare.

    The plan for the most machines is run, `n_steps` steps after the warm-up. At kinks, as of ReLU,
    rounding moves gradients as much as a fault may; so a plan that differs, or by much, is run in
    float64, too. `factory` is the import path of the model; the caller closes the launcher.
    JobError if there is no loss, or the model draws random numbers other than dropout masks.
    """
    graph, plan, sample = result.request.graph, result.plan, result.request.sample
    if not loss or sample is None:
        raise JobError("--verify needs a loss: name it, as in --loss cross_entropy")
    spec = ModelSpec(factory=factory)
    batch = _batch(graph, sample, batch=plan.batch, loss=loss)
    with ended_by_signals(), scratch() as folder:
        # float32, as ranks compute, whatever dtype the model is made in.
        module = build_model(spec).train().float()
        tensors = {key: value.clone() for key, value in module.state_dict().items()}
        save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "w.safetensors")
        computation = Computation(
            folder=str(folder),
            weights=str(folder / "w.safetensors"),
            trains=True,
            n_samples=plan.batch,
            n_steps=n_steps + N_WARM,
            n_warm=N_WARM,
        )
        job = resolve(
            {
                "model": {"factory": factory},
                "data": {"train": {"factory": "none:none"}},  # there is `inputs`
                "algorithm": {
                    "name": "downpour",
                    "loss": loss,
                    "batch_size": plan.batch,
                    "rule": {"name": "sgd", "learning_rate": 1.0},
                },
                "stop": {"epochs": 1},
            },
            file="partition.toml",
        )

        def run(computation: Computation, launcher: LocalLauncher) -> tuple[Results, Counters]:
            outputs, seen = compute(
                job,
                computation,
                plan=plan,
                inputs=batch,
                gradients=[tuple(tensors[name].shape) for name in sorted(tensors)],
                launcher=launcher,
                show=show,
            )
            return _found(computation, graph, outputs, sorted(tensors), seen), seen

        found, seen = run(computation, launcher)
        function = loss_function(loss)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            alone = _seconds(module, batch, function, n_steps=n_steps)
            # The last step is compared.
            seed = step_seed(SEED, (computation.n_steps - 1) * plan.batch)
            single = reference(module, batch, function, graph=graph, seed=seed)
            double = in_precision(batch, torch.float64)
            try:
                exact = reference(module.double(), double, function, graph=graph, seed=seed)
            except RuntimeError as error:
                why = str(error).splitlines()[0]
                raise JobError(
                    f"--verify compares with float64, in which this model cannot run: {why}. Those "
                    "of transformers with experts can with experts_implementation='eager'"
                ) from error
        finally:
            torch.set_num_threads(threads)
        errors = compared(found, single, exact)
        if not all(each.agrees and each.plan <= LARGE for each in errors.values()):
            with LocalLauncher() as fresh:  # the other still has ends of ranks
                found, _ = run(msgspec.structs.replace(computation, dtype="float64"), fresh)
            doubles = compared(found, single, exact)
            errors = {
                name: msgspec.structs.replace(each, double=doubles[name].plan)
                for name, each in errors.items()
            }
    return VerificationResult(
        machines=plan.cluster.n_machines,
        errors=errors,
        links=_links(plan, graph, seen, n_steps=n_steps + N_WARM),
        predicted_seconds=plan.predicted.step_seconds if plan.predicted else None,
        measured_seconds=max(rank["step_seconds"] for rank in seen),
        one_process_seconds=alone,
        cluster=plan.cluster.name,
        cores=n_cores,
    )


def _batch(graph: LayerGraph, sample: Sample, *, batch: int, loss: str) -> Batch:
    # Random inputs from 0 to 1, labels of all classes.
    generator = torch.Generator().manual_seed(0)
    found: dict[Keys, torch.Tensor] = {}
    for path, spec in ((entry.path, entry.spec) for entry in sample.entries):
        values = torch.rand(batch, *spec.shape, generator=generator)
        if spec.is_mask or spec.n_values == 2:
            values = values < _SHARE_TRUE
            values[..., :1] = True  # attention to nothing is not a number
            values = values if spec.is_mask else values.to(torch.int64)
        elif spec.is_integer:
            n_values = spec.n_values or 1
            if n_values == 1:
                n_values = _n_words(graph)
                if path == ("targets",):
                    n_values = graph[graph.outputs[0]].shape[0]
            values = (values * n_values).to(torch.int64)
        elif path == ("targets",) and loss.startswith("soft_margin"):
            values = values.round() * 2 - 1
        found[path] = values
    return Batch.of(found)


def _n_words(graph: LayerGraph) -> int:
    # The number of rows of every embedding; 1 if unknown.
    known = [
        layer.tensors["weight"].shape[0] for layer in graph.layers if layer.kind == Embedding.name
    ]
    hides = any(
        is_module(layer) and any(graph[name].is_integer for name in layer.inputs)
        for layer in graph.layers
    )
    return 1 if hides else min(known, default=1)


def _found(
    computation: Computation,
    graph: LayerGraph,
    outputs: Tensors,
    names: Sequence[str],
    seen: Counters,
) -> Results:
    # A status holds finite numbers only.
    loss = sum(rank.get("loss", math.nan) for rank in seen) / computation.n_samples
    gradients = {
        name: computation.load("gradient", index)
        for index, name in enumerate(names)
        if name in graph.tensors
    }
    return Results({**outputs, "loss": torch.tensor(loss, dtype=torch.float64)}, gradients)


def _seconds(module: nn.Module, batch: Batch, loss: Loss, *, n_steps: int) -> float:
    times: list[float] = []
    for _ in range(1 + n_steps):
        module.zero_grad()
        begun = time.perf_counter()
        loss(batch.run(module), batch.targets).backward()
        times.append(time.perf_counter() - begun)
    return median(times[1:])


def _links(plan: Plan, graph: LayerGraph, seen: Counters, *, n_steps: int) -> list[Link]:
    compiled = compile_plan(
        graph, plan.placements, batch=plan.batch, n_machines=plan.cluster.n_machines
    )
    predicted: dict[tuple[int, int], int] = {}
    for message in compiled.messages:
        key = message.sender, message.receiver
        predicted[key] = predicted.get(key, 0) + message.n_bytes
    sent = {
        (sender, receiver): n_bytes // n_steps
        for sender, rank in enumerate(seen)
        for receiver in range(plan.cluster.n_machines)
        if (n_bytes := int(rank.get(f"bytes_to_{receiver}", 0)))
    }
    return [
        Link(*ends, predicted.get(ends, 0), sent.get(ends, 0))
        for ends in sorted({*predicted, *sent})
    ]
