"""Builds the coordinator and the workers of a job, in the processes that run them."""

import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import torch
from torch import nn

from distbelief.config.algorithms import refuse_programs
from distbelief.core.errors import JobError, StorageError
from distbelief.core.formatting import nearest
from distbelief.core.tensor_files import TensorFile
from distbelief.core.vectors import Vector
from distbelief.parameter_server.client.client import ParameterClient
from distbelief.parameter_server.initial_values import shard_values_from
from distbelief.parameter_server.layout import Layout, PartialView, TensorSpec
from distbelief.parameter_server.policy import DOWNPOUR
from distbelief.parameter_server.shard_config import other_copy, shard_of
from distbelief.protocol.role import Address, Role
from distbelief.protocol.vector_commands import VectorName
from distbelief.task.data import DataShard, Samples
from distbelief.task.imports import own_arguments
from distbelief.task.initializers import reader
from distbelief.task.task import BuildContext, TaskSpec, build_model
from distbelief.worker import build as wb
from distbelief.worker.batches import SlicePrefetch
from distbelief.worker.downpour_settings import DownpourSettings
from distbelief.worker.group import EVALUATORS, member_names
from distbelief.worker.local_executor import FlatModel, LocalExecutor
from distbelief.worker.replica import Alone, Replica, Steps
from distbelief.worker.training import Items
from sandblaster.coordinator.coordinator import Coordinator
from sandblaster.coordinator.workers import CoordinatorConfig
from sandblaster.group_tasks import ChunkBatchPlan, GroupTasks, WorkerConfig
from sandblaster.optimizers import AnyMethod
from sandblaster.optimizers.base import Runnable
from sandblaster.optimizers.lbfgs import LBFGS
from sandblaster.optimizers.line_search import LOWER, UPPER
from sandblaster.settings import PROGRAM, SandblasterSettings
from sandblaster.strads.jobs import check_blocks, check_data, program_in, program_of
from sandblaster.strads.method import Scheduled
from sandblaster.strads.program import checksum
from sandblaster.strads.worker import BlockWorker
from sandblaster.warm_start_worker import WarmStartWorker
from sandblaster.worker import ChunkProgram


WINDOW_CHUNKS_MIN: Final = 64
"""Chunks that may be assigned beyond the oldest unfinished one; at least two per worker."""

_FREE: Final = frozenset(
    {
        "tolerance",
        "value_tolerance",
        "value_iterations",
        "max_iterations",
        "max_evaluations",
        "rounding",
        "history",
        "sufficient_decrease",
        "curvature",
    }
)
"""Settings of methods that may change when a run resumes."""


def check_model(
    config: SandblasterSettings, module: nn.Module, task: TaskSpec, n_replicas: int
) -> None:
    """Raise JobError if this method cannot train this module, or not with so many replicas."""
    if config.method != PROGRAM:
        refuse_programs(module, task, n_replicas)
        if config.bounds is not None:
            check_bounds(config.bounds, module)
        return
    program = program_in(module, task.model)
    n_blocks = program.n_blocks
    check_data(task)
    if n_replicas > n_blocks:
        raise JobError(
            f"[cluster] replicas is {n_replicas}, and the program has {n_blocks} blocks: "
            "use no more replicas, or more n_blocks"
        )
    check_blocks(program)


def check_bounds(path: str, module: nn.Module) -> None:
    """Raise JobError if this is no file of bounds for this module."""
    trained = {name: one for name, one in module.named_parameters() if one.requires_grad}
    file = _bounds_file(path)
    arrays = {name: file.array(name) for name in file.entries}
    for name, array in arrays.items():
        side, _, of = name.partition(".")
        if side not in {"lower", "upper"} or of not in trained:
            raise JobError(
                f"[algorithm] bounds: {path} has {name!r}: use lower.NAME and upper.NAME of "
                f"trained parameters. {nearest(of, trained)}"
            )
        if trained[of].shape != array.shape:
            raise JobError(
                f"[algorithm] bounds: {name!r} has shape {list(array.shape)}, and the parameter "
                f"{list(trained[of].shape)}: use a file of this model"
            )
    for name in trained:
        lower, upper = arrays.get(f"lower.{name}", -np.inf), arrays.get(f"upper.{name}", np.inf)
        if not np.all((lower <= upper) & (lower < np.inf) & (upper > -np.inf)):
            raise JobError(
                f"[algorithm] bounds: of {name!r} some element has no number between its lower and "
                "its upper one: use lower <= upper"
            )


def _bounds_file(path: str) -> TensorFile:
    file = TensorFile.at(Path(path).absolute())
    try:
        _ = file.entries
    except (OSError, StorageError) as error:
        raise JobError(
            f"[algorithm] bounds: cannot read {path} (all hosts with shards need it there): {error}"
        ) from None
    return file


def shard_bounds(
    config: SandblasterSettings, name: str, context: BuildContext
) -> Mapping[VectorName, Vector]:
    """Return the bounds of what this shard holds, by the names that `line_search` has for them."""
    if config.bounds is None:
        return {}
    layout, file = context.layout, _bounds_file(config.bounds)
    index = int(shard_of(name).removeprefix("shard-"))

    def of(side: VectorName, free: float) -> Vector:
        named = [
            TensorSpec(name=f"{side}.{one.name}", shape=one.shape)
            for one in layout.tensors
            if f"{side}.{one.name}" in file.entries
        ]
        stored = reader(file, Layout.of(named, n_shards=1, dtype=layout.spec.dtype))

        def read(tensor: str, start: int, stop: int) -> Vector:
            own = f"{side}.{tensor}"
            found = own in file.entries
            return stored(own, start, stop) if found else np.full(stop - start, free, layout.dtype)

        return shard_values_from(layout, index, read)[: layout.n_gradient(index)]

    return {LOWER: of(LOWER, -np.inf), UPPER: of(UPPER, np.inf)}


def build_coordinator(config: SandblasterSettings, *, context: BuildContext) -> Role:
    n_examples = len(context.train_data()) if context.n_train is None else context.n_train
    shards = [Address(f"shard-{k}") for k in range(context.n_shards)]
    method, goal = _method_of(config, context)
    return Coordinator(
        CoordinatorConfig(
            chunk_sizes=config.chunk_sizes(n_examples=n_examples, n_replicas=context.n_replicas),
            window_chunks=max(WINDOW_CHUNKS_MIN, 2 * context.n_replicas),
            backups=config.backups,
            n_warm=0 if config.warm_start is None else config.warm_start.n_of(context.n_replicas),
            await_begin=context.await_begin,
            goal=goal,
            in_rounds=config.method == PROGRAM,
        ),
        method=method,
        shards=shards,
        n_examples=n_examples,
        second_copies={k: other_copy(k) for k in shards if context.shard_copies > 1},
    )


def _method_of(config: SandblasterSettings, context: BuildContext) -> tuple[Runnable, str]:
    """Return the method, and its goal."""
    model = context.task.model
    if config.method == PROGRAM:
        program = program_of(model)
        own = own_arguments(model.factory, model.arguments)
        kept = {key: one for key, one in own.items() if key not in program.bounds}
        # Values of other data would be taken for those of these.
        data = [program.checksum, checksum(*program.data)]
        goal = {"program": model.factory, "checksum": data, **kept}
        return Scheduled(program), json.dumps(goal, sort_keys=True, default=str)
    rounding = float(np.finfo(context.layout.dtype).eps) / 2.0
    chosen = config.chosen()
    if isinstance(chosen, LBFGS) and chosen.bounds:
        content = Path(chosen.bounds).read_bytes()
        chosen = msgspec.structs.replace(chosen, bounds=f"crc32 {zlib.crc32(content):08x}")
    goal_text = goal_of(chosen, loss=context.task.loss)
    return msgspec.structs.replace(chosen, rounding=rounding), goal_text


def goal_of(method: AnyMethod, *, loss: str) -> str:
    """Return what must be equal for a method to resume from a saved state.

    Tolerances and bounds may change, and how much of a history is remembered.
    """
    fields: dict[str, object] = msgspec.to_builtins(method)
    kept = {name: value for name, value in fields.items() if name not in _FREE}
    return json.dumps({"loss": loss, **kept}, sort_keys=True)


def build_replica(config: SandblasterSettings, *, index: int, context: BuildContext) -> Role:
    if config.method == PROGRAM:
        context.train_data()  # it refuses a host whose files are others
        return BlockWorker(
            program_of(context.task.model),
            layout=context.layout,
            shard_copies=context.shard_copies,
            await_begin=context.await_begin,
        )
    context, task = wb.with_data(context), context.task
    module = build_model(task.model)
    module.train()
    model = FlatModel(module, device=context.device)
    n_examples = len(context.train_data())
    client = wb.build_client(context, exchange=DOWNPOUR, frozen=())
    warm = config.warm_start
    if warm is not None and index >= warm.n_of(context.n_replicas):
        warm = None
    chunks = whole_worker(
        worker_config(config, context),
        client=client,
        executor=wb.local_executor(model, context, seed=(config.seed, 0), sums=True),
        samples=Samples(n_examples),
        await_begin=context.await_begin and warm is None,
    )
    if warm is None:
        return chunks
    settings = warm.downpour(loss=task.loss, seed=config.seed, n_replicas=context.n_replicas)
    part = DataShard(
        n_examples, replica_index=index, n_replicas=warm.n_of(context.n_replicas), seed=config.seed
    )
    first = build_first_part(settings, part, client=client, model=model, context=context)
    return WarmStartWorker(downpour=first, chunks=chunks, await_begin=context.await_begin)


def worker_config(config: SandblasterSettings, context: BuildContext) -> WorkerConfig:
    sizes = config.chunk_sizes(n_examples=len(context.train_data()), n_replicas=context.n_replicas)
    return WorkerConfig(chunk_sizes=sizes)


def whole_worker(
    config: WorkerConfig,
    *,
    client: ParameterClient,
    executor: LocalExecutor,
    samples: Samples,
    await_begin: bool = True,
) -> Replica:
    """Return a worker whose process holds the whole model; its executor takes gradients of sums."""
    model = executor.model
    trained = (item for item, spec in enumerate(model.specs()) if spec.kind == "parameter")
    program, plan = _program(
        config,
        Items(values=model.values, trained=frozenset(trained)),
        samples,
        client=client,
        names=member_names("replica", 1),
        await_begin=await_begin,
    )
    steps = Steps(
        program,
        client=client,
        executor=executor,
        slices=SlicePrefetch(executor.batches, plan, reuses=True),
        course=Alone(limits=wb.on_request()),
    )
    return Replica(steps)


def _program(
    config: WorkerConfig,
    items: Items,
    samples: Samples,
    *,
    client: ParameterClient,
    names: Sequence[Address],
    await_begin: bool | None,  # of the leader; None on other ranks
    shards: Sequence[int] | None = None,
) -> tuple[ChunkProgram, ChunkBatchPlan]:
    plan = ChunkBatchPlan(samples, mini_batch_size=config.chunk_sizes.mini_batch_size)
    tasks = None
    if await_begin is not None:
        tasks = GroupTasks(config, plan=plan, n_ranks=len(names), await_begin=await_begin)
    program = ChunkProgram(
        items,
        shards=shards,
        client=client,
        plan=plan,
        group_tasks=tasks,
        names=names,
        retry_seconds=config.retry_seconds,
    )
    return program, plan


# A warm start's first part shares client and model with the second.
def build_first_part(
    settings: DownpourSettings,
    part: DataShard,
    *,
    client: ParameterClient,
    model: FlatModel,
    context: BuildContext,
) -> Replica:
    assert settings.max_steps is not None
    return wb.whole_replica(
        settings,
        client=client,
        executor=wb.local_executor(
            model, context, clip_norm=settings.clip_norm, seed=(settings.seed, part.replica_index)
        ),
        data_shard=part,
        # The bound counts samples over all incarnations: a restarted one does the rest only.
        samples_max=settings.max_steps * settings.batch_size,
    )


def build_rank(
    name: str, *, config: SandblasterSettings, context: BuildContext, split: wb.Split
) -> Role:
    """Return the role "replica-R.M", "evaluator" or "evaluator.M", or raise LocalProtocolError.

    JobError if the data cannot be built, or the plan is not for this job.
    """
    place = wb.rank_in(name, context=context, split=split)
    if place.group == EVALUATORS:
        return wb.evaluating_rank(place, context=context, split=split)
    n_machines = split.plan.cluster.n_machines
    context = wb.with_data(context)
    parts = wb.replica_parts(
        place, context=context, split=split, batch=("portion", config.portion), sums=True
    )
    flow = parts.flow
    view = PartialView(context.layout, flow.items)
    trained = (item for item, spec in enumerate(view.tensors) if spec.kind == "parameter")
    program, plan = _program(
        worker_config(config, context),
        Items(
            values=wb.zeros_of(flow, parts.dtype), trained=frozenset(trained), counts=flow.counts
        ),
        Samples(len(context.train_data())),
        shards=view.shards,
        client=parts.client,
        names=member_names(place.group, n_machines),
        await_begin=None if place.index else context.await_begin,
    )
    return wb.assemble(
        place,
        split,
        parts,
        memory=context.memory,
        batch_plan=plan,
        program=program,
        limits=wb.on_request(),
        seed=(config.seed, 0),  # the same in all replicas: so are their sums
        seed_gradient=_sum_over_samples,
    )


def _sum_over_samples(layer: str, output: torch.Tensor, n_samples: int) -> torch.Tensor:
    del layer, n_samples
    return output.new_ones(()).expand_as(output)
