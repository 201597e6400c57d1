"""A run goes on with other numbers of shards and replicas, or stays as it was."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import fsspec
import msgspec
import numpy as np
import pytest
import torch

from distbelief.config.job import Job
from distbelief.core.errors import JobError, StorageError
from distbelief.core.spans import Spans
from distbelief.job.run import folders
from distbelief.job.run.checkpoints import CheckpointStore
from distbelief.job.run.directory import RunDirectory
from distbelief.job.run.resume import (
    CheckpointSet,
    Resumed,
    check_same,
    checkpoint_set_in,
    checkpoint_set_of,
    formed_before,
    making_checkpoint_set,
    newest_checkpoint_set,
    resume_run,
    start_from_scratch,
    write_checkpoint_set,
)
from distbelief.job.run.summary import DataFacts
from distbelief.parameter_server.checkpoint import ShardState, take
from distbelief.parameter_server.layout import Layout, TensorSpec
from distbelief.parameter_server.rules import Adagrad
from distbelief.parameter_server.shard_config import ShardConfig
from distbelief.parameter_server.step_counts import StepCounts
from distbelief.plans.placement import Placement
from distbelief.plans.plan import Plan, Target
from distbelief.protocol import SessionRecord
from distbelief.protocol.role import Snapshot
from tests.distbelief.jobs import speech
from tests.distbelief.parameter_server.pair import gather, scatter


TENSORS = (
    TensorSpec(name="w", shape=(500,)),
    TensorSpec(name="b", shape=(7,)),
    TensorSpec(name="m", shape=(300,), kind="buffer"),
)
TRAIN = DataFacts(n_samples=100, fingerprint="abc", marks=(1.5, 2.5))
FRAMES = 'factory = "speech.data:frames"'
RULE = Adagrad(learning_rate=0.02)


def job(shards: int = 2, replicas: int = 2, *more: str) -> Job:
    return speech(f"cluster.shards={shards}", f"cluster.replicas={replicas}", *more)


def layout(n_shards: int) -> Layout:
    return Layout.of(TENSORS, n_shards=n_shards)


def plan_of(n_machines: int, *machines: int) -> Plan:
    """A plan by which these compute one layer each, one after the other."""
    return Plan(
        graph="",
        inputs={},
        batch=1,
        loss="",
        cluster=Target(name="here", fingerprint="", n_machines=n_machines),
        placements={f"{i}": Placement.whole(1, m) for i, m in enumerate(machines)},
    )


class Run:
    """A run directory, and the lives of its run."""

    def __init__(self, path: Path) -> None:
        self.directory = RunDirectory.create(path)
        self.reports: list[str] = []

    def take_up(
        self, job: Job, *, train: DataFacts = TRAIN, plan: Plan | tuple[Plan, ...] = ()
    ) -> Resumed:
        """Begin a life, as far as the training does before it begins."""
        resumed = resume_run(
            job,
            self.directory,
            layout=layout(job.cluster.shards),
            train=train,
            report=self.reports.append,
            plans=plan if isinstance(plan, tuple) else (plan,) * job.cluster.n_replicas,
        )
        self.directory.write(self.directory.job_file, job.to_toml())
        return resumed

    def begun(self) -> Resumed:
        """Live a first life, in which the replicas train 40 and 52 samples."""
        first = self.take_up(job())
        self.train(first, 40, 52)
        return first

    def train(
        self, resumed: Resumed, *samples: int, n_shards: int = 2, names: Sequence[str] = ()
    ) -> None:
        """Save what shards have after so many samples of each replica."""
        for k in range(n_shards):
            self.save(resumed, k, *samples, cut=layout(n_shards), names=names)

    def save(
        self, resumed: Resumed, k: int, *samples: int, cut: Layout, names: Sequence[str] = ()
    ) -> None:
        stream = np.random.default_rng(k)
        tensors = [
            torch.arange(1.0, spec.n_elements + 1.0) * (i + 1) for i, spec in enumerate(cut.tensors)
        ]
        values = np.zeros(cut.shard_size(k), np.float32)
        gather(cut, k, tensors, values)
        sums = stream.random(cut.n_gradient(k)).astype(np.float32)
        lives = resumed.previous.incarnation
        state = ShardState(
            incarnation=lives,
            clock=30 + k,
            values=values,
            state={"sum_of_squares": sums},
            clients=tuple(
                # A shard has what others have not, and they meet at the least.
                SessionRecord(
                    name=names[r] if names else f"replica-{r}",
                    incarnation=lives + 1,
                    samples=n + 4 * (k == r),
                )
                for r, n in enumerate(samples)
            ),
            steps=StepCounts(30 + k),
        )
        config = ShardConfig(index=k, layout=cut, rule=RULE)
        label = f"{resumed.previous.label:05d}"
        resumed.store.save(f"shard-{k}", take(label, state, config=config))

    def files(self) -> list[str]:
        root = self.directory.snapshots
        return sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file())


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "run")


def newest(store: CheckpointStore, k: int) -> Snapshot:
    snapshot = store.newest(f"shard-{k}")
    assert snapshot is not None
    return snapshot


def values(store: CheckpointStore, n_shards: int) -> list[list[float]]:
    """Return the whole tensors that these snapshots hold."""
    tensors = [torch.zeros(spec.n_elements) for spec in layout(n_shards).tensors]
    for k in range(n_shards):
        scatter(layout(n_shards), k, newest(store, k).arrays["values"].copy(), tensors)
    return [tensor.tolist() for tensor in tensors]


def damage(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


# ------------------------------------------------------------------------- other cuts


def test_the_first_session_finds_nothing_and_says_what_its_checkpoints_are(run: Run) -> None:
    resumed = run.take_up(job())
    assert resumed.previous.missing == ("shard-0", "shard-1")
    assert resumed.notes == ()
    assert resumed.store.place == str(run.directory.snapshots)
    assert newest_checkpoint_set(run.directory) == (
        run.directory.snapshots,
        CheckpointSet(n_shards=2, n_replicas=2, train=TRAIN),
    )


def test_the_same_numbers_go_on_from_the_very_files(run: Run) -> None:
    run.begun()
    before = run.files()
    resumed = run.take_up(job(2, 2, "cluster.shard_copies=2"))
    assert run.files() == before
    assert resumed.notes == ()
    assert resumed.previous.before.samples == {"replica-0": 40, "replica-1": 52}


def test_a_replica_goes_on_where_it_was_when_it_is_split_otherwise(run: Run) -> None:
    run.begun()
    before = values(run.take_up(job()).store, 2)
    split = run.take_up(job(), plan=plan_of(2, 0, 1))
    assert split.previous.before.samples == {"replica-0.0": 40, "replica-1.0": 52}
    (line,) = split.notes
    assert line.startswith("ranks of each replica: 1 before, 2 now; each replica keeps")
    assert values(split.store, 2) == before
    for name in ("replica-0.0", "replica-0.1", "replica-1.1"):
        assert f'"{name}"' in newest(split.store, 0).facts["clients"]
    assert run.take_up(job(), plan=plan_of(2, 0, 1)).notes == ()
    again = run.take_up(job(), plan=plan_of(3, 0, 1, 2))
    assert again.previous.before.samples == {"replica-0.0": 40, "replica-1.0": 52}
    assert run.take_up(job(3, 2)).previous.before.samples == {"replica-0": 40, "replica-1": 52}


def test_replicas_may_go_on_with_different_numbers_of_ranks(run: Run) -> None:
    run.begun()
    before = values(run.take_up(job()).store, 2)
    plans = plan_of(1, 0), plan_of(2, 0, 1)
    mixed = run.take_up(job(), plan=plans)
    assert mixed.previous.before.samples == {"replica-0.0": 40, "replica-1.0": 52}
    assert mixed.notes[0].startswith("ranks of each replica: 1 before, 1, 2 now; each replica")
    assert values(mixed.store, 2) == before
    clients = json.loads(newest(mixed.store, 1).facts["clients"])
    samples = {"replica-0.0": 40, "replica-1.0": 52, "replica-1.1": 52}
    assert {name: client["samples"] for name, client in clients.items()} == samples
    assert run.take_up(job(), plan=plans).notes == ()
    assert run.take_up(job(), plan=plans[::-1]).notes[0].startswith("ranks of each replica: 1, 2")
    directory, cut = newest_checkpoint_set(run.directory)
    assert cut is not None
    content = msgspec.json.encode(cut).replace(b"[2,1]", b"[2,1,1]")
    with pytest.raises(StorageError, match=r"n_machines is .* for 2 replicas"):
        checkpoint_set_in(content, directory / "cut.json")


def test_replicas_that_hosts_have_formed_stay_as_they_are(run: Run) -> None:
    fit = job(2, 2, "cluster.partitions={max=2}")
    assert formed_before(fit, run.directory, {1, 2}) == ()
    plans = plan_of(1, 0), plan_of(2, 0, 1)
    resumed = run.take_up(fit)  # before they are formed
    directory, _ = newest_checkpoint_set(run.directory)
    write_checkpoint_set(directory, checkpoint_set_of(fit, TRAIN, plans))
    assert formed_before(fit, run.directory, {1, 2}) == ()  # nothing was saved: form them anew
    run.train(resumed, 40, 52, 52, names=("replica-0.0", "replica-1.0", "replica-1.1"))
    assert formed_before(fit, run.directory, {1, 2}) == (1, 2)
    assert run.take_up(fit, plan=plans).notes == ()
    three = job(2, 3, "cluster.partitions={max=2}")
    for other, counts in ((three, {1, 2}), (fit, {1})):
        with pytest.raises(JobError, match="this one has 2 shards and 2 replicas of 1, 2 ranks"):
            formed_before(other, run.directory, counts)


def test_replicas_of_one_process_are_not_formed_anew(run: Run) -> None:
    """They would begin at the start of their data: no shard knows their ranks."""
    run.begun()
    with pytest.raises(JobError, match="forms replicas of a new run only"):
        formed_before(job(2, 2, "cluster.partitions={max=2}"), run.directory, {1, 2})


def test_a_machine_that_holds_what_it_did_not_goes_on_where_its_replica_was(run: Run) -> None:
    """Another plan for as many machines began at sample 0, without a word.

    All had been computed on machine 0. What machine 1 holds now it has never pushed, so
    no shard knew how far it was; and a replica goes on where its last machine is.
    """
    resumed = run.take_up(job(), plan=plan_of(2, 0, 0))
    run.train(resumed, 40, 52, names=("replica-0.0", "replica-1.0"))
    before = values(resumed.store, 2)
    same = run.take_up(job(), plan=plan_of(2, 0, 0))
    assert same.previous.before.samples == {"replica-0.0": 40, "replica-1.0": 52}
    assert same.notes == ()
    other = run.take_up(job(), plan=plan_of(2, 0, 1))
    assert other.previous.before.samples == {"replica-0.0": 40, "replica-1.0": 52}
    (line,) = other.notes
    assert line.startswith("plan: another one than before")
    assert values(other.store, 2) == before
    clients = json.loads(newest(other.store, 1).facts["clients"])
    samples = {f"replica-{r}.{m}": n for r, n in ((0, 40), (1, 52)) for m in range(2)}
    assert {name: client["samples"] for name, client in clients.items()} == samples
    assert run.take_up(job(), plan=plan_of(2, 0, 1)).notes == ()


def test_a_run_whose_plan_nobody_wrote_down_goes_on_with_any(run: Run) -> None:
    """Of a version that kept only the number of machines."""
    resumed = run.take_up(job(), plan=plan_of(2, 0, 0))
    run.train(resumed, 40, 52, names=("replica-0.0", "replica-1.0"))
    directory, cut = newest_checkpoint_set(run.directory)
    assert cut is not None
    write_checkpoint_set(directory, msgspec.structs.replace(cut, plan=None))
    resumed = run.take_up(job(), plan=plan_of(2, 0, 1))
    assert resumed.notes == ()
    assert resumed.store.place == str(directory)
    assert resumed.previous.before.samples == {"replica-0.0": 40, "replica-1.0": 52}


def test_a_machine_that_has_nothing_on_a_shard_is_not_missed(run: Run) -> None:
    resumed = run.take_up(job(), plan=plan_of(2, 0, 1))
    cut = layout(2)
    run.save(resumed, 0, 40, 52, cut=cut, names=("replica-0.0", "replica-0.1"))
    run.save(resumed, 1, 44, cut=cut, names=("replica-0.1",))
    resumed = run.take_up(job(), plan=plan_of(2, 0, 1))
    assert resumed.previous.before.samples == {"replica-0.0": 44}


def test_another_order_of_the_samples_is_reported(run: Run) -> None:
    seed = "algorithm.seed=7"
    resumed = run.take_up(job(2, 2, seed))
    assert resumed.notes == ()
    run.train(resumed, 40, 52)
    line = (
        "[algorithm] seed: 7 before, 0 now; replicas keep their positions in another "
        "order of the samples, so in this pass some are read twice and some not"
    )
    assert run.take_up(job()).notes == (line,)
    assert run.take_up(job()).notes == ()
    line = line.replace("7 before, 0 now", "0 before, 7 now")
    assert run.take_up(job(3, 2, seed)).notes[1:] == (line,)


def test_a_seed_that_has_changed_before_anything_was_trained_is_not_told(run: Run) -> None:
    run.train(run.take_up(job()))  # saved at once
    assert run.take_up(job(2, 2, "algorithm.seed=7")).notes == ()
    assert len(run.take_up(job(3, 2)).notes) == 1


def test_other_shards_hold_the_same_and_replicas_keep_their_places(run: Run) -> None:
    first = run.begun()
    before = run.files()
    resumed = run.take_up(job(shards=3))
    assert values(resumed.store, 3) == values(first.store, 2)
    assert resumed.previous.before.samples == {"replica-0": 40, "replica-1": 52}
    assert set(before) < set(run.files())  # nothing saved is lost
    assert resumed.store.place == str(run.directory.snapshots / "cut-00002")
    assert resumed.previous.restored == dict.fromkeys(("shard-0", "shard-1", "shard-2"), "00002")
    assert resumed.previous.label == 3
    assert resumed.previous.incarnation > first.previous.incarnation + 1
    (line,) = resumed.notes
    assert line.startswith("shards: 2 before, 3 now; ")


def test_other_replicas_share_out_what_was_consumed(run: Run) -> None:
    run.train(run.take_up(job()), 40, 53)
    resumed = run.take_up(job(replicas=3))
    samples = resumed.previous.before.samples
    assert samples == {"replica-0": 30, "replica-1": 31, "replica-2": 32}
    assert sum(samples.values()) == 93
    (line,) = resumed.notes
    assert line.startswith("replicas: 2 before, 3 now; each skips its share of the 93 samples ")
    assert newest(resumed.store, 1).facts["clock"] == "31"  # these shards are as they were


def test_there_and_back_again_uses_the_newest_values(run: Run) -> None:
    run.begun()
    there = run.take_up(job(3, 4))
    run.train(there, 30, 30, 30, 30, n_shards=3)
    back = run.take_up(job())
    assert sum(back.previous.before.samples.values()) == 120
    assert Path(back.store.place).name == "cut-00004"
    assert values(back.store, 2) == values(there.store, 3)
    assert back.previous.before.samples == run.take_up(job()).previous.before.samples


# ---------------------------------------------------------------------- kept elsewhere


@pytest.fixture(params=["memory", "folder"])
def elsewhere(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> str:
    """Return the setting of a place for checkpoints."""
    monkeypatch.setattr(folders, "PROTOCOLS", ("memory",))
    place = f"memory://{tmp_path.name}" if request.param == "memory" else str(tmp_path / "shared")
    return f"cluster.checkpoints={place}"


def place_of(elsewhere: str) -> str:
    return elsewhere.partition("=")[2]


def test_a_run_remembers_where_its_checkpoints_are(run: Run, elsewhere: str) -> None:
    first = run.take_up(job(2, 2, elsewhere))
    run.train(first, 40, 52)
    assert first.store.place.startswith(f"{place_of(elsewhere)}/run-")
    assert run.files() == ["cut.json", "place"]
    run.directory.place_file.rename(run.directory.path / "kept")
    with pytest.raises(StorageError, match=r"place is damaged \(it is missing\): restore it"):
        run.take_up(job(2, 2, elsewhere))
    (run.directory.path / "kept").rename(run.directory.place_file)
    again = run.take_up(job(2, 2, elsewhere))
    assert again.store.place == first.store.place
    assert again.previous.restored == {"shard-0": "00001", "shard-1": "00001"}
    assert again.previous.before.samples == {"replica-0": 40, "replica-1": 52}
    with pytest.raises(JobError, match=r"\[cluster\] checkpoints: they are where they were"):
        check_same(job(), job(2, 2, elsewhere), directory="runs/x")


def test_two_runs_of_a_job_share_no_checkpoint(tmp_path: Path, elsewhere: str) -> None:
    runs = [Run(tmp_path / "run"), Run(tmp_path / "run")]
    first, second = (each.take_up(job(2, 2, elsewhere)) for each in runs)
    runs[0].train(first, 40, 52)
    assert first.store.place != second.store.place
    assert runs[1].take_up(job(2, 2, elsewhere)).previous.restored == {}


def test_checkpoints_elsewhere_are_resharded_there_and_the_old_ones_kept(
    run: Run, elsewhere: str
) -> None:
    first = run.take_up(job(2, 2, elsewhere))
    run.train(first, 40, 52)
    resumed = run.take_up(job(3, 2, elsewhere))
    assert resumed.store.place == f"{first.store.place}/cut-00002"
    assert values(resumed.store, 3) == values(first.store, 2)
    assert run.take_up(job(3, 2, elsewhere)).previous.restored == resumed.previous.restored
    (line,) = resumed.notes
    assert f"checkpoints are resharded into {resumed.store.place}, and the old ones" in line
    run.train(resumed, 30, 30, n_shards=3)
    back = run.take_up(job(2, 2, elsewhere))
    assert values(back.store, 2) == values(resumed.store, 3)


def test_resharding_that_fails_elsewhere_leaves_the_run_as_it_was(
    run: Run, elsewhere: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run.take_up(job(2, 2, elsewhere))
    run.train(first, 40, 52)

    def fail(store: CheckpointStore, role: str, snapshot: Snapshot) -> None:
        raise StorageError(f"no way to {store.place} for {role} {snapshot.label}")

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointStore, "save", fail)
        with pytest.raises(StorageError, match="no way to"):
            run.take_up(job(3, 2, elsewhere))
    assert run.files() == ["cut.json", "place"]
    assert run.take_up(job(2, 2, elsewhere)).store.place == first.store.place
    assert values(run.take_up(job(3, 2, elsewhere)).store, 3) == values(first.store, 2)


def test_a_run_from_scratch_begins_in_another_folder(run: Run, elsewhere: str) -> None:
    first = run.take_up(job(2, 2, elsewhere))
    run.train(first, 40, 52)
    start_from_scratch(job(2, 2, elsewhere), run.directory)
    again = run.take_up(job(2, 2, elsewhere))
    assert again.previous.restored == {}
    assert again.store.place != first.store.place
    assert again.store.place.startswith(f"{place_of(elsewhere)}/run-")
    assert newest(first.store, 0).label == "00001"


def test_what_says_where_they_are_must_be_readable(run: Run, elsewhere: str) -> None:
    run.take_up(job(2, 2, elsewhere))
    run.directory.place_file.write_bytes(b"\xff")
    with pytest.raises(StorageError, match=r"cannot read .*place.*--from-scratch"):
        run.take_up(job(2, 2, elsewhere))


def gone(elsewhere: str) -> Callable[[], object]:
    """Take this place away; return how to bring it back."""
    place = place_of(elsewhere)
    if "://" not in place:
        Path(place).rename(f"{place}.away")
        return lambda: Path(f"{place}.away").rename(place)
    store = fsspec.filesystem("memory").store
    kept = {name: store.pop(name) for name in list(store) if name.startswith(place[8:])}
    return lambda: store.update(kept)


def test_a_folder_elsewhere_that_is_gone_is_no_new_run(run: Run, elsewhere: str) -> None:
    """It has no checkpoint: a resumed run began from initial values, over the old model."""
    first = run.take_up(job(2, 2, elsewhere))
    run.train(first, 40, 52)
    come_back = gone(elsewhere)
    for n_shards in (2, 3):
        with pytest.raises(StorageError, match=r"^there is no folder .*/run-.* is it .*scratch"):
            run.take_up(job(n_shards, 2, elsewhere))
    come_back()
    again = run.take_up(job(2, 2, elsewhere))
    assert again.previous.restored == {"shard-0": "00001", "shard-1": "00001"}


def test_a_folder_that_is_lost_while_a_job_trains_is_not_made_anew(
    run: Run, elsewhere: str
) -> None:
    """A mount was lost: shards saved on the disk below, or restarted from initial values."""
    first = run.take_up(job(2, 2, elsewhere))
    run.train(first, 40, 52)
    come_back = gone(elsewhere)
    with pytest.raises(StorageError, match="there is no folder"):
        run.train(first, 60, 60)
    with pytest.raises(StorageError, match="there is no folder"):
        first.store.newest("shard-0")
    come_back()
    run.train(first, 60, 60)


# -------------------------------------------------------------- ends in between, damage


def test_a_cut_that_was_left_half_way_is_none(run: Run) -> None:
    first = run.begun()
    half = run.directory.snapshots / "cut-00002.tmp" / "shard-0"
    half.mkdir(parents=True)  # as a machine leaves it that stops
    (half / "00002.safetensors").write_bytes(b"half")
    resumed = run.take_up(job())
    assert resumed.store.place == str(run.directory.snapshots)
    assert resumed.previous.before.samples == {"replica-0": 40, "replica-1": 52}
    assert values(run.take_up(job(shards=1)).store, 1) == values(first.store, 2)
    assert not [name for name in run.files() if ".tmp" in name]


def test_a_cut_that_fails_leaves_the_run_as_it_was(run: Run) -> None:
    run.begun()
    before = run.files()
    cut = CheckpointSet(n_shards=3, n_replicas=2, train=TRAIN)

    def fail() -> None:
        with making_checkpoint_set(run.directory, 2, cut) as (place, _):
            (place / "shard-0").mkdir()
            raise StorageError("no space left")

    with pytest.raises(StorageError, match="no space left"):
        fail()
    assert run.files() == before
    assert newest_checkpoint_set(run.directory)[0] == run.directory.snapshots


def test_a_crash_after_the_cut_and_before_the_job_file_loses_nothing(run: Run) -> None:
    run.train(run.take_up(job()), 40, 53)
    job_file = run.directory.job_file.read_text()
    run.take_up(job(3, 3))
    run.directory.job_file.write_text(job_file)
    resumed = run.take_up(job())
    assert sum(resumed.previous.before.samples.values()) == 93
    assert resumed.previous.missing == ()


def test_what_is_not_all_there_is_not_resharded(run: Run) -> None:
    first = run.begun()
    Path(first.store.path("shard-1", "00001")).unlink()
    before = run.files()
    with pytest.raises(JobError) as caught:
        run.take_up(job(shards=3))
    assert str(caught.value) == (
        f"--resume {run.directory.path}: its checkpoints cannot be resharded for 3 shards and "
        f"2 replicas: there is no intact one of shard-1 in {run.directory.snapshots}. "
        "Restore it, or resume with 2 shards and 2 replicas, where shard-1 starts from scratch"
    )
    assert run.files() == before
    (line,) = run.take_up(job()).notes
    assert line.startswith("shard-1: no intact checkpoint in ")
    assert run.reports == []


def test_an_older_whole_checkpoint_will_do(run: Run) -> None:
    run.begun()
    second = run.take_up(job())
    run.train(second, 60, 72)
    damage(Path(second.store.path("shard-0", "00002")))
    resumed = run.take_up(job(shards=1))
    assert resumed.previous.before.samples == {"replica-0": 44, "replica-1": 52}
    assert resumed.previous.label == 4
    assert "is damaged and skipped" in run.reports[0]


def test_a_run_that_saved_nothing_may_go_on_with_any_numbers(run: Run) -> None:
    run.take_up(job())
    assert run.take_up(job(3, 4)).previous.missing == ("shard-0", "shard-1", "shard-2")
    assert newest_checkpoint_set(run.directory)[1] == CheckpointSet(
        n_shards=3, n_replicas=4, train=TRAIN
    )


def test_checkpoints_of_another_model_are_not_resharded(run: Run) -> None:
    first = run.take_up(job())
    other = Layout.of([TensorSpec(name="w", shape=(500,))], n_shards=2)
    for k in range(2):
        run.save(first, k, 40, 52, cut=other)
    with pytest.raises(StorageError, match=r"'00001' of shard 0 cannot .* layout is"):
        run.take_up(job(shards=3))
    assert newest_checkpoint_set(run.directory)[0] == run.directory.snapshots


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{", "Input data was truncated"),
        ('{"n_shards": 0, "n_replicas": 2}', "Expected `int` >= 1 - at `$.n_shards`"),
        ('{"n_shards": 2, "n_replicas": -2}', "Expected `int` >= 1 - at `$.n_replicas`"),
        ('{"n_shards": 1000000000, "n_replicas": 2}', "Expected `int` <= 4096 - at `$.n_shards`"),
        ('{"n_shards": 1, "n_replicas": 2}', "n_shards is 1, but there are checkpoints of shard-1"),
        (None, "it is missing"),
    ],
)
def test_a_cut_that_cannot_be_is_named_with_the_fix(
    run: Run, content: str | None, why: str
) -> None:
    run.begun()
    file = run.directory.snapshots / "cut.json"
    if content is None:
        file.unlink()
    else:
        file.write_text(content)
    with pytest.raises(StorageError) as caught:
        run.take_up(job())
    assert str(caught.value) == (
        f"{file} is damaged ({why}): restore it, use the version that wrote it, or start again "
        "with --from-scratch (from_scratch=True)"
    )


# ---------------------------------------------------------------------------- the data


@pytest.mark.parametrize(
    ("override", "train", "told"),
    [
        (
            "data.train.arguments.part='all'",
            TRAIN,
            (
                f'it was {{ {FRAMES}, arguments = {{ part = "train" }} }}, '
                f'now {{ {FRAMES}, arguments = {{ part = "all" }} }}'
            ),
        ),
        (
            "stop.epochs=2",
            DataFacts(n_samples=1200, fingerprint="abc"),
            "it was 100 samples, now 1,200 samples",
        ),
        (
            "stop.epochs=2",
            DataFacts(n_samples=100, fingerprint="abd"),
            "it was fingerprint abc, now fingerprint abd",
        ),
        (
            "stop.epochs=2",
            DataFacts(n_samples=100, marks=(1.5, 2.51)),
            "it was 100 samples, now 100 others",
        ),
        (
            "stop.epochs=2",
            DataFacts(n_samples=100, order="in the order of the data"),
            "it was shuffled, now in the order of the data",
        ),
    ],
)
def test_trained_runs_keep_their_data(run: Run, override: str, train: DataFacts, told: str) -> None:
    run.train(run.take_up(job()))
    changed = job(2, 2, override)
    assert run.take_up(changed, train=train).previous.restored  # nothing was trained
    run.begun()
    for numbers in ((2, 2), (3, 3)):
        with pytest.raises(JobError) as caught:
            run.take_up(job(*numbers, override), train=train)
        assert str(caught.value) == (
            f"--resume {run.directory.path}: [data.train] has changed: {told}. "
            "Restore the data, or start a new run"
        )
    run.directory.model_file.touch()
    with pytest.raises(JobError, match=r"with model\.initial=.*model\.safetensors"):
        run.take_up(changed, train=train)


def test_a_trained_run_may_go_on_with_other_readers(run: Run) -> None:
    run.train(run.take_up(job()))
    run.begun()
    assert run.take_up(job(2, 2, "data.train.num_workers=2")).previous.restored


def test_parts_that_a_function_makes_are_of_as_many_replicas_as_before(run: Run) -> None:
    parts = DataFacts(n_samples=100, order="stream", has_parts=True)
    run.train(run.take_up(job(), train=parts), 40, 52)
    with pytest.raises(JobError, match=r"there were 2 of them, now 3: use as many as before"):
        run.take_up(job(2, 3), train=parts)
    assert run.take_up(job(3, 2), train=parts).previous.trained


def test_data_without_fingerprint_are_known_by_their_size(run: Run) -> None:
    run.train(run.take_up(job(), train=DataFacts(n_samples=100)), 40, 52)
    assert run.take_up(job()).previous.trained


# ------------------------------------------------------------------------- dealt data


def save_applied(resumed: Resumed, k: int, applied: Spans) -> None:
    cut = layout(2)
    state = ShardState(
        incarnation=resumed.previous.incarnation,
        clock=9,
        values=np.zeros(cut.shard_size(k), np.float32),
        state={"sum_of_squares": np.zeros(cut.n_gradient(k), np.float32)},
        clients=(SessionRecord(name="replica-0", incarnation=1, samples=60),),
        steps=StepCounts(9),
        applied=applied,
    )
    label = f"{resumed.previous.label:05d}"
    config = ShardConfig(index=k, layout=cut, rule=RULE)
    resumed.store.save(f"shard-{k}", take(label, state, config=config))


DEALT = "algorithm.order=dealt"


def test_dealt_samples_go_on_with_what_every_shard_has(run: Run) -> None:
    first = run.take_up(job(2, 2, DEALT))
    save_applied(first, 0, Spans([(0, 40), (48, 64)]))
    save_applied(first, 1, Spans([(0, 56)]))
    again = run.take_up(job(2, 2, DEALT))
    assert again.previous.before.samples == {"dealt": 48}
    more = run.take_up(job(3, 2, DEALT))  # shards keep what they have
    assert more.previous.before.samples == {"dealt": 48}
    assert newest(more.store, 0).facts["applied"] == "[0,40,48,64]"
    assert not any("some are read twice" in note for note in more.notes)
    wider = run.take_up(job(3, 3, DEALT))  # the middle one has elements of both
    found = [newest(wider.store, k).facts["applied"] for k in range(3)]
    assert found[1] == "[0,40,48,56]"
    assert wider.previous.before.samples == {"dealt": 48}


def test_replicas_of_dealt_samples_count_their_steps_on(run: Run) -> None:
    """Their inner schedules, and the random numbers of dropout, began anew on other shards."""
    first = run.take_up(job(2, 2, DEALT))
    for k in range(2):
        save_applied(first, k, Spans([(0, 100)]))
    wider = run.take_up(job(3, 3, DEALT))
    clients = msgspec.json.decode(newest(wider.store, 0).facts["clients"])
    assert [one["samples"] for one in clients.values()] == [33, 33, 34]


def test_a_run_does_not_change_who_reads_what() -> None:
    with pytest.raises(JobError, match=r"changed \[algorithm\] order: it says where in the data"):
        check_same(job(2, 2), job(2, 2, "algorithm.order=parts"), directory="run")
