"""Programs in real processes: jobs of linear models and factors, and what goes wrong with them."""

import signal
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from scipy import sparse

from distbelief.transport.keys import KeyFiles
from sandblaster import Lasso, LatentDirichletAllocation, MatrixFactorization
from sandblaster.optimizers.termination import Reason
from sandblaster.strads.program import run
from tests.processes.commands import Command, poll, sets, train
from tests.processes.test_join import Land, allow


pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(300)]

MODULE = """
import time
from sandblaster.strads import jobs


def slowly(module, seconds):
    push = module.program.push

    def slow(*arguments):
        time.sleep(seconds)
        return push(*arguments)

    module.program.push = slow
    return module


def lasso(**arguments):
    return slowly(jobs.lasso(**arguments), 0.25)


def factors(**arguments):
    return slowly(jobs.factors(**arguments), 0.02)


def topics(**arguments):
    return slowly(jobs.topics(**arguments), 0.05)
"""

TABLES = """
[algorithm]
name = "sandblaster"
method = "strads"
loss = "mse"

[cluster]
replicas = 3
shards = 2

[output]
directory = "runs/tiny"
report_every = "500 ms"
snapshot_every = "500 ms"
"""

LASSO = f"""{TABLES}
[model]
factory = "slow:lasso"
arguments = {{ x = "x.npz", y = "y.npy", alpha = 0.01, tol = 1e-9, n_blocks = 4, max_iter = 200 }}

[data.train]
factory = "sandblaster.strads.jobs:samples"
arguments = {{ x = "x.npz", y = "y.npy" }}

[data.test]
factory = "sandblaster.strads.jobs:samples"
arguments = {{ x = "x.npz", y = "y.npy" }}
"""

FACTORS = f"""{TABLES}
[model]
factory = "slow:factors"

[model.arguments]
ratings = "ratings.npz"
n_components = 3
biases = true
max_iter = 20
tol = -1.0
n_blocks = 5

[data.train]
factory = "sandblaster.strads.jobs:entries"
arguments = {{ ratings = "ratings.npz" }}
"""

TOPICS = f"""{TABLES.replace("mse", "cross_entropy")}
[model]
factory = "slow:topics"

[model.arguments]
counts = "counts.npz"
held_out = "held_out.npz"
n_components = 3
doc_topic_prior = 0.2
learn_doc_topic_prior = true
max_iter = 14
tol = -1.0
evaluate_every = 4
n_blocks = 4

[data.train]
factory = "sandblaster.strads.jobs:documents"
arguments = {{ counts = "counts.npz" }}

[data.test]
factory = "sandblaster.strads.jobs:documents"
arguments = {{ counts = "held_out.npz" }}

[evaluation]
metric = "loss"
"""

X = sparse.csc_array(sparse.random_array((300, 400), density=0.1, rng=np.random.default_rng(0)))
Y = X[:, ::20].sum(axis=1) + 0.05 * np.random.default_rng(1).normal(size=300)
MASK = np.random.default_rng(2).random((90, 60)) < 0.3
RATINGS = sparse.csr_array(np.where(MASK, np.random.default_rng(3).normal(size=(90, 60)), 0.0))

COUNTS = sparse.csr_array(np.random.default_rng(4).poisson(0.3, (40, 60)))
HELD_OUT = sparse.csr_array(np.random.default_rng(5).poisson(0.3, (9, 60)))


def write_files(tmp_path: Path) -> None:
    sparse.save_npz(tmp_path / "x.npz", X)
    np.save(tmp_path / "y.npy", Y)
    sparse.save_npz(tmp_path / "ratings.npz", RATINGS)
    start = {"coefficients": np.ones(400), "intercept": np.ones(1), "predictor": np.ones(300)}
    save_file(start, tmp_path / "start.safetensors")
    (tmp_path / "slow.py").write_text(MODULE)
    (tmp_path / "lasso.toml").write_text(LASSO)
    (tmp_path / "factors.toml").write_text(FACTORS)
    sparse.save_npz(tmp_path / "counts.npz", COUNTS)
    sparse.save_npz(tmp_path / "held_out.npz", HELD_OUT)
    (tmp_path / "topics.toml").write_text(TOPICS)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_files(tmp_path)
    return tmp_path


def check_bits(run_of: Command, name: str, *, max_iter: int = 20) -> None:
    """Compare the model that a run has left with the tables of one process."""
    if name == "lasso":
        model = Lasso(alpha=0.01, tol=1e-9, n_blocks=4, max_iter=200)
        _, tables = run(model.program(X, Y))
    else:
        factors = MatrixFactorization(3, biases=True, max_iter=max_iter, tol=-1.0, n_blocks=5)
        _, tables = run(factors.program(RATINGS))
    found = load_file(run_of.run / "model.safetensors")
    assert found.keys() == tables.keys()
    for table, values in tables.items():
        assert found[table].tobytes() == values.tobytes(), table


ENDLESS = sets("model.arguments.max_iter=1000000")


def check_endless(command: Command, *options: str) -> None:
    """Interrupt factors that go on and on; resume them for some passes, and compare the bits."""
    command.interrupt()
    n = int(command.summary()["figures"]["iteration"]) + 4
    more = (*options, *sets(f"model.arguments.max_iter={n}"))
    with train(command.folder, "--resume", "runs/tiny", *more, job=("factors.toml",)) as last:
        last.ends(seconds=240)
    check_bits(last, "factors", max_iter=n)


def kill(command: Command, role: str) -> None:
    """Kill a role after another round, and wait for its successor."""
    before = n_rounds(command)
    poll(lambda: n_rounds(command) > before, seconds=120)
    command.kill(role)
    poll(lambda: len(command.pids(role)) > 1, seconds=60)


def n_rounds(command: Command) -> float:
    figures = cast("dict[str, float]", command.view().get("figures", {}))
    return figures.get("evaluations", 0.0)


@pytest.mark.untraced
def test_whichever_copy_is_killed_a_program_goes_on_in_its_series(folder: Path) -> None:
    def copies() -> dict[str, str]:
        rows = command.roles().items()
        return {str(row["state"]): role for role, row in rows if role.startswith("shard")}

    def whole() -> bool:
        return command.is_training() and {"primary", "backup"} <= {*copies()}

    more = sets("cluster.shards=1", "cluster.shard_copies=2")
    with train(folder, *more, *ENDLESS, job=("factors.toml",)) as command:
        poll(whole)
        for state in ("primary", "backup"):
            role, before = copies()[state], n_rounds(command)
            command.kill(role)
            poll(lambda r=role: len(command.pids(r)) > 1, seconds=60)  # type: ignore[misc]
            poll(lambda b=before: whole() and n_rounds(command) > b, seconds=120)  # type: ignore[misc]
        assert "continuing from a savepoint" not in command.told()
        check_endless(command, *more)


@pytest.mark.untraced
@pytest.mark.parametrize("name", [pytest.param("lasso", marks=pytest.mark.soak), "factors"])
def test_a_program_with_killed_processes_ends_with_the_bits_of_one_process(
    folder: Path, name: str
) -> None:
    with train(folder, job=(f"{name}.toml",)) as command:
        poll(command.is_training)
        for role in ("replica-1", "shard-0", "coordinator"):
            kill(command, role)
        command.ends(seconds=240)
    found = command.summary()
    assert found["restarts"] >= 3, command.output
    assert "updates" in found["figures"]
    ends = {"lasso": Reason.CONVERGED_GAP, "factors": Reason.MAX_ITERATIONS}
    assert found["stop_reason"] == ends[name].sentence
    check_bits(command, name)


def test_an_interrupted_program_resumes_and_goes_on_with_other_bounds(folder: Path) -> None:
    fewer = sets("model.arguments.max_iter=12")
    with train(folder, *fewer, job=("factors.toml",)) as first:
        poll(first.is_training)
        first.interrupt()
    resume = "--resume", "runs/tiny"
    with train(folder, *resume, *fewer, job=("factors.toml",)) as second:
        second.ends(seconds=240)
    assert second.summary()["figures"]["iteration"] >= 12
    with train(folder, *resume, job=("factors.toml",)) as third:  # with 20, as if not interrupted
        third.ends(seconds=240)
    check_bits(third, "factors")


def test_topics_that_were_killed_and_interrupted_are_those_of_the_estimator(folder: Path) -> None:
    with train(folder, job=("topics.toml",)) as first:
        poll(first.is_training)
        kill(first, "replica-1")
        kill(first, "shard-0")
        first.interrupt()
    with train(folder, "--resume", "runs/tiny", job=("topics.toml",)) as second:
        poll(second.is_training)
        kill(second, "coordinator")
        second.ends(seconds=240)
    model = LatentDirichletAllocation(3, doc_topic_prior=0.2, learn_doc_topic_prior=True)
    model.set_params(max_iter=14, tol=-1.0, evaluate_every=4, n_blocks=4)
    model.fit(COUNTS, held_out=HELD_OUT)
    found = LatentDirichletAllocation.from_model(second.run / "model.safetensors")
    assert found.components_.tobytes() == model.components_.tobytes()
    assert found.transform(HELD_OUT).tobytes() == model.transform(HELD_OUT).tobytes()
    assert second.summary()["held_out_loss"] == pytest.approx(-model.score(HELD_OUT), rel=1e-9)


def test_a_job_that_is_over_by_the_clock_resumes_but_not_with_other_shards(folder: Path) -> None:
    with train(folder, *sets("stop.seconds=1.0"), job=("factors.toml",)) as first:
        first.ends(seconds=60)
    more = "--resume", "runs/tiny"
    with train(folder, *more, *sets("cluster.shards=3"), job=("factors.toml",)) as second:
        assert second.wait(seconds=60) == 2
    assert "cannot be resharded for 3 shards" in " ".join(second.output.split())
    with train(folder, *more, job=("factors.toml",)) as third:
        third.ends(seconds=120)
    check_bits(third, "factors")


@pytest.mark.untraced
def test_hosts_join_and_leave_while_a_program_runs(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for place in (here, there):
        place.mkdir()
        write_files(place)
        KeyFiles(place / "keys").make()
    allow(here, there, "host")
    allow(there, here, "server")
    land = Land(here, there)
    more = sets("cluster.replicas=2", "cluster.shared_memory=false")
    options = (*more, "--listen", "tcp://127.0.0.1:0", "--keys", "keys", "--cores", "1")
    with train(here, *options, *ENDLESS, job=("factors.toml",)) as command:
        poll(command.is_training)
        with land.joined(command, "--allow-import", "sandblaster", allow="slow") as machine:
            poll(lambda: "replica 1: on " in command.told())
            before = n_rounds(command)
            poll(lambda: n_rounds(command) > before)
            machine.process.send_signal(signal.SIGINT)
            assert machine.wait() == 130, machine.said
        poll(lambda: "replica 1 has left with" in command.told())
        check_endless(command, *more)


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("model.arguments.alpha=-1.0", "alpha is -1.0; use a number above 0"),
        ("model.arguments.alhpa=0.1", "Lasso has no parameter 'alhpa'"),
        ("model.arguments.x=x.csv", "x.csv: give a file of numpy or scipy.sparse"),
        ("model.arguments.y=none.npy", "none.npy cannot be read"),
        ("model.arguments.n_blocks=500", "n_blocks is 500 for 400 columns"),
        ("algorithm.l2=0.1", "l2 is 0.1 with method 'strads'"),
        ("cluster.replicas=5", "replicas is 5, and the program has 4 blocks"),
        ("model.initial=start.safetensors", "a program begins at its own values"),
        ("model.factory=torch.nn:Identity", "torch.nn:Identity"),
    ],
)
def test_what_cannot_run_is_refused_in_a_sentence(folder: Path, override: str, text: str) -> None:
    words = ("train", "lasso.toml", *sets(override))
    with train(folder, *words[2:], job=("lasso.toml",)) as command:
        assert command.wait(seconds=120) not in {0, 130}
    assert text in " ".join(command.output.split()), command.output
