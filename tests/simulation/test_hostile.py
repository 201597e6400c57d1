"""Shards, supervisor and coordinator stay what they are, whatever a peer sends them."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

import pytest

from distbelief.config.job import StopTable
from distbelief.parameter_server.policy import ExchangePolicy, Round
from distbelief.parameter_server.rules import Adagrad
from distbelief.protocol import role as rl
from distbelief.simulation.driver import Builder
from distbelief.simulation.machines import SimulatedMachine
from distbelief.worker.downpour_settings import DownpourSettings
from sandblaster.chunks import COORDINATOR
from tests.simulation.dealt import DealtJob
from tests.simulation.hosted import HostedJob
from tests.simulation.hostile import Letter, Recorder, Trial, bare
from tests.simulation.jobs import JobCluster
from tests.simulation.sandblasts import Sandblast


# A worker may send any numbers; NumPy warns of what comes of them, in the log of the shard.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow):RuntimeWarning")

Recording = Mapping[str, tuple[list[Letter], Builder]]

N_LETTERS: Final = 400
N_SOAK: Final = 700_000  # of each of the 15 roles: more than ten million
# Each replica on a host of its own: pushes come in blocks.
APART: Final = {
    rl.Address(f"replica-{k}"): SimulatedMachine(host=f"h{k}", flops_per_second=2e6)
    for k in range(3)
}
SSP: Final = DownpourSettings(
    loss="cross_entropy",
    batch_size=4,
    rule=Adagrad(learning_rate=0.05),
    exchange=ExchangePolicy(staleness=2, weight="mean", damping="excess"),
)
ENDLESS: Final = StopTable(seconds=1e6)
job = partial(JobCluster, stop=ENDLESS, machines=APART)
dealt = partial(DealtJob, n_epochs=1000.0, cluster=partial(JobCluster, machines=APART))
ROUNDS: Final = ExchangePolicy(staleness=0, round=Round(quorum=0.5))


def of_job(made: JobCluster) -> Recording:
    recorder, cluster = Recorder(made.cluster), made.cluster
    begun = cluster.now

    def suffices() -> bool:
        longest = max(map(len, recorder.letters.values()), default=0)
        return longest > 3 * N_LETTERS or cluster.now > begun + 8.0

    cluster.run_until(suffices, every=100)
    builders = cluster._driver.builders
    return {name: (letters, builders[name]) for name, letters in recorder.letters.items()}


def of_batch() -> Recording:
    run = Sandblast(hosts="own", saves=(0.1,))
    recorder = Recorder(run.cluster)
    run.cluster.run_until(lambda: COORDINATOR in run.cluster.halted)
    builders = run.cluster._driver.builders
    return {name: (letters, builders[name]) for name, letters in recorder.letters.items()}


SCENES: Final[Mapping[str, tuple[Callable[[], Recording], tuple[str, ...]]]] = {
    "plain": (lambda: of_job(job()), ("shard-0", "supervisor")),
    "copies": (lambda: of_job(job(shard_copies=2)), ("shard-0", "shard-0b", "supervisor")),
    "dealt": (lambda: of_job(dealt(shard_copies=2).job), ("shard-0", "shard-0b", "supervisor")),
    "rounds": (lambda: of_job(dealt(epoch_share=0.9, exchange=ROUNDS).job), ("supervisor",)),
    "round": (lambda: of_job(dealt(exchange=ROUNDS).job), ("shard-0",)),
    "ssp": (lambda: of_job(job(settings=SSP)), ("shard-0", "supervisor")),
    "hosts": (
        lambda: of_job(HostedJob(seed=0, placement="spread", n_awaited=3, stop=ENDLESS)),
        ("supervisor",),
    ),
    "batch": (of_batch, ("coordinator", "shard-0")),
}


def trials(scene: str, *, seed: int) -> list[Trial]:
    record, names = SCENES[scene]
    recording = record()
    return [
        Trial(name, recording[name][0], partial(bare, recording[name][1]), seed=seed)
        for name in names
    ]


@pytest.mark.slow
@pytest.mark.untraced
@pytest.mark.parametrize("scene", SCENES)
def test_no_message_of_a_legal_type_ends_a_role(scene: str) -> None:
    for trial in trials(scene, seed=1):
        trial.run(500)
        assert trial.findings == []
        assert 50 < trial.n_refused < trial.n


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("scene", SCENES)
def test_ten_million_messages_end_none(scene: str) -> None:
    for trial in trials(scene, seed=2):
        trial.run(N_SOAK)
        assert trial.findings == []
        assert trial.n == N_SOAK
