"""100 workers in virtual time: scheduled variables beside data-parallel and unscheduled ones.

The roles are those of a job: coordinator, shards, block workers. Their machines are those of
cluster rack-10g, one each; the time of a task is that of the entries it goes over.

    scheduled       priority, and only variables that hardly depend on each other at once
    unscheduled     all in turn, whatever depends on what (the Lasso-RR of the paper)
    data-parallel   samples dealt, not variables: accelerated proximal gradient (FISTA: Beck and
                    Teboulle 2009) with the sum over all workers in each step
    copies          topics, data-parallel: all words of the own documents, on copies of the table
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, cast

import msgspec
import numpy as np
from scipy import sparse
from scipy.sparse.linalg import svds
from scipy.special import gammaln
from typing_extensions import override

from distbelief.core.memory import Memory
from distbelief.core.vectors import Vector
from distbelief.parameter_server.layout import Layout, TensorSpec
from distbelief.parameter_server.rows import Rows, Values
from distbelief.parameter_server.rules import SGD
from distbelief.parameter_server.shard import Shard
from distbelief.parameter_server.shard_config import ShardConfig
from distbelief.protocol.role import Address, Compute, Cost, Role, Seconds
from distbelief.simulation.cluster import SimulatedCluster
from distbelief.simulation.driver import Builder
from distbelief.simulation.forecast.prepare import CostedRole
from distbelief.simulation.machines import CostScale
from experiments.benchmarks.batches.sparse_models import Problem
from experiments.benchmarks.batches.topics_and_factors import (
    ALPHA,
    BETA,
    N_TOPICS,
    counted,
    documents,
)
from sandblaster import MatrixFactorization
from sandblaster.chunks import COORDINATOR, ChunkSizes
from sandblaster.coordinator.coordinator import Coordinator
from sandblaster.coordinator.workers import CoordinatorConfig
from sandblaster.optimizers.termination import Reason
from sandblaster.strads.columns import Ids
from sandblaster.strads.descent import Descend, Descended, Score
from sandblaster.strads.documents import Matrix as Counts, uniforms
from sandblaster.strads.factorization import Factors, Turn
from sandblaster.strads.method import AnyProgram, Scheduled
from sandblaster.strads.program import Mark, Program, Pushed, Steps, Task, Types, run
from sandblaster.strads.topic_kernel import sampler
from sandblaster.strads.topics import Block as TopicBlock, LatentDirichletAllocation, Sample, Topics
from sandblaster.strads.worker import BlockWorker


SECONDS_PER_ENTRY: Final = 2e-9  # to go over one, as measured: of a product and of a sum
SECONDS_PER_SOLVED: Final = 24e-9  # as measured: of an entry, for a group of eight ranks
SECONDS_PER_DRAW: Final = 1.15e-9  # to weigh a topic for a token, as measured: 100 in 115 ns
TOPICS_SCALE: Final = 400.0  # 200 million tokens of 2 million words: a table of 1.8 GB
N_SHARDS: Final = 4
TARGET: Final = 1e-3  # above the minimum, relative


class Step(msgspec.Struct, frozen=True):
    """A gradient of samples; or the step of some variables, with the momentum."""

    is_gradient: bool
    momentum: float = 0.0


@dataclass(slots=True, eq=False)
class Part:
    """Samples of a block; and its variables, with what it knows of them."""

    rows: "sparse.csr_array[np.float64]"
    used: Ids  # columns with an entry in these
    targets: Values
    variables: slice
    last: Values  # the point before
    summed: Values  # all gradients so far


class FISTA(Program[Part, Step, Values, None]):
    """Lasso, data-parallel. "z" is where gradients are taken, "gradient" the sum of all of them."""

    def __init__(self, problem: Problem, alpha: float, *, n_blocks: int, n_steps: int) -> None:
        n, p = problem.x.shape
        self._x, self._y, self._alpha = sparse.csr_array(problem.x), problem.y, alpha
        self._steps, self._n = n_steps, n
        self._curvature = float(svds(problem.x, 1, return_singular_vectors=False)[0] ** 2) / n
        self.n_blocks = n_blocks
        self.tables: Mapping[str, Values] = {"z": np.zeros(p), "gradient": np.zeros(p)}
        self.types = Types(argument=Step, report=Values, state=object)
        self.keeps_state = True
        self._rows = np.linspace(0, n, n_blocks + 1).astype(int)
        self._columns = np.linspace(0, p, n_blocks + 1).astype(int)

    @override
    def load(self, block: int) -> Part:
        rows, variables = (slice(*ends[block : block + 2]) for ends in (self._rows, self._columns))
        own = self._x[rows]
        zeros = np.zeros(variables.stop - variables.start)
        used = np.unique(own.indices).astype(np.int64)
        return Part(own[:, used], used, self._y[rows], variables, zeros, zeros)

    @override
    def schedule(self, state: object = None) -> Steps[Step, Values, None]:
        inertia, penalty = 1.0, 0.0
        for number in range(self._steps):
            takes: list[dict[str, Rows]]
            takes = [{"z": self.load(block).used} for block in range(self.n_blocks)]
            reports = yield self._round(Step(is_gradient=True), takes)
            objective = float(sum(one[0] for one in reports)) + self._alpha * penalty
            end = Reason.MAX_ITERATIONS if number == self._steps - 1 else None
            yield Mark(objective=objective, n_updates=0, state=None, end=end)
            after = (1 + np.sqrt(1 + 4 * inertia**2)) / 2
            step = Step(is_gradient=False, momentum=float((inertia - 1) / after))
            inertia = after
            variables = [slice(*self._columns[b : b + 2].tolist()) for b in range(self.n_blocks)]
            takes = [{"z": one, "gradient": one} for one in variables]
            reports = yield self._round(step, takes)
            penalty = float(sum(one[0] for one in reports))

    def _round(self, step: Step, takes: "Sequence[Mapping[str, Rows]]") -> list[Task[Step]]:
        return [Task(block=b, argument=step, takes=one) for b, one in enumerate(takes)]

    @override
    def push(self, block: Part, argument: Step, taken: Mapping[str, Values]) -> Pushed[Values]:
        adds: dict[str, tuple[Rows, Values]]
        if argument.is_gradient:
            rest = block.rows @ taken["z"] - block.targets
            gradient = cast("Values", block.rows.T @ rest) / self._n
            adds = {"gradient": (block.used, gradient)}
            return Pushed(adds=adds, report=np.array([rest @ rest / (2 * self._n)]))
        gradient, block.summed = taken["gradient"] - block.summed, taken["gradient"].copy()
        moved = taken["z"] - gradient / self._curvature
        new = np.sign(moved) * np.maximum(np.abs(moved) - self._alpha / self._curvature, 0.0)
        z, block.last = new + argument.momentum * (new - block.last), new
        adds = {"z": (block.variables, z - taken["z"])}
        return Pushed(adds=adds, report=np.array([np.abs(z).sum()]))


class CopiedTopics(Program[TopicBlock, Sample, Values, None]):
    """Topics, data-parallel: each worker samples all words of its documents.

    As many parallel samplers do (Newman et al. 2009, YahooLDA): it takes the whole table, draws on
    its copy, and adds what it has changed; meanwhile it knows of no change of others.

    Args:
        topics: Whose documents, tokens, random numbers and priors these are.
        n_takes: How often a pass takes the table.
        n_passes: Without the first one, of any topics.
    """

    def __init__(self, topics: Topics, *, n_takes: int, n_passes: int) -> None:
        self._topics, self._n_passes, self._n_takes = topics, n_passes, n_takes
        self.n_blocks = topics.n_blocks
        tables = {name: topics.tables[name] for name in ("words", "sums")}
        self.tables: Mapping[str, Values] = tables
        self.types = Types(argument=Sample, report=Values, state=object)
        self.keeps_state = True
        n_words, n_blocks = len(topics.row_of), topics.n_blocks
        sizes = [len(range(bucket, n_words, n_blocks)) for bucket in range(n_blocks)]
        self._starts = np.cumsum([0, *sizes])  # of buckets, among rows

    @override
    def load(self, block: int) -> TopicBlock:
        one = self._topics.load(block)
        one.tokens[:, 0] += np.repeat(self._starts[:-1], np.diff(one.buckets)).astype(np.int32)
        order = np.argsort(one.tokens[:, 1], kind="stable")  # one document after the other
        one.tokens, one.keys = one.tokens[order], one.keys[order]
        one.buckets = np.linspace(0, len(order), self._n_takes + 1).astype(np.int64)
        return one

    @override
    def schedule(self, state: object = None) -> Steps[Sample, Values, None]:
        takes: dict[str, Rows] = {name: slice(0, len(self.tables[name])) for name in self.tables}
        for number in range(self._n_passes + 1):
            for part in range(self._n_takes):
                argument = Sample(number, part, self._topics.alpha, 0)
                blocks = range(self.n_blocks)
                yield [Task(block=one, argument=argument, takes=takes) for one in blocks]
            end = Reason.MAX_ITERATIONS if number == self._n_passes else None
            if number:
                yield Mark(objective=0.0, n_updates=0, state=None, end=end)

    @override
    def push(
        self, block: TopicBlock, argument: Sample, taken: Mapping[str, Values]
    ) -> Pushed[Values]:
        some, n_topics = slice(*block.buckets[argument.bucket :][:2]), len(argument.alpha)
        tokens, topics = block.tokens[some], block.topics[some]
        draws = uniforms(block.keys[some], argument.number)
        width = block.document_topics.shape[1]
        before = taken["words"].reshape(-1, n_topics)
        words, sums = np.zeros((len(before), width), np.int32), np.zeros(width, np.int64)
        words[:, :n_topics], sums[:n_topics] = before, taken["sums"]
        if argument.number:
            beta = self._topics.beta
            inverses, alpha = np.zeros((2, width), np.float32)
            inverses[:n_topics] = 1 / (sums[:n_topics] + beta * len(words))
            alpha[:n_topics] = argument.alpha
            numbers = words, block.document_topics, sums, inverses, alpha
            weights = np.ones(len(tokens), np.float32)
            rest = np.float32(beta), beta * len(words)
            sampler()(tokens, topics, draws, weights, *numbers, *rest)
        else:
            topics[:] = draws * n_topics
            np.add.at(words, (tokens[:, 0], topics), 1)
            np.add.at(block.document_topics, (tokens[:, 1], topics), 1)
            sums += np.bincount(topics, minlength=width)
        changes = (words[:, :n_topics] - before).ravel()
        changed = np.flatnonzero(changes)
        adds: dict[str, tuple[Rows, Values]] = {
            "words": (changed, changes[changed]),
            "sums": (slice(0, n_topics), sums[:n_topics] - taken["sums"]),
        }
        return Pushed(adds=adds, report=np.zeros(1))


@dataclass(eq=False)
class Run:
    """A program on simulated workers, and when each mark was reached."""

    program: AnyProgram
    n_workers: int
    marks: list[tuple[Seconds, float]]
    n_shards: int = N_SHARDS
    scale: float = 1.0  # of bytes and seconds: those of a problem so many times as large
    spent: Seconds = 0.0  # of the task that was computed last
    n_moved: float = 0.0  # bytes that all tasks have taken and added
    n_taken_max: float = 0.0  # bytes that a task has taken

    def play(self, *, within: Seconds = 1e4) -> None:
        from experiments.benchmarks.simulation import rack  # noqa: PLC0415 -- it imports this folder

        tables = self.program.tables
        specs = [TensorSpec(name=name, shape=values.shape) for name, values in tables.items()]
        layout = Layout.of(specs, n_shards=self.n_shards, dtype="float64")
        shards = [Address(f"shard-{k}") for k in range(self.n_shards)]
        replicas = [Address(f"replica-{r}") for r in range(self.n_workers)]
        push, schedule = self.program.push, self.program.schedule
        program = cast("Any", self.program)

        def timed(block: object, argument: object, taken: Mapping[str, Values]) -> Pushed[object]:
            pushed = push(block, argument, taken)
            self.spent = self.scale * seconds_of(self.program, block, argument, pushed)
            n_taken = self.scale * sum(values.nbytes for values in taken.values())
            self.n_taken_max = max(self.n_taken_max, n_taken)
            self.n_moved += n_taken
            for rows, values in pushed.adds.values():
                n_added = values.nbytes + (0 if isinstance(rows, slice) else rows.nbytes)
                self.n_moved += self.scale * n_added
            return pushed

        def marked(state: object = None) -> Steps[object, object, object]:
            steps, reports = schedule(state), None
            while True:
                step = steps.send(reports)  # type: ignore[arg-type] # None at first
                if isinstance(step, Mark):
                    self.marks.append((cluster.now, step.objective))
                reports = yield step

        program.push, program.schedule = timed, marked

        def shard(index: int, memory: Memory) -> Role:
            config = ShardConfig(index=index, layout=layout, rule=SGD(learning_rate=0.1))
            return Shard(config, memory=memory, initialise=lambda: _initial(tables, layout, index))

        def worker(memory: Memory) -> Role:
            del memory
            role = BlockWorker(program, layout=layout, await_begin=False)
            return CostedRole(kind="replica", role=role, adapt=self._costed)

        def coordinator(memory: Memory) -> Role:
            del memory
            config = CoordinatorConfig(
                chunk_sizes=ChunkSizes(mini_batch_size=1),
                backups=False,
                await_begin=False,
                in_rounds=True,
            )
            return Coordinator(config, method=Scheduled(program), shards=shards, n_examples=1)

        builders: dict[Address, Builder] = {COORDINATOR: coordinator}
        builders |= {name: partial(shard, k) for k, name in enumerate(shards)}
        builders |= dict.fromkeys(replicas, worker)
        options = replace(
            rack([*builders]),
            introduce=True,
            codec=False,
            trace="order",
            scales=dict.fromkeys(shards, CostScale(n_bytes=self.scale, frame_bytes=self.scale)),
        )
        cluster = SimulatedCluster(builders, seed=1, options=options)
        cluster.run_until(
            lambda: COORDINATOR in cluster.halted, within=within, max_events=1 << 60, every=50
        )
        assert cluster.halted[COORDINATOR] is None, cluster.halted[COORDINATOR]

    def _costed(self, kind: str, action: Compute) -> Compute:
        del kind
        done = action.work()
        cost = Cost(waiting=self.spent)
        return msgspec.structs.replace(action, work=lambda: done, cost=cost)

    def reached(self, objective: float) -> Seconds | None:
        """Return when the objective was first so low, after the first mark."""
        began = self.marks[0][0]
        return next((at - began for at, value in self.marks if value <= objective), None)


def seconds_of(program: object, block: Any, argument: object, pushed: Pushed[object]) -> Seconds:  # noqa: ANN401 -- of any program
    """Return the time of a task."""
    if isinstance(program, Factors):
        rank = cast("Turn", argument).rank
        solves = rank is not None and rank % program.n_together == 0
        of_entry = SECONDS_PER_SOLVED if solves else SECONDS_PER_ENTRY * (rank is None)
        return of_entry * len(block.columns)
    if isinstance(program, Topics | CopiedTopics):
        if isinstance(argument, Sample):
            bounds = block.buckets[argument.bucket : argument.bucket + 2]
            return SECONDS_PER_DRAW * float(np.diff(bounds)[0]) * len(argument.alpha)
        return 0.0
    return SECONDS_PER_ENTRY * n_gone_over(program, block, argument, pushed)


def n_gone_over(program: object, block: Any, argument: object, pushed: Pushed[object]) -> float:  # noqa: ANN401 -- of any program
    """Return the entries that a task goes over."""
    if isinstance(program, FISTA):
        return float(block.rows.nnz if cast("Step", argument).is_gradient else len(block.last))
    columns = block.columns
    if isinstance(argument, Score):
        return float(columns.matrix.nnz)
    if isinstance(argument, Descend) and isinstance(pushed.report, Descended):
        of = block.gathered.columns if argument.gathered else columns
        mean = of.matrix.nnz / max(of.matrix.shape[1], 1)
        return 2.0 * pushed.report.n_updates * float(mean)
    if block.gathered is not None and not isinstance(argument, Descend):
        return float((np.diff(block.gathered.columns.matrix.tocsr().indptr) ** 2.0).sum())
    return float(len(columns.norms))


def _initial(tables: Mapping[str, Values], layout: Layout, index: int) -> Vector:
    vector = np.zeros(layout.shard_size(index))
    for segment in layout.segments(index):
        values = tables[layout.tensors[segment.tensor_index].name]
        here = slice(segment.offset, segment.offset + segment.n_elements)
        vector[here] = values.ravel()[segment.start : segment.stop]
    return vector


def simulated(*, small: bool) -> dict[str, float]:
    n_workers = 4 if small else 100
    sizes = (100, 400) if small else (1000, 5000)
    problem = Problem.of(*sizes, per_column=10, n_used=sizes[0] // 20)
    alpha = problem.largest_alpha / 10
    least = problem.solved(alpha, tolerance=1e-12, max_iterations=1000).objective
    contestants: dict[str, AnyProgram] = {
        "scheduled": problem.program(alpha, n_blocks=n_workers),
        "unscheduled": problem.program(
            alpha, n_blocks=n_workers, schedule="round_robin", interference=np.inf,
            max_iterations=30,
        ),
        "data_parallel": FISTA(problem, alpha, n_blocks=n_workers, n_steps=30 if small else 150),
    }  # fmt: skip
    figures: dict[str, float] = {}
    print(f"simulated: {n_workers} workers, {N_SHARDS} shards, {problem.x.nnz} entries")
    for name, program in contestants.items():
        one = Run(program, n_workers, [])
        one.play()
        at = one.reached(least * (1 + TARGET))
        lowest = min(value for _, value in one.marks) / least - 1
        print(f"  {name}: {at} s to {TARGET:g}, at last {lowest:.1e} above the minimum", flush=True)
        if at is not None:
            figures[f"simulated_{name}_seconds"] = at
    for name in ("unscheduled", "data_parallel"):
        if f"simulated_{name}_seconds" in figures:
            other = figures[f"simulated_{name}_seconds"]
            figures[f"simulated_over_{name}"] = other / figures["simulated_scheduled_seconds"]
    return figures | _factors(n_workers, small=small) | _topics(n_workers, small=small)


def _factors(n_workers: int, *, small: bool) -> dict[str, float]:
    """Return how many times as fast all workers are as one, of factors."""
    rng = np.random.default_rng(0)
    shape, n = ((200, 100), 2000) if small else ((20_000, 500), 1_000_000)
    places = rng.integers(0, shape[0], n), rng.integers(0, shape[1], n)
    entries = sparse.csr_array(sparse.coo_array((rng.standard_normal(n), places), shape))
    seconds: list[Seconds] = []
    for n_used in (1, n_workers):
        model = MatrixFactorization(4, max_iter=3, tol=-1.0, n_blocks=n_workers)
        one = Run(model.program(entries), n_used, [])
        one.play()
        seconds.append(one.marks[-1][0] - one.marks[0][0])  # of two passes
    print(f"  factors: {seconds[0]:.3f} s with one worker, {seconds[1]:.3f} s with {n_workers}")
    return {"simulated_factors_gain": seconds[0] / seconds[1]}


def _topics(n_workers: int, *, small: bool) -> dict[str, float]:
    """Return seconds, passes and bytes to one log-likelihood, by rotation and by copies.

    The text is that of `topics`. Bytes and draws are priced as those of a corpus with `scale`
    times as many documents and words. A pass takes as long as any other; its topics are those
    that `run` finds, to the bit.
    """
    n_topics, n_passes, scale = (10, 3, 1.0) if small else (N_TOPICS, 12, TOPICS_SCALE)
    n_shards = N_SHARDS if small else n_workers  # one beside each worker, as in these systems
    if small:
        drawn = np.random.default_rng(0).poisson(0.5, (20, 40))
        counts: Counts = sparse.csr_array(drawn)
    else:
        counts, _ = counted(documents())

    def rotation(n: int) -> Topics:
        return LatentDirichletAllocation(
            n_topics, doc_topic_prior=ALPHA, topic_word_prior=BETA, max_iter=n, tol=-1,
            n_blocks=n_workers,
        ).program(counts)  # fmt: skip

    def copies(n: int, n_takes: int) -> CopiedTopics:
        return CopiedTopics(rotation(n), n_takes=n_takes, n_passes=n)

    contestants: dict[str, Callable[[int], AnyProgram]] = {"rotation": rotation}
    contestants |= {f"copies_{n}": partial(copies, n_takes=n) for n in (1, 4)}
    found = {name: _likelihoods(make(n_passes)) for name, make in contestants.items()}
    target = min(values[-1] for values in found.values())  # all reach it
    n_tokens, n_words = counts.sum(), counts.shape[1]
    print(f"  topics: {n_tokens} tokens, {n_words} words, {n_topics} topics, {scale:g} times that")
    figures = {"simulated_topics_likelihood": target}
    for name, make in contestants.items():
        one = Run(make(1), n_workers, [], n_shards=n_shards, scale=scale)
        one.play()  # a pass of any topics, and one; both are priced alike
        passes = next(k for k, value in enumerate(found[name], 1) if value >= target)
        seconds = one.marks[0][0] / 2
        mine = {
            "passes": float(passes),
            "seconds_per_pass": seconds,
            "seconds": passes * seconds,
            "megabytes_per_pass": one.n_moved / 2 / n_workers / 1e6,
            "megabytes_of_table": one.n_taken_max / 1e6,
        }
        figures |= {f"simulated_topics_{name}_{key}": value for key, value in mine.items()}
        words = ", ".join(f"{key} {value:.4g}" for key, value in mine.items())
        print(f"  topics by {name}: {words}; at last {found[name][-1]:.4f}", flush=True)
    for name in list(contestants)[1:]:
        seconds = figures[f"simulated_topics_{name}_seconds"]
        over = seconds / figures["simulated_topics_rotation_seconds"]
        figures[f"simulated_topics_over_{name}"] = over
    return figures


def _likelihoods(program: AnyProgram) -> list[float]:
    """Return the log-likelihood per token of words, given the topics of all, after each pass.

    Griffiths and Steyvers 2004, equation 2.
    """
    tables = {name: program.tables[name].copy() for name in ("words", "sums")}
    push, schedule, found = program.push, program.schedule, list[float]()
    watched = cast("Any", program)

    def noted(block: object, argument: object, taken: Mapping[str, Values]) -> Pushed[object]:
        pushed = push(block, argument, taken)
        for name in tables.keys() & pushed.adds.keys():
            rows, values = pushed.adds[name]
            tables[name][rows] += values
        return pushed

    def marked(state: object = None) -> Steps[object, object, object]:
        steps, reports = schedule(state), None
        while True:
            try:
                step = steps.send(reports)  # type: ignore[arg-type] # None at first
            except StopIteration:
                return None
            if isinstance(step, Mark) and step.end is None:
                found.append(likelihood())
            reports = yield step

    def likelihood() -> float:
        words, sums = tables["words"], tables["sums"]
        whole = BETA * len(words) / len(sums)
        total = (gammaln(words + BETA) - gammaln(BETA)).sum()
        total -= (gammaln(sums + whole) - gammaln(whole)).sum()
        return float(total / sums.sum())

    watched.push, watched.schedule = noted, marked
    run(program)
    return found
