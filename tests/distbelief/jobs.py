"""A job file that is right, for tests to change one thing in."""

from collections.abc import Mapping
from pathlib import Path

from distbelief.config import toml
from distbelief.config.job import Job
from distbelief.config.load import parse_job


SPEECH = """
[model]
factory = "speech.model:net"
[model.arguments]
hidden = [512, 512]

[data.train]
factory = "speech.data:frames"
[data.train.arguments]
part = "train"

[data.test]
factory = "speech.data:frames"

[algorithm]
name = "downpour"
loss = "cross_entropy"
batch_size = 256
rule = { name = "adagrad", learning_rate = 0.02 }

[cluster]
replicas = 2
shards = 2

[stop]
epochs = 1

[output]
directory = "runs/speech-demo"
report_every = "2 s"
"""


def small(model: str, data: str, /, **tables: Mapping[str, object]) -> str:
    """Return the text of a job of one epoch, with these entries of its tables."""
    job: dict[str, dict[str, object]] = {
        "model": {"factory": model},
        "data": {"train": {"factory": data}},
        "algorithm": {
            "name": "downpour",
            "loss": "cross_entropy",
            "batch_size": 8,
            "rule": {"name": "sgd", "learning_rate": 0.1},
        },
        "stop": {"epochs": 1},
    }
    return toml.write({**job, **{name: {**job.get(name, {}), **tables[name]} for name in tables}})


def speech(*overrides: str, path: str | Path = "speech.toml") -> Job:
    return parse_job(SPEECH, path=path, overrides=overrides)
