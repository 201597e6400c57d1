"""A small job as text, for tests of forecasts."""

from pathlib import Path

from distbelief.config.job import Job
from distbelief.config.load import parse_job


TEXT = """
[model]
factory = "tests.distbelief.examples:net"
arguments = { width = 6, hidden = [8] }

[data.train]
factory = "tests.distbelief.examples:frames"
arguments = { width = 6, n_samples = 48 }

[data.test]
factory = "tests.distbelief.examples:frames"
arguments = { width = 6, n_samples = 20 }

[algorithm]
name = "downpour"
loss = "cross_entropy"
batch_size = 4
rule = { name = "adagrad", learning_rate = 0.05 }

[cluster]
replicas = 2
shards = 2
placement = "spread"

[stop]
samples = 120

[output]
directory = "runs/small"
"""

SANDBLASTER = TEXT.replace(
    'name = "downpour"\nloss = "cross_entropy"\nbatch_size = 4\n'
    'rule = { name = "adagrad", learning_rate = 0.05 }',
    'name = "sandblaster"\nloss = "cross_entropy"\nportion = 4\nmax_iterations = 3',
).replace("[stop]\nsamples = 120\n", "")


def small(*overrides: str, text: str = TEXT) -> Job:
    return parse_job(text, path="small.toml", overrides=overrides)


def written(folder: Path, *, text: str = TEXT) -> Path:
    path = folder / "small.toml"
    path.write_text(text)
    return path
