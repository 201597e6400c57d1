"""A job file that is right, for tests to change one thing in."""

from pathlib import Path

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


def small(
    model: str,
    data: str,
    more: str = "",
    *,
    loss: str = "cross_entropy",
    rule: str = 'name = "sgd", learning_rate = 0.1',
    epochs: int = 1,
) -> str:
    """Return the text of a job; `more` are tables that it has as well."""
    return f"""
model.factory = "{model}"
data.train.factory = "{data}"
stop.epochs = {epochs}
[algorithm]
name = "downpour"
loss = "{loss}"
batch_size = 8
rule = {{ {rule} }}
{more}"""


def speech(*overrides: str, path: str | Path = "speech.toml") -> Job:
    return parse_job(SPEECH, path=path, overrides=overrides)
