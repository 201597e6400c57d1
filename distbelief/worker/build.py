"""Builds the roles of a job: shards, evaluator, and the ranks of a partitioned model.

Each role is built in its own process. A rank never builds the whole model: it compiles its
dataflow and allocates the regions that it keeps; their values come from the shards.
"""

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, final

import msgspec
import torch
from torch import nn

from distbelief.config.algorithms import coordinator_of
from distbelief.config.job import Job
from distbelief.core.errors import JobError, LocalProtocolError
from distbelief.core.memory import Memory
from distbelief.core.pieces import Placed
from distbelief.core.vectors import Vector
from distbelief.graph.graph import LayerGraph
from distbelief.parameter_server.client.client import ParameterClient
from distbelief.parameter_server.client.factored import FactorSource
from distbelief.parameter_server.initial_values import shard_values, shard_values_from
from distbelief.parameter_server.layout import Layout, PartialView
from distbelief.parameter_server.policy import DOWNPOUR, ExchangePolicy
from distbelief.parameter_server.rules import UpdateRule
from distbelief.parameter_server.shard import Shard
from distbelief.parameter_server.shard_config import ClientConfig, ShardConfig, copy_names, shard_of
from distbelief.plans.compiler import Compiled, compile_plan
from distbelief.plans.plan import Plan, load
from distbelief.protocol.role import Address, Role, Seconds
from distbelief.task import dry_run, task as tk
from distbelief.task.data import Dataset, DataShard, DataSource, Indices, rebuilt
from distbelief.task.initializers import reader
from distbelief.task.losses import CHUNK, LOSS_METRIC, OWN, Measures, higher_is_better
from distbelief.task.task import BuildContext, Kind, RosterEntry
from distbelief.worker import batches
from distbelief.worker.downpour_settings import DownpourSettings
from distbelief.worker.evaluator import BestValues, Evaluation, Score, held_out
from distbelief.worker.execution import executor as ex
from distbelief.worker.execution.dataflow import dataflow
from distbelief.worker.execution.operations import Dataflow
from distbelief.worker.factors import LayerFactors
from distbelief.worker.group import EVALUATORS, GroupLeader, GroupRank, group_rank_of, member_names
from distbelief.worker.local_executor import FlatModel, LocalExecutor, SmallBatches, frozen_of
from distbelief.worker.lockfree import LockFreeSteps
from distbelief.worker.rank import Rank
from distbelief.worker.replica import Alone, Course, Program, Replica, Steps
from distbelief.worker.ring_training import RingTraining
from distbelief.worker.ring_values import RingValues
from distbelief.worker.steps import StepRunner, links_of
from distbelief.worker.training import Items, Training


def shard_names(n_shards: int, shard_copies: int) -> list[str]:
    return [name for k in range(n_shards) for name in copy_names(k, shard_copies)]


def roster(
    *,
    n_replicas: int,
    n_shards: int,
    shard_copies: int = 1,
    evaluates: bool = True,
    ranks: Sequence[int] = (),
    coordinator: str | None = None,
) -> list[RosterEntry]:
    """Return the roles of a job: shards first, since all others need them.

    If plans split the model, each replica has so many `ranks`, and the evaluator as the largest.
    """
    entries = [RosterEntry(name, "shard") for name in shard_names(n_shards, shard_copies)]
    if coordinator is not None:
        entries.append(RosterEntry(coordinator, "coordinator"))
    groups: list[tuple[str, Kind]] = [(f"replica-{r}", "replica") for r in range(n_replicas)]
    groups += [(EVALUATORS, "evaluator")] * evaluates
    for index, (group, kind) in enumerate(groups):
        if not ranks:
            entries.append(RosterEntry(group, kind))
            continue
        leader, *others = member_names(group, [*ranks, max(ranks)][index])
        entries += [RosterEntry(leader, kind), *(RosterEntry(name, "rank") for name in others)]
    return entries


def roster_of(job: Job, *, ranks: Sequence[int] = ()) -> list[RosterEntry]:
    """Return the roles of a job; `ranks` are those of each replica, if replicas are split."""
    return roster(
        n_replicas=job.cluster.n_replicas,
        n_shards=job.cluster.shards,
        shard_copies=job.cluster.shard_copies,
        evaluates=job.data.test is not None,
        ranks=ranks,
        coordinator=coordinator_of(job),
    )


def build_role(
    name: str,
    *,
    context: BuildContext,
    shard: Callable[[], Role],
    replica: Callable[[int], Role],
    rank: Callable[["Split"], Role],
    coordinator: Callable[[], Role] | None = None,
) -> Role:
    """Return the role of this name; LocalProtocolError if the job has none."""
    kind, _, index = name.partition("-")
    if context.plan is not None and group_rank_of(name) is not None:
        return rank(Split.of(context))
    match kind:
        case "shard" if name in shard_names(context.n_shards, context.shard_copies):
            return shard()
        case "replica" if index.isdecimal() and int(index) < context.n_replicas:
            return replica(int(index))
        case "coordinator" if not index and coordinator is not None:
            return coordinator()
        case "evaluator" if not index:
            return build_evaluator(context)
        case _:
            raise LocalProtocolError(
                f"no role {name!r} in a job of {context.n_shards} shards and "
                f"{context.n_replicas} replicas"
            )


def build_shard(
    name: str,
    *,
    rule: UpdateRule,
    context: BuildContext,
    policy: ExchangePolicy = DOWNPOUR,
    deals: bool = False,
    constants: Mapping[str, Vector] = MappingProxyType({}),
) -> Role:
    layout, file = context.layout, context.initial_file
    index = int(shard_of(name).removeprefix("shard-"))

    def initialise() -> Vector:
        if file is not None:
            return shard_values_from(layout, index, reader(file, layout))
        return shard_values(layout, index, context.initials, seed=context.task.model.seed)

    config = ShardConfig(
        index=index,
        layout=layout,
        rule=rule,
        policy=policy,
        name=name,
        is_replicated=context.shard_copies > 1,
        deals=deals,
        n_samples=context.n_train or 0,
        constants=constants,
    )
    return Shard(config, memory=context.memory, initialise=initialise)


def policy_of_shards(policy: ExchangePolicy) -> ExchangePolicy:
    """Return how shards fold in what they get: of a ring, the commits of one replica."""
    return DOWNPOUR if policy.route == "ring" else policy


def build_evaluator(context: BuildContext) -> Role:
    task = context.task
    dataset = context.test_data()
    sample = tk.sample_of(dataset, table="data.test")
    loss, metrics = tk.build_loss(task), tk.build_metrics(task, sample)
    names = dry_run.Names(model=task.model.factory, loss=task.loss, data="data.test")
    model = FlatModel(tk.build_model(task.model), device=context.device)
    return whole_evaluator(
        LocalExecutor(
            model,
            dataset,
            loss=loss,
            measures=Measures(loss, metrics),
            names=names,
            readers=context.readers.get("data.test"),
        ),
        client=build_client(context, exchange=None, frozen=model.frozen),
        kinds=_held_out(dataset, context),
        best=_best_values(context, next(iter(metrics))) if context.keeps_best else None,
    )


def _best_values(context: BuildContext, metric: str) -> BestValues:
    judged_by = tk.judged_by(
        context.task,
        metric,
        subset=context.evaluation_subset,
        seed=context.seed,
        averaged=context.averaged,
    )
    return BestValues(
        context.layout, higher_is_better=higher_is_better(metric), judged_by=judged_by
    )


def _held_out(dataset: Dataset, context: BuildContext) -> Sequence[Indices]:
    source = DataSource.of(dataset)
    found = held_out(len(source), subset=context.evaluation_subset, seed=context.seed)
    order = source.order
    return found if order is None else [order(0, kind, context.seed) for kind in found]


def whole_evaluator(
    executor: LocalExecutor,
    *,
    client: ParameterClient,
    kinds: Sequence[Indices],
    chunk: int = CHUNK,
    best: BestValues | None = None,
) -> Replica:
    batch_plan, model = batches.EvaluationPlan(kinds, chunk=chunk), executor.model
    assert executor.measures is not None
    steps = Steps(
        Evaluation(
            values=model.values, batch_plan=batch_plan, measures=executor.measures, best=best
        ),
        client=client,
        executor=executor,
        # Without readers it reads in its steps: nobody waits for it.
        slices=batches.SlicePrefetch(
            executor.batches if executor.batches.n_ahead else None, batch_plan
        ),
        course=Alone(limits=on_request()),
    )
    return Replica(steps)


def on_request() -> batches.Limits:
    """Return limits that allow no step: each request is a generation of its own."""
    return batches.Limits(first=0)


def whole_replica(
    config: DownpourSettings,
    *,
    client: ParameterClient,
    executor: LocalExecutor,
    data_shard: DataShard,
    await_begin: bool = True,
    samples_max: int | None = None,
    progress_seconds: Seconds = 0.5,
) -> Replica:
    """Return a replica of a whole model; `samples_max` is for all its incarnations together."""
    model, batch_plan = executor.model, training_plan(config, data_shard)
    # The executor clips, by torch's own function.
    program = Training(
        config,
        Items(values=model.values, trained=model.trained),
        client=client,
        n_ranks=1,
        is_whole=True,
        shapes=model.shapes,
        n_steps=batch_plan.n_steps,
        dealt=_dealt(batch_plan),
        small=executor.small,
        progress_seconds=progress_seconds,
    )
    steps = Steps(
        program,
        client=client,
        executor=executor,
        slices=batches.SlicePrefetch(executor.batches, batch_plan),
        # Without a supervisor nobody else would send `StartTraining`.
        course=Alone(
            limits=training_limits(config, batch_plan, samples_max=samples_max),
            begins=not await_begin,
        ),
    )
    return Replica(steps, placed=data_shard.placed)


TrainingData = batches.TrainingPlan | batches.DealtPlan


def training_plan(config: DownpourSettings, data_shard: DataShard) -> TrainingData:
    if config.order == "dealt":
        placed, order = data_shard.placed, data_shard.order_of_data
        epochs = config.epochs(data_shard.n_samples, None if placed is None else placed.pieces)
        return batches.DealtPlan(epochs, seed=config.seed, order=order)
    return batches.TrainingPlan(data_shard, batch_size=config.batch_size)


def _dealt(plan: TrainingData) -> batches.DealtPlan | None:
    return plan if isinstance(plan, batches.DealtPlan) else None


def training_limits(
    config: DownpourSettings, batch_plan: TrainingData, *, samples_max: int | None = None
) -> batches.Limits:
    n_steps, dealt = batch_plan.n_steps, _dealt(batch_plan)
    if dealt is not None:
        n_steps = lambda *_: dealt.n_dealt  # noqa: E731 -- whatever the positions are
    steps_max = config.max_steps if samples_max is None else None
    return batches.Limits(steps_max=steps_max, samples_max=samples_max, n_steps=n_steps)


def build_replica(index: int, *, config: DownpourSettings, context: BuildContext) -> Replica:
    """Return the replica of this index of an unpartitioned model."""
    context = with_data(context, index)
    data_shard = data_shard_of(index, config=config, context=context)
    config = config.in_steps(data_shard, n_replicas=context.n_replicas)
    module = tk.build_model(context.task.model)
    module.train()
    model = FlatModel(module, device=context.device)
    if config.exchange.route == "ring":
        return ring_replica(index, config=config, context=context, model=model)
    exchange, small = config.exchange, None
    factors: FactorSource | None = None
    if config.lockfree is not None:
        small = LockFreeSteps(
            model,
            config.lockfree,
            batch_size=config.batch_size,
            together=context.together,
            name=context.task.model.factory,
            inner=config.inner,
        )
    if exchange.sends_factors:
        workers, n_calls = context.n_replicas, config.pace.n_push
        if small is not None:
            factors = small.factors(workers=workers)
        else:
            tensors = model.named_tensors()
            factors = LayerFactors(module, tensors, workers=workers, n_calls=n_calls)
    seed = config.seed, index
    return whole_replica(
        config,
        client=build_client(context, exchange=exchange, frozen=model.frozen, factors=factors),
        executor=local_executor(
            model,
            context,
            clip_norm=config.clip_norm_of_step,
            seed=seed,
            small=small,
            keeps_all=config.inner is None and small is None,
        ),
        data_shard=data_shard,
        await_begin=context.await_begin,
        progress_seconds=progress_seconds(context),
    )


def ring_replica(
    index: int,
    *,
    config: DownpourSettings,
    context: BuildContext,
    model: FlatModel,
    samples_max: int | None = None,
) -> Replica:
    """Return a replica of a whole model that sums its gradients with the others, by a ring."""
    seed = config.seed, index
    executor = local_executor(model, context, clip_norm=config.clip_norm, seed=seed)
    data_shard = data_shard_of(index, config=config, context=context)
    batch_plan = batches.TrainingPlan(data_shard, batch_size=config.batch_size)
    shards = policy_of_shards(config.exchange)
    client = build_client(context, exchange=shards, frozen=model.frozen)
    own = RingValues(
        model.values,
        {i: spec for i, spec in enumerate(model.specs()) if spec.name not in model.frozen},
        config.rule,
        is_mean=config.exchange.weight == "mean",
        layout=context.layout,
    )
    program = RingTraining(
        Address(f"replica-{index}"),
        config,
        model.values,
        own=own,
        client=client,
        plan=batch_plan,
        progress_seconds=progress_seconds(context),
    )
    steps = Steps(
        program,
        client=client,
        executor=executor,
        slices=batches.SlicePrefetch(executor.batches, batch_plan),
        course=Alone(
            limits=training_limits(config, batch_plan, samples_max=samples_max),
            begins=not context.await_begin,
        ),
    )
    return Replica(steps)


def with_data(context: BuildContext, replica: int | None = None) -> BuildContext:
    """Return the context with its training data built, so that it is built once."""
    data = context.train_data(replica)
    is_part = replica is not None and context.has_parts
    n_train = len(data) if is_part else context.n_train
    return replace(context, datasets={**context.datasets, "data.train": data}, n_train=n_train)


def local_executor(
    model: FlatModel,
    context: BuildContext,
    *,
    seed: tuple[int, int],
    clip_norm: float | None = None,
    sums: bool = False,
    small: SmallBatches | None = None,
    keeps_all: bool = True,  # forward must not change any parameter; or only no frozen one
) -> LocalExecutor:
    task = context.task
    kept: Literal["frozen", "all"] = "all" if keeps_all or context.device != "cpu" else "frozen"
    return LocalExecutor(
        model,
        context.train_data(),
        loss=tk.build_loss(task),
        names=dry_run.Names(model=task.model.factory, loss=task.loss, data="data.train", kept=kept),
        clip_norm=clip_norm,
        seed=seed,
        sums=sums,
        small=small,
        readers=context.readers.get("data.train"),
    )


def data_shard_of(index: int, *, config: DownpourSettings, context: BuildContext) -> DataShard:
    data, n_replicas = DataSource.of(context.train_data()), context.n_replicas
    if context.has_parts:  # these data are of this replica alone
        index, n_replicas = 0, 1
    return DataShard(
        len(data),
        replica_index=index,
        n_replicas=n_replicas,
        seed=config.seed,
        order_of_data=data.order,
        placed=data.placed,
    )


def progress_seconds(context: BuildContext) -> Seconds:
    # A job overshoots its end by what is not reported yet; but the supervisor should get at most
    # 200 reports a second from all replicas together.
    return max(0.05, 0.005 * context.n_replicas)


def build_client(
    context: BuildContext,
    *,
    exchange: ExchangePolicy | None,  # of pushes; None: it only fetches, to evaluate
    frozen: Collection[str],  # parameters that do not train
    flow: Dataflow | None = None,
    factors: FactorSource | None = None,
) -> ParameterClient:
    """Return a client of all shards, or of those that hold what a rank keeps."""
    layout, config = context.layout, ClientConfig(pushes=False, averaged=context.averaged)
    if exchange is not None:
        config = ClientConfig.of(exchange)
    is_rounded = config.push is not None or config.fetch != "float32"
    if is_rounded and layout.dtype.itemsize == 8:
        raise JobError(
            "[algorithm.exchange] push, fetch or numbers rounds float32, and the model is of "
            "float64: leave them out, or convert the model"
        )
    return ParameterClient(
        config,
        PartialView(layout, None if flow is None else flow.items, frozen=frozen),
        memory=context.memory,
        shard_copies=context.shard_copies,
        factors=factors,
    )


@final
@dataclass(frozen=True, kw_only=True)
class Split:
    plan: Plan
    graph: LayerGraph  # of the model, its loss last
    # Layers that are computed whole; they may lie on the meta device.
    modules: Mapping[str, nn.Module]
    device: str = "cpu"  # on which ranks compute: "cpu", "cuda"
    frozen: frozenset[str] = frozenset()  # parameters that do not train

    @property
    def fingerprint(self) -> str:
        # Everything that all ranks must have in common.
        text = msgspec.json.encode(
            (self.plan.graph, self.plan.batch, self.plan.micro_batches)
        ) + msgspec.json.encode(self.plan.placements, order="sorted")
        return hashlib.sha256(text).hexdigest()[:16]

    def compiled(self) -> Compiled:
        return compile_plan(
            self.graph,
            self.plan.placements,
            batch=-(-self.plan.batch // self.plan.micro_batches),
            n_machines=self.plan.cluster.n_machines,
        )

    @classmethod
    def of(cls, context: BuildContext, *, has_loss: bool = True) -> "Split":
        """Return how the job's plan partitions its model; GraphError if it has no layer graph."""
        assert context.plan is not None
        plan, task = load(context.plan), context.task
        graph = plan.captured_graph()
        # Always built, because operations of the user's own are registered by its imports.
        module = tk.build_on_meta(task.model)
        assert context.sample is not None
        loss = tk.loss_module(graph, context.sample, task.loss) if has_loss else None
        modules = tk.modules_of(graph, module, loss)
        return cls(
            plan=plan, graph=graph, modules=modules, device=context.device, frozen=frozen_of(module)
        )


def pushing_ranks(split: Split, layout: Layout) -> dict[Address, list[int]]:
    """Return for each shard the ranks of a replica that push to it."""
    found: dict[Address, list[int]] = {Address(f"shard-{k}"): [] for k in range(layout.n_shards)}
    for rank in range(split.plan.cluster.n_machines):
        for k in PartialView(layout, kept_by(rank, split, layout).items).shards:
            found[Address(f"shard-{k}")].append(rank)
    return found


def kept_by(rank: int, split: Split, layout: Layout) -> Dataflow:
    """Return the dataflow of one rank, whose items it fetches and pushes."""
    flow = dataflow(split.compiled(), rank, loss=split.graph.outputs[-1])
    return ex.with_counts(flow, {spec.name for spec in layout.tensors})


def rank_in(name: str, *, context: BuildContext, split: Split) -> GroupRank:
    """Return the rank of this name, or raise LocalProtocolError if the job has none."""
    rank = group_rank_of(name)
    n_machines = split.plan.cluster.n_machines
    n_replicas = context.n_replicas
    if rank is None or rank.index >= n_machines or (rank.replica or 0) >= n_replicas:
        raise LocalProtocolError(f"no rank {name!r} in a job of {n_replicas} x {n_machines} ranks")
    return rank


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RankBuild:
    """What differs between ranks with different programs."""

    flow: Dataflow  # its operations and the items that it keeps
    dtype: torch.dtype  # of these items
    client: ParameterClient
    reader: batches.SliceReader


def assemble(  # noqa: PLR0913 -- one call describes a rank
    rank: GroupRank,
    split: Split,
    parts: RankBuild,
    *,
    memory: Memory,
    batch_plan: batches.BatchPlan,
    program: Program,
    limits: batches.Limits,
    seed: tuple[int, ...],
    begins: bool = True,  # without being asked to
    deal: batches.DealtPlan | None = None,
    training: bool = True,
    seed_gradient: ex.Seed = ex.mean_over_samples,
    placed: Placed | None = None,
) -> Replica:
    """Return the role of a rank; if the plan has only one, that of a replica."""
    flow, n_ranks = parts.flow, split.plan.cluster.n_machines
    names = member_names(rank.group, n_ranks)
    micro_batches = split.plan.micro_batches if training else 1
    execution = ex.PartitionExecutor(
        flow,
        dtype=parts.dtype,
        modules=split.modules,
        device=split.device,
        seed_gradient=seed_gradient,
    )
    executor = StepRunner(
        execution,
        links=links_of(
            execution,
            names,
            rank.index,
            memory=memory,
            batch=split.plan.batch,
            micro_batches=micro_batches,
        ),
        batch_plan=batch_plan,
        micro_batches=micro_batches,
        training=training,
        seed=seed,
    )
    reader = None if parts.reader.reads_nothing else parts.reader
    slices = batches.SlicePrefetch(reader, batch_plan, reuses=n_ranks == 1)
    shapes = [region.shape for _, region in flow.items]
    course: Course = Alone(limits=limits, begins=begins)
    if n_ranks > 1:
        plan, leader = split.fingerprint, None
        if rank.index == 0:
            leader = GroupLeader(n_ranks, plan=plan, limits=limits, deal=deal, begins=begins)
        course = Rank(rank, n_ranks=n_ranks, plan=plan, executor=executor, leader=leader)
    steps = Steps(
        program, client=parts.client, executor=executor, slices=slices, course=course, shapes=shapes
    )
    return Replica(steps, placed=placed)


def evaluating_rank(rank: GroupRank, *, context: BuildContext, split: Split) -> Replica:
    task, plan, graph = context.task, split.plan, split.graph
    dataset = context.test_data()
    n_machines = plan.cluster.n_machines
    compiled = ex.inference_of(
        graph,
        plan.placements,
        outputs=list(dict.fromkeys(evaluated_layers(graph, task))),
        batch=plan.batch,
        n_machines=n_machines,
    )
    outputs = frozenset(compiled.graph.outputs)
    flow = dataflow(compiled, rank.index, training=False, outputs=outputs)
    dtype = dtype_of(context)
    client = build_client(context, exchange=None, frozen=split.frozen, flow=flow)
    kinds = _held_out(dataset, context)
    batch_plan = batches.EvaluationPlan(kinds, chunk=plan.batch)
    reader = batches.SliceReader(
        dataset,
        graph=graph,
        reads=flow.reads,
        dtype=dtype,
        keeps_targets=rank.index == 0,
        table="data.test",
        readers=context.readers.get("data.test"),
    )
    measures = Measures(tk.build_loss(task), tk.build_metrics(task, context.sample))
    program = Evaluation(
        values=zeros_of(flow, dtype),
        batch_plan=batch_plan,
        measures=measures,
        score=score_of(graph, task, measures),
    )
    return assemble(
        rank,
        split,
        RankBuild(flow=flow, dtype=dtype, client=client, reader=reader),
        memory=context.memory,
        batch_plan=batch_plan,
        program=program,
        limits=on_request(),
        seed=(context.seed,),
        training=False,
    )


def dtype_of(context: BuildContext) -> torch.dtype:
    is_double = context.layout.dtype.itemsize == 8
    return torch.float64 if is_double else torch.float32


def zeros_of(flow: Dataflow, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return one flat tensor per item; their values come from the shards."""
    return [torch.zeros(region.n_elements, dtype=dtype) for _, region in flow.items]


def evaluated_layers(graph: LayerGraph, task: tk.TaskSpec) -> tuple[str, ...]:
    """Return the layers from which loss and metric follow; the last is the model's own loss."""
    if task.loss != OWN:
        return graph.outputs[:-1]
    return graph.outputs if {*task.metrics} - {LOSS_METRIC} else graph.outputs[-1:]


def score_of(graph: LayerGraph, task: tk.TaskSpec, measures: Measures) -> Score:
    """Return what computes loss and metrics from `evaluated_layers`."""
    wanted = evaluated_layers(graph, task)
    fields = graph.fields or ((),)

    def score(found: Sequence[torch.Tensor], targets: object) -> Sequence[float]:
        by_name = dict(zip(dict.fromkeys(wanted), found, strict=True))
        outputs = rebuilt({path: by_name[name] for path, name in zip(fields, wanted, strict=False)})
        if task.loss != OWN:
            return measures.of(outputs, targets)
        loss = float(by_name[wanted[-1]].mean(dtype=torch.float64))
        return measures.of(outputs, targets, loss=loss)

    return score


def replica_parts(
    rank: GroupRank,
    *,
    context: BuildContext,
    split: Split,
    batch: tuple[str, int],
    exchange: ExchangePolicy = DOWNPOUR,
    frozen: Collection[str] = (),
    sums: bool = False,  # losses of batches are added up
) -> RankBuild:
    """Return the parts of a rank.

    `batch` is the key of [algorithm] for the number of samples computed at once, and its value; a
    JobError if the plan is for other batches.
    """
    key, n_samples = batch
    if n_samples != split.plan.batch:
        raise JobError(
            f"[algorithm] {key} is {n_samples}, and the plan is for batches of "
            f"{split.plan.batch}: plan again, or use that"
        )
    flow = kept_by(rank.index, split, context.layout)
    dtype, dataset = dtype_of(context), context.train_data()
    return RankBuild(
        flow=flow,
        dtype=dtype,
        client=build_client(context, exchange=exchange, frozen=frozen, flow=flow),
        reader=batches.SliceReader(
            dataset,
            graph=split.graph,
            reads=flow.reads,
            dtype=dtype,
            readers=context.readers.get("data.train"),
            sums=sums,
        ),
    )


def build_rank(name: str, *, config: DownpourSettings, context: BuildContext, split: Split) -> Role:
    """Return the role of this name: "replica-R.M", "evaluator" or "evaluator.M"."""
    rank = rank_in(name, context=context, split=split)
    if rank.replica is None:
        return evaluating_rank(rank, context=context, split=split)
    context = with_data(context, rank.replica)
    data_shard = data_shard_of(rank.replica, config=config, context=context)
    config = config.in_steps(data_shard, n_replicas=context.n_replicas)
    batch = "batch_size", config.batch_size
    exchange, frozen = config.exchange, split.frozen
    parts = replica_parts(
        rank, context=context, split=split, batch=batch, exchange=exchange, frozen=frozen
    )
    flow = parts.flow
    batch_plan = training_plan(config, data_shard)
    n_ranks = split.plan.cluster.n_machines
    pushing: list[int] = []
    if config.local_rate and config.pace.sums_gradients:  # local steps follow the schedule
        ranks = pushing_ranks(split, context.layout)
        pushing = [len(ranks[Address(f"shard-{k}")]) for k in parts.client.view.shards]
    program = Training(
        config,
        Items(
            values=zeros_of(flow, parts.dtype),
            trained=flow.trained,
            counts=flow.counts,
            n_ranks=pushing,
        ),
        client=parts.client,
        n_ranks=n_ranks,
        is_whole=False,
        shapes=[region.shape for _, region in flow.items],
        n_steps=batch_plan.n_steps,
        dealt=_dealt(batch_plan),
        part=rank.index,
        progress_seconds=progress_seconds(context),
    )
    return assemble(
        rank,
        split,
        parts,
        memory=context.memory,
        batch_plan=batch_plan,
        program=program,
        limits=training_limits(config, batch_plan),
        begins=not context.await_begin,
        deal=_dealt(batch_plan),
        seed=(config.seed, rank.replica),
        placed=data_shard.placed,
    )
