"""A plan run for real, on processes of this host, beside one process that needs none.

What `distbelief partition --verify` does. Outputs, loss and gradients of every tensor
are compared; seconds of a step and bytes of every link, with what was predicted. What
is found, and whether it is as it should be: `verified`.
"""

import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import nn

from distbelief.errors import JobError
from distbelief.graph.kinds.embedding import Embedding
from distbelief.graph.kinds.whole import Whole
from distbelief.graph.layer import LayerGraph
from distbelief.job.processes.signals import ended_by_signals
from distbelief.job.rehearsal.masks import SameMasks
from distbelief.job.rehearsal.rehearsal import SEED, Rehearsal, Seen, rehearse
from distbelief.job.rehearsal.rehearsing import OUTPUT, gradient_file
from distbelief.job.rehearsal.verified import Agreement, Link, Verified
from distbelief.partition.outlook import Outlook
from distbelief.program.compilation import compile_plan
from distbelief.program.plan import Plan
from distbelief.runtime.machine.course import step_seed
from distbelief.runtime.task.losses import Loss, loss_function
from distbelief.runtime.task.samples import Sample
from distbelief.runtime.task.task import DataSpec, ModelSpec, TaskSpec, build_model
from distbelief.scratch import scratch


N_STEPS: Final = 12
N_WARM: Final = 3
SHARE: Final = 1e-3
"""Of the largest number of all, the least that an error is relative to."""

Array = NDArray[np.float32 | np.float64]
Tensors = Mapping[str, torch.Tensor]


def verify(
    outlook: Outlook, *, factory: str, loss: str, n_cores: int, n_steps: int = N_STEPS
) -> Verified:
    """Run the plan of an outlook for some steps, and compare.

    Args:
        outlook: Whose plan, the one for the most machines.
        factory: Import path of what makes the model, without arguments.
        loss: Its name.
        n_cores: Of this host.
        n_steps: How many count.

    Raises:
        JobError: the model cannot be run so: it has no loss, several inputs, or draws
            random numbers that are no masks of dropout.
    """
    graph, plan = outlook.order.graph, outlook.plan
    _check(graph, loss)
    sample = _sample(graph)
    spec = ModelSpec(factory=factory)
    inputs, targets = _batch(graph, sample, batch=plan.batch, loss=loss)
    with ended_by_signals(), scratch() as folder:
        # As the machines compute, whatever the model is made in.
        module = build_model(spec).train().float()
        tensors = {key: value.clone() for key, value in module.state_dict().items()}
        save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "w.safetensors")
        plan.save(folder / "plan.json")
        np.save(folder / "inputs.npy", inputs.numpy())
        np.save(folder / "targets.npy", targets.numpy())
        rehearsal = Rehearsal(
            folder=str(folder),
            run=secrets.token_hex(16),
            task=TaskSpec(model=spec, train=DataSpec(factory="none:none"), loss=loss),
            sample=sample,
            plan=str(folder / "plan.json"),
            weights=str(folder / "w.safetensors"),
            inputs=str(folder / "inputs.npy"),
            targets=str(folder / "targets.npy"),
            n_samples=plan.batch,
            n_steps=n_steps + N_WARM,
            n_warm=N_WARM,
            import_paths=(str(Path.cwd()),),
        )
        _make_room(rehearsal, graph, tensors)
        seen = rehearse(rehearsal, n_machines=plan.cluster.n_machines)
        found = _found(rehearsal, graph, tensors, seen)
    function = loss_function(loss)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        alone = _seconds(module, inputs, targets, function, n_steps=n_steps)
        # Of the machines' last step, which is the one that is compared.
        seed = step_seed(SEED, (rehearsal.n_steps - 1) * plan.batch)
        single = _reference(module, inputs, targets, function, graph=graph, seed=seed)
        exact = _reference(
            module.double(), _double(inputs), _double(targets), function, graph=graph, seed=seed
        )
    finally:
        torch.set_num_threads(threads)
    return Verified(
        n_machines=plan.cluster.n_machines,
        agreements=_compared(found, single, exact),
        links=_links(plan, graph, seen, n_steps=n_steps + N_WARM),
        predicted_seconds=plan.predicted.step_seconds if plan.predicted else None,
        measured_seconds=max(median(machine.seconds) for machine in seen),
        alone_seconds=alone,
        cluster=plan.cluster.name,
        n_cores=n_cores,
    )


def _check(graph: LayerGraph, loss: str) -> None:
    if not loss:
        raise JobError("--verify takes steps: name the loss, as in --loss cross_entropy")
    inputs = [layer.name for layer in graph.layers if layer.kind == "input"]
    if len(inputs) != 2:
        raise JobError(f"--verify gives a model one input, and this one has {len(inputs) - 1}")


def _sample(graph: LayerGraph) -> Sample:
    given, wanted = (layer for layer in graph.layers if layer.kind == "input")
    return Sample(
        input_shape=given.shape,
        input_is_integer=given.is_integer,
        target_shape=wanted.shape,
        target_is_integer=wanted.is_integer,
    )


def _batch(
    graph: LayerGraph, sample: Sample, *, batch: int, loss: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random samples: numbers from 0 to 1, labels of all classes."""
    generator = torch.Generator().manual_seed(0)
    classes = graph[graph.outputs[0]].shape[0] if sample.target_is_integer else 0
    inputs = torch.rand(batch, *sample.input_shape, generator=generator)
    targets = torch.rand(batch, *sample.target_shape, generator=generator)
    if loss.startswith("soft_margin"):
        targets = targets.round() * 2 - 1
    if sample.input_is_integer:
        inputs = (inputs * _n_words(graph)).to(torch.int64)
    if sample.target_is_integer:
        targets = (targets * classes).to(torch.int64)
    return inputs, targets


def _n_words(graph: LayerGraph) -> int:
    """Return how many words every table of the model has; 1 if nobody knows."""
    known = [
        layer.tensors["weight"].shape[0] for layer in graph.layers if layer.kind == Embedding.name
    ]
    hides = any(
        layer.kind == Whole.name and any(graph[name].is_integer for name in layer.inputs)
        for layer in graph.layers
    )
    return 1 if hides else min(known, default=1)


def _make_room(rehearsal: Rehearsal, graph: LayerGraph, tensors: Tensors) -> None:
    """Make the files that machines write into."""
    shape = (rehearsal.n_samples, *graph[graph.outputs[0]].shape)
    names = [(OUTPUT, shape)] + [
        (gradient_file(index), tuple(tensors[name].shape))
        for index, name in enumerate(sorted(tensors))
    ]
    for name, wanted in names:
        np.lib.format.open_memmap(rehearsal.path(name), mode="w+", dtype=np.float32, shape=wanted)


def _found(
    rehearsal: Rehearsal, graph: LayerGraph, tensors: Tensors, seen: Sequence[Seen]
) -> dict[str, torch.Tensor]:
    """Return what the machines have computed, put together."""
    losses = [machine.loss for machine in seen if machine.loss is not None]
    found = {
        "outputs": _load(rehearsal, OUTPUT),
        "loss": torch.tensor(sum(losses) / rehearsal.n_samples),
    }
    for index, name in enumerate(sorted(tensors)):
        if name in graph.tensors:
            found[name] = _load(rehearsal, gradient_file(index))
    return found


def _load(rehearsal: Rehearsal, name: str) -> torch.Tensor:
    array: Array = np.load(rehearsal.path(name))
    return torch.from_numpy(array)


def _seconds(
    module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, loss: Loss, *, n_steps: int
) -> float:
    """Return what a step takes in one process."""
    times: list[float] = []
    for _ in range(1 + n_steps):
        module.zero_grad()
        begun = time.perf_counter()
        loss(module(inputs), targets).backward()
        times.append(time.perf_counter() - begun)
    return median(times[1:])


def _reference(
    module: nn.Module,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    loss: Loss,
    *,
    graph: LayerGraph,
    seed: int,
) -> dict[str, torch.Tensor]:
    """Return what one process computes that drops what machines drop in this step."""
    module.zero_grad()
    masks = SameMasks(graph, seed=seed)
    with masks:
        outputs = module(inputs)
        value = loss(outputs, targets)
        value.backward()
    masks.check()
    found = {"outputs": outputs.detach(), "loss": value.detach()}
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            found[name] = parameter.grad.clone()
    return found


def _double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _compared(found: Tensors, single: Tensors, exact: Tensors) -> list[Agreement]:
    names = [name for name in exact if name in found]
    largest = max(_largest(exact[name]) for name in names if name != "outputs")
    agreements = []
    for name in names:
        # A gradient that is zero but for rounding (of a bias before normalisation) is
        # measured by the others.
        scale = max(_largest(exact[name]), SHARE * largest)
        error = _distance(found[name], exact[name]) / scale
        rounding = _distance(single[name], exact[name]) / scale
        agreements.append(Agreement(name=name, error=error, rounding=rounding))
    first, rest = agreements[:2], agreements[2:]
    return [*first, *sorted(rest, key=lambda each: each.error)]


def _distance(tensor: torch.Tensor, exact: torch.Tensor) -> float:
    return _largest(tensor.double() - exact)


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _links(plan: Plan, graph: LayerGraph, seen: Sequence[Seen], *, n_steps: int) -> list[Link]:
    compiled = compile_plan(
        graph, plan.placements, batch=plan.batch, n_machines=plan.cluster.n_machines
    )
    predicted: dict[tuple[int, int], int] = {}
    for message in compiled.messages:
        key = message.sender, message.receiver
        predicted[key] = predicted.get(key, 0) + message.n_bytes
    sent = {
        (sender, receiver): n_bytes // n_steps
        for sender, machine in enumerate(seen)
        for receiver, n_bytes in machine.n_bytes.items()
    }
    return [
        Link(sender=key[0], receiver=key[1], predicted=predicted.get(key, 0), sent=sent.get(key, 0))
        for key in sorted({*predicted, *sent})
    ]
