"""Preflight: tries model and data in a process of its own, before any role starts.

`check_main` runs on the supervisor's host: it prepares the data, and finds an error in model or
data once. Facts about both (names and shapes, no values) come back as a file, so the supervisor's
process never runs the user's code. `prepare_main` runs on each joining host: it imports the
functions that the job names, if the host's user allows them, and prepares the data.
"""

import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, cast

import msgspec
import numpy as np
import torch
from safetensors.torch import save_file

from distbelief.config.algorithms import coordinator_of, facts_of
from distbelief.config.job import Fit, Job
from distbelief.config.load import job_from_json
from distbelief.core import files
from distbelief.core.errors import DistBeliefError, JobError, StorageError
from distbelief.core.formatting import size
from distbelief.core.pieces import Pieces
from distbelief.core.tensor_files import TensorFile
from distbelief.core.torch_optimizers import check_names
from distbelief.graph.graph import as_real
from distbelief.job.launch.likeness import Likeness, likeness_of
from distbelief.job.launch.role_process import (
    RoleSpec,
    check_allowed,
    import_from,
    log,
    modules_of,
    read_spec,
)
from distbelief.job.run.folders import folder_at
from distbelief.job.run.model_file import TYPES
from distbelief.job.run.summary import DataFacts, TaskFacts
from distbelief.parameter_server.initial_values import Initial
from distbelief.parameter_server.layout import ElementType, Layout, TensorSpec
from distbelief.parameter_server.rules import check_groups
from distbelief.plans.plan import Plan
from distbelief.plans.step_cost import PlanCost
from distbelief.task import dry_run, task as tasks
from distbelief.task.data import Dataset, DataSource, first_of, marks_of, pieces_of, read_batch
from distbelief.task.forward import Sample
from distbelief.task.imports import place, shown_name
from distbelief.task.initializers import (
    InitialFile,
    lost,
    partial_values,
    reader,
    recorded_initials,
)
from distbelief.task.losses import higher_is_better
from distbelief.task.validation import (
    check,
    check_data,
    check_evaluation,
    check_fixed,
    check_sources,
    check_sums,
)
from distbelief.worker.local_executor import FlatModel


ANSWER_BYTES_MAX: Final = 1 << 26
# Of all values of a model, in float64: values, gradients and buffers, of one process and of ranks.
N_COPIES: Final = 8
PROOF_SECONDS_MAX: Final = 10.0  # after which no further plan is compared


class PreflightRequest(msgspec.Struct, frozen=True, kw_only=True):
    job: msgspec.Raw  # as JSON
    initial_file: str  # file for the module's initial values, if they are needed
    plan: str  # file for the plan, if replicas are split; its picture, and others, go beside it
    has_hosts: bool = False  # whether hosts may join, which compare themselves with this one


class PreflightResult(msgspec.Struct, frozen=True, kw_only=True):
    error: str | None = None  # what is wrong with the job; then the other fields do not count
    is_users: bool = False  # whether the user can fix it
    trace: str = ""  # where an exception came from, for `--traceback`
    tensors: tuple[TensorSpec, ...] = ()  # of the model
    dtype: ElementType = "float32"  # "float64" if any trained tensor has that type
    dtypes: dict[str, str] = {}  # torch's type of each tensor, by name
    aliases: dict[str, str] = {}  # other names of shared tensors, with the name in `tensors`
    initials: dict[str, Initial] = {}  # how shards draw each tensor, if they do
    initial_file: str | None = None  # file of the initial values, if they do not
    metric_name: str = "accuracy"  # the held-out metric
    other_metrics: tuple[str, ...] = ()  # measured beside it
    higher_is_better: bool = True
    judged_by: str = ""  # what the metric is of (`task.judged_by`)
    task: TaskFacts = TaskFacts()  # facts for the summary
    ranks: tuple[int, ...] = ()  # of each replica; empty if replicas are not split
    plans: dict[int, str] = {}  # file of the plan for each number of ranks
    costs: dict[int, PlanCost] = {}  # of each plan, if ranks are chosen by the hosts that join
    sample: Sample | None = None  # shapes and types of the data, for the plans
    likeness: Likeness | None = None  # what hosts that join must have in common with this one
    pieces: Pieces | None = None  # of the training data, if they are in some
    num_workers: dict[str, int] = {}  # processes that read for a role, by table
    proof: str = ""  # whether split replicas compute what one process does, for the user

    def formed(self, ranks: tuple[int, ...]) -> "PreflightResult":
        """Return the result for replicas of these ranks."""
        n_machines = ranks[0] if len({*ranks}) == 1 else ranks
        task = msgspec.structs.replace(self.task, n_machines=n_machines)
        return msgspec.structs.replace(self, ranks=ranks, task=task)

    def role_spec(self, job: Job, layout: Layout) -> RoleSpec:
        """Return the settings of all roles of a job, as far as they do not depend on the run."""
        return RoleSpec(
            job=msgspec.Raw(job.to_json()),
            layout=layout.spec,
            num_workers=self.num_workers,
            initials=self.initials,
            initial_file=self.initial_file,
            plans=self.plans,
            sample=self.sample,
            likeness=self.likeness,
            n_train=None if self.task.train is None else self.task.train.n_samples,
            pieces=self.pieces,
            marks=(self.task.train and self.task.train.marks) or None,
        )


def check_main(name: str, incarnation: int, path: str) -> int:
    """Handle the request in this file; return the process's exit status."""

    def check_job() -> PreflightResult:
        request = msgspec.json.decode(Path(path).read_bytes(), type=PreflightRequest)
        job = job_from_json(bytes(request.job))
        import_from(job)
        torch.set_num_threads(job.cluster.threads)
        tasks.prepare_data(job.task)
        prepared_mark(Path(path)).touch()
        answer = answer_to(
            job,
            initial_file=request.initial_file,
            plan=request.plan,
            computes_here=not request.has_hosts,
        )
        like = likeness_of(job, modules_of(job)) if request.has_hosts else None
        return msgspec.structs.replace(answer, likeness=like)

    return _answer(name, incarnation, Path(path), check_job)


def prepare_main(name: str, incarnation: int, path: str) -> int:
    """Check that the run's roles can be built on this host; return the exit status."""

    def prepare() -> PreflightResult:
        spec = read_spec(path)
        job = job_from_json(bytes(spec.job))
        import_from(job)
        check_allowed(job, spec.allowed or ())
        check_device(job.cluster.device, "join from a host with one")
        _check_reachable(spec.snapshots)
        tasks.prepare_data(job.task)
        if spec.likeness is not None:
            torch.set_num_threads(job.cluster.threads)
            may_round = job.cluster.rounding == "any"
            like = likeness_of(job, modules_of(job))
            spec.likeness.check(like, may_round=may_round)
            tasks.check_pieces(spec.pieces, like.pieces)
        return PreflightResult()

    return _answer(name, incarnation, Path(path), prepare)


def _check_reachable(place: str) -> None:
    """Reject a host whose shards would save where no other host looks."""
    if place and "://" not in place and not Path(place).is_dir():
        raise JobError(
            f"[cluster] checkpoints: this host has no directory {place}: mount the supervisor's "
            "there, or leave the key out"
        )
    if place:
        folder_at(place).names("shard-0")


def _answer(name: str, incarnation: int, request: Path, find: Callable[[], PreflightResult]) -> int:
    log(name, incarnation, "info", f"process {os.getpid()} begins")
    try:
        answer = find()
    except DistBeliefError as error:
        answer = PreflightResult(error=str(error), is_users=isinstance(error, JobError))
    except (Exception, SystemExit) as error:  # noqa: BLE001 -- the user's code
        trace = traceback.format_exc()
        sys.stderr.write(trace)  # to the log
        why = f"model and data failed the check: {type(error).__name__}: {error}"
        where = place(error) or ". Run the command again with --traceback to see where"
        answer = PreflightResult(error=why + where, is_users=True, trace=trace)
    files.write(answer_file(request), msgspec.json.encode(answer))
    log(name, incarnation, "info", f"ends: {answer.error or 'nothing is wrong'}")
    return 0


def answer_file(request: Path) -> Path:
    return request.with_name(".answer.json")


def prepared_mark(request: Path) -> Path:
    """Return the file that exists once the data of this request are prepared."""
    return request.with_name(".prepared")


def read_result(request: Path) -> PreflightResult | None:
    try:
        with answer_file(request).open("rb") as file:
            return msgspec.json.decode(file.read(ANSWER_BYTES_MAX), type=PreflightResult)
    except FileNotFoundError:
        return None


def answer_to(
    job: Job, *, initial_file: str, plan: str, proves: bool = True, computes_here: bool = True
) -> PreflightResult:
    """Try model and data in this process; the files are those of a `PreflightRequest`.

    If it `proves`, split replicas are compared with one process, unless the job leaves that out.
    Unless replicas compute on this host, it needs no GPU.
    """
    task, cluster = job.task, job.cluster
    if computes_here:
        check_device(cluster.device, "leave device out, or let hosts join that have one (--listen)")
    if not cluster.is_split:
        datasets = tasks.datasets_of(task)
        num_workers = _check_sources(job, datasets)
        facts = facts_of(job)
        # Local steps push what has become of trained parameters, also by forward.
        keeps_all, sparse = facts.inner is None or cluster.is_on_device, facts.takes_sparse
        check(task, job.batch_size, datasets, takes_sparse=sparse, keeps_all=keeps_all)
        if coordinator_of(job) is not None:
            check_fixed(task, job.batch_size, datasets)
            check_sums(task, job.batch_size, datasets)
        module = tasks.build_model(task.model)
        facts.check(module, task, cluster.n_replicas)
        found = _found(job, initial_file, FlatModel(module), datasets)
        proof = ""
        if facts.threads is not None and proves and cluster.proof:
            proof = _proof_of_threads(job, datasets["data.train"])
        return msgspec.structs.replace(found, proof=proof, num_workers=num_workers)
    # The planner imports scipy's solvers and matplotlib, which take half as long as torch. Other
    # jobs must not wait for that.
    from distbelief.plans.planner.job_plan import cost_of, draw, plans_for_job  # noqa: PLC0415 -- split jobs only

    datasets = tasks.datasets_of(task)
    num_workers = _check_sources(job, datasets)
    n_readers = cluster.partitions_max if cluster.plan is None else 2  # at least
    sample = check_data(task, job.batch_size, n_readers=n_readers, datasets=datasets)
    captured = tasks.capture_for(task, sample)
    check_evaluation(task, sample)
    if coordinator_of(job) is not None:
        check_sums(task, job.batch_size, datasets)
    if task.model.needs_module:
        check(task, job.batch_size, datasets)  # its values are needed, so the module is built
        model = FlatModel(tasks.build_model(task.model))
    else:
        with torch.device("meta"):
            model = FlatModel(tasks.build_model(task.model))
    facts_of(job).check(model.module, task, cluster.n_replicas)
    answer = _found(job, initial_file, model, datasets)
    made = plans_for_job(job, captured.graph, kept=Path(plan))
    most = made[Path(plan)]
    draw(most, captured.graph, Path(plan).with_suffix(".png"))
    counts = cluster.partitions
    answer = msgspec.structs.replace(
        answer,
        plans={plan.cluster.n_machines: str(file) for file, plan in made.items()},
        costs={
            plan.cluster.n_machines: cost_of(plan, job, captured.graph)
            for plan in (made.values() if isinstance(counts, Fit) else ())
        },
        sample=sample,
        num_workers=num_workers,
        proof=_proof(job, captured, [*made.values()], answer, datasets["data.train"])
        if proves and cluster.proof
        else "",
    )
    same = (most.cluster.n_machines,) * cluster.n_replicas
    return answer.formed(counts if isinstance(counts, tuple) else same)


def _check_sources(job: Job, datasets: Mapping[str, Dataset]) -> dict[str, int]:
    facts = facts_of(job)
    return check_sources(
        job.task,
        datasets,
        batch_size=job.batch_size,
        seed=facts.seed,
        n_replicas=job.cluster.n_replicas,
        is_dealt=facts.epochs is not None,
        is_driven=coordinator_of(job) is not None,
    )


def _proof(
    job: Job, captured: tasks.Captured, plans: list[Plan], found: PreflightResult, data: Dataset
) -> str:
    """Compare plans with one process; return a sentence on that, or raise JobError."""
    from distbelief.plans.planner.profiling.this_host import memory  # noqa: PLC0415 -- as above
    from distbelief.worker.proof import IncomparableError, Proof  # noqa: PLC0415

    begun = time.perf_counter()
    unknown = "Not proved that split replicas compute what one process does"
    n_bytes = N_COPIES * 8 * sum(math.prod(spec.shape) for spec in found.tensors)
    if n_bytes > memory():
        return f"{unknown}: that would take {size(n_bytes)} of memory"
    proved: list[int] = []
    but, sizes = "", (0, 0)
    for plan in sorted(plans, key=lambda plan: -plan.cluster.n_machines):
        if proved and time.perf_counter() - begun > PROOF_SECONDS_MAX:
            break
        proof = Proof(
            task=job.task,
            plan=plan,
            graph=captured.graph,
            sample=tasks.sample_of(data),
            dtype=torch.float64 if found.dtype == "float64" else torch.float32,
        )
        drawn = np.random.default_rng(0).integers
        sizes, is_own = proof.sizes, DataSource.of(data).order is not None
        batches = [
            read_batch(data, first_of(data, n) if is_own else drawn(len(data), size=n).tolist())
            for n in sizes
        ]
        try:
            but = proof.check(batches)
        except IncomparableError as error:
            return f"{unknown}: {error}"
        proved.append(plan.cluster.n_machines)
    n_first, n_second = sizes
    which = f" of {' and '.join(map(str, proved))} ranks" if len(plans) > 1 else ""
    return (
        f"Split replicas{which} compute what one process does{but}: two steps of {n_first} and "
        f"{n_second} samples agree (tried in {time.perf_counter() - begun:.1f} s)"
    )


def _proof_of_threads(job: Job, data: Dataset) -> str:
    """Compare copies of the model that share parameters with one; as `_proof`."""
    from distbelief.worker.lockfree import prove  # noqa: PLC0415 -- jobs with threads only

    task, n = job.task, max(1, job.batch_size // facts_of(job).n_small_batches)

    def build() -> torch.nn.Module:
        return tasks.build_model(task.model).train()

    chosen = first_of(data, 2 * n)
    first, second = (
        read_batch(data, [chosen[(k * n + i) % len(chosen)] for i in range(n)]) for k in range(2)
    )
    loss, name = tasks.build_loss(task), task.model.factory
    names = dry_run.Names(
        model=name,
        loss=task.loss,
        data="data.train",
        indices=range(n),
        takes_sparse=facts_of(job).takes_sparse,
    )
    dry_run.train(build(), first, loss=loss, names=names)  # of so few samples at once
    prove(build, (first, second), loss=loss, name=name)
    return f"Copies of the model for {facts_of(job).threads} threads compute what it does alone"


def check_device(device: str, fix: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        raise JobError(
            f"[cluster] device = {device!r}: torch {torch.__version__} sees no GPU on this host: "
            f"{fix}"
        )


def _found(
    job: Job, written: str, model: FlatModel, datasets: Mapping[str, Dataset]
) -> PreflightResult:
    task, tensors, specs = job.task, model.named_tensors(), tuple(model.specs())
    facts = facts_of(job)
    names = [spec.name for spec in specs if spec.kind == "parameter"]
    try:
        for rule in (facts.rule, facts.warm_start_rule):
            if rule is not None:
                check_groups(rule, names)
        patterns = cast("Mapping[str, object]", (facts.inner or {}).get("groups", {}))
        check_names(patterns, names, where="inner.groups")
    except ValueError as error:
        raise JobError(f"[algorithm] {error}") from None
    is_double = model.element_type == "float64"
    for name, tensor in tensors.items():
        _check_kept(name, tensor, n_whole_max=2**53 if is_double else 2**24)
    initials: dict[str, Initial] = {}
    initial_file: str | None = None
    match task.model.initial:
        case "seed":
            initials = dict(recorded_initials(lambda: tasks.build_model(task.model), list(tensors)))
        case "module" | InitialFile() as initial:
            initial_file = written
            values = {n: as_real(tensor.detach()) for n, tensor in tensors.items()}
            if isinstance(initial, InitialFile):
                values |= partial_values(initial, values, aliases=model.aliases())
            save_file(values, initial_file)
        case path:
            initial_file = path
            _check_weights(path, specs, model.element_type)
    held_out = datasets.get("data.test")
    sample = None if held_out is None else tasks.sample_of(held_out, table="data.test")
    metric, *others = tasks.metric_names(task, sample)
    return PreflightResult(
        tensors=specs,
        dtype=model.element_type,
        dtypes={name: str(t.dtype).removeprefix("torch.") for name, t in tensors.items()},
        aliases=dict(model.aliases()),
        initials=initials,
        initial_file=initial_file,
        metric_name=shown_name(metric),
        other_metrics=tuple(map(shown_name, others)),
        higher_is_better=task.test is None or higher_is_better(metric),
        judged_by=tasks.judged_by(
            task,
            metric,
            subset=job.evaluation.subset,
            seed=job.evaluation.seed,
            averaged=job.evaluation.averaged,
        ),
        pieces=pieces_of(datasets["data.train"]),
        task=TaskFacts(
            n_parameters=model.n_parameters,
            train=msgspec.structs.replace(
                DataFacts.of(datasets["data.train"]),
                marks=marks_of(datasets["data.train"]) or msgspec.UNSET,
                has_parts=(coordinator_of(job) is None and tasks.makes_parts(task.train))
                or msgspec.UNSET,
            ),
            test=None if held_out is None else DataFacts.of(held_out),
        ),
    )


def _check_kept(name: str, tensor: torch.Tensor, *, n_whole_max: int) -> None:
    """Reject a tensor whose values shards, which have floats, would not keep."""
    kind = str(tensor.dtype).removeprefix("torch.")
    why = ""
    if kind not in TYPES:
        why = kind
    elif not (kind.startswith(("float", "bfloat", "complex")) or tensor.is_meta):
        largest = (
            max((abs(int(end)) for end in tensor.aminmax()), default=0) if tensor.numel() else 0
        )
        why = f"{kind} with numbers above {n_whole_max:,}" if largest > n_whole_max else ""
    elif kind == "float64" and n_whole_max < 2**53 and not tensor.is_meta:
        what = lost(tensor.detach(), tensor.detach().float())
        why = what and f"{kind} with {what}, beyond float32"
    if why:
        raise JobError(
            f"[model] tensor {name!r} is {why}, which shards cannot keep: register it by "
            "register_buffer with persistent=False, so that each process makes its own"
        )


def _check_weights(path: str, tensors: tuple[TensorSpec, ...], dtype: ElementType) -> None:
    try:
        read = reader(TensorFile.at(Path(path)), Layout.of(tensors, n_shards=1, dtype=dtype))
        for tensor in tensors:
            read(tensor.name, 0, 1 if tensor.n_elements else 0)
    except StorageError as error:
        raise JobError(f"[model] initial: {error}") from error
