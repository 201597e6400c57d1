"""The plan of a job with partitioned replicas: given, of the previous run, or made.

    partitions = 4            the planner makes one, for machines like this one
    partitions = [1, 4]       one for each number of ranks that a replica has
    partitions = { max = 4 }  one for each number of ranks that it may have
    pins = ["conv1=rows:4"]   required splits of some layers
    plan = "plan.json"        this plan, or an error if it is for another model, batch or loss
    --resume                  the plan of the previous run, if it still fits

The plan is saved as plan.json in the run directory, with a picture; with several plans, that is
the one with most ranks, and plan-N.json is for N ranks. No process here builds the model: it is
captured on the meta device.
"""

from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Final

import msgspec

from distbelief.config.job import Fit, Job
from distbelief.core.errors import JobError, StorageError
from distbelief.graph.graph import GraphError, LayerGraph
from distbelief.plans.cluster import Cluster
from distbelief.plans.cluster_file import load_cluster
from distbelief.plans.compiler import compile_plan
from distbelief.plans.plan import Plan, load, packed
from distbelief.plans.planner.cost_model import AnalyticCosts, single_sample
from distbelief.plans.planner.plan_picture import draw_plan
from distbelief.plans.planner.plan_report import lack
from distbelief.plans.planner.planning_result import pins, planning_result
from distbelief.plans.planner.profiling.this_host import HANDLING, HERE, Network, here
from distbelief.plans.planner.search import PlanningRequest
from distbelief.plans.step_cost import PlanCost, memory


JOB_SOLVER_SECONDS: Final = 5.0

# Between two processes of one host. Exact figures do not matter: messages that cost something, and
# bytes that cost little, keep the planner from needless messages.
LOOPBACK: Final = Network(bandwidth=2e9, latency=5e-5, message_overhead=5e-5, handling=HANDLING)


def plans_for_job(job: Job, graph: LayerGraph, *, kept: Path) -> dict[Path, Plan]:
    """Return the plans of a job by the files that they are written to, `kept` first."""
    made = {kept: plan_for_job(job, graph, kept=kept)}
    for count in job.cluster.partitions_wanted[:-1]:
        file = kept.with_stem(f"{kept.stem}-{count}")
        # A pin may need more ranks: then no replica has so few.
        with suppress(JobError) if isinstance(job.cluster.partitions, Fit) else nullcontext():
            made[file] = plan_for_job(job, graph, kept=file, count=count)
    return made


def cost_of(plan: Plan, job: Job, graph: LayerGraph) -> PlanCost:
    """Return what a plan of the planner asks of a host."""
    n, n_ranks, predicted = plan.micro_batches, plan.cluster.n_machines, plan.predicted
    compiled = compile_plan(graph, plan.placements, batch=-(-plan.batch // n), n_machines=n_ranks)
    return PlanCost(
        memory_bytes=max(memory(compiled, micro_batches=n, copies=2)),  # and push, and fetch
        seconds=0.0 if predicted is None else predicted.step_seconds,
        flops=_cluster(job, n_ranks).machines[0].flops,
    )


def plan_for_job(job: Job, graph: LayerGraph, *, kept: Path, count: int | None = None) -> Plan:
    """Return the plan of a job for replicas of `count` (or most) ranks; it is written to `kept`.

    JobError if there is no such plan, it is for another job, or none can be made. StorageError if
    it cannot be written.
    """
    count = count or job.cluster.partitions_max
    if job.cluster.plan is not None:
        plan = _given(job, graph, Path(job.cluster.plan))
    else:
        plan = _of_before(job, graph, kept, count) or _made(job, graph, count)
    # A plan of an older version has no graph.
    plan = msgspec.structs.replace(plan, captured=packed(graph))
    plan.save(kept)
    return plan


def draw(plan: Plan, graph: LayerGraph, path: Path) -> None:
    """Draw a plan as PNG; raise StorageError if it cannot be written."""
    compiled = compile_plan(
        graph, plan.placements, batch=plan.batch, n_machines=plan.cluster.n_machines
    )
    n = plan.cluster.n_machines
    title = f"{plan.model} on {n} {'machine' if n == 1 else 'machines'}, batch {plan.batch}"
    draw_plan(path, graph, plan.placements, traffic=compiled.traffic, title=title)


def _given(job: Job, graph: LayerGraph, path: Path) -> Plan:
    wanted, machines = job.cluster.partitions_max, job.cluster.machines
    try:
        plan = load(path)
        cluster = None if machines == HERE else load_cluster(machines)
        plan.check(graph, batch=job.batch_size, loss=job.loss, cluster=cluster)
    except (GraphError, StorageError) as error:
        raise JobError(f"[cluster] plan = {str(path)!r}: {error}") from error
    planned = plan.cluster.n_machines
    if wanted not in {1, planned}:
        raise JobError(
            f"[cluster] plan = {str(path)!r} is for {planned} machines, but partitions "
            f"= {wanted}: leave partitions out, or plan again"
        )
    return plan


def _of_before(job: Job, graph: LayerGraph, kept: Path, count: int) -> Plan | None:
    # The plan of the previous run, if it still fits.
    if not kept.is_file():
        return None
    try:
        plan = load(kept)
        plan.check(graph, batch=job.batch_size, loss=job.loss, cluster=None)
    except GraphError:
        return None  # the planner makes another
    return plan if plan.cluster.n_machines == count else None


def _made(job: Job, graph: LayerGraph, count: int) -> Plan:
    cluster, batch = _cluster(job, count), job.batch_size
    request = PlanningRequest(
        graph=graph,
        model=job.model.factory,
        loss=job.loss,
        cluster=cluster,
        batch=batch,
        costs=AnalyticCosts(cluster, batch=batch, single=single_sample(graph)),
        micro_batches=True,
        pins=pins(job.cluster.pins) if count > 1 else {},
        exactly=True,
        solver_seconds=JOB_SOLVER_SECONDS,
    )
    try:
        result = planning_result(request, [count])
    except GraphError as error:
        raise JobError(f"[cluster] {_asked(job)}: {error}") from error
    # Without a cluster file, hosts with more memory may join.
    if not (job.cluster.machines == HERE or isinstance(job.cluster.partitions, Fit) or result.fits):
        raise JobError(
            f"[cluster] {_asked(job)}: no plan fits the machines of {job.cluster.machines!r}: "
            f"{lack(result.planned[-1])}. Use more partitions or smaller batches, or correct the "
            "memory in the cluster file"
        )
    return result.plan


def _asked(job: Job) -> str:
    # The request as it stands in the job file.
    wanted = f", pins = {list(job.cluster.pins)!r}" if job.cluster.pins else ""
    return f"partitions = {job.cluster.partitions_text}{wanted}"


def _cluster(job: Job, count: int) -> Cluster:
    machines = job.cluster.machines
    if machines == HERE:
        return here(count, network=LOOPBACK)
    try:
        cluster = load_cluster(machines)
        first = cluster.first(count)
    except GraphError as error:
        raise JobError(f"[cluster] machines = {machines!r}: {error}") from error
    if count == 1 or len(job.cluster.partitions_wanted) == 1:
        return first
    # Which machines a replica gets is known later, so all shares are for the slowest one.
    slowest = min(cluster.machines, key=lambda machine: machine.flops)
    least = msgspec.structs.replace(slowest, memory=min(each.memory for each in cluster.machines))
    return msgspec.structs.replace(first, machines=(least,) * count)
