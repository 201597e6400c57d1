"""Knobs of Dpplee3 and DL4J: under their own names, jobs and `fit` say which key of ours it is."""

import re

import pytest
import torch
from torch import nn

import distbelief
from distbelief.config.presets import KNOBS, PRESETS
from distbelief.core.errors import JobError, JobFileError
from distbelief.worker.downpour_settings import DownpourSettings
from tests.distbelief.jobs import speech


@pytest.mark.parametrize("name", sorted(KNOBS))
def test_a_knob_of_another_system_is_refused_with_ours(name: str) -> None:
    said = re.escape(KNOBS[name])
    for table in ("algorithm", "algorithm.exchange", "stop", "output"):
        with pytest.raises(JobFileError, match=rf"has no key '{name}'. {said}"):
            speech(f"{table}.{name}=1")
    said = re.escape(KNOBS[name][1:])
    net, data = nn.Linear(2, 2), (torch.zeros(4, 2), torch.zeros(4, dtype=torch.long))
    with pytest.raises(JobError, match=rf"fit has no option '{name}': .{said}"):
        distbelief.fit(net, data, loss="cross_entropy", batch_size=2, **{name: 1})  # type: ignore[arg-type]
    with pytest.raises(JobError, match=rf"train has no option '{name}': .{said}"):
        distbelief.train({}, **{name: 1})  # type: ignore[arg-type]


def test_what_is_named_instead_is_there() -> None:
    said = " ".join(KNOBS.values())
    named = re.findall(r'"((?:dpplee3|dl4j|hogwild)[\w-]*)"', said)
    assert {*named} == {"dpplee3-asgd", "dl4j-averaging", "hogwild"} <= {*PRESETS}
    job = speech(
        "algorithm.preset=dpplee3-asgd",
        'algorithm.rule={ name = "sgd", learning_rate = 1.0 }',
        'algorithm.inner={ name = "SGD", lr = 0.1 }',
        'algorithm.exchange.push={ codec = "threshold", tau = 0.001, clip = 5.0, clip_every = 5 }',
        "algorithm.exchange.every=1 epoch",
        "stop.accuracy=0.98",
        "output.snapshot_every=30 s",
        "output.directory=runs/x",
    )
    assert isinstance(job.algorithm, DownpourSettings)
    assert job.algorithm.exchange.n_epochs == 1
    for key in re.findall(r'(\w+) = (?:10|5|"1 epoch")', said):
        assert key == "every" or key.startswith("clip")


def test_momentum_of_the_server_is_refused_with_several_asynchronous_workers() -> None:
    """Dpplee3 let them: its buffers were written by all at once."""
    momentum = 'algorithm.rule={ name = "momentum", learning_rate = 0.1, momentum = 0.5 }'
    for preset in ("dpplee3-asgd", "hogwild", "dl4j-sharing"):
        job = ("algorithm.batch_size=32", f"algorithm.preset={preset}", momentum)
        with pytest.raises(JobFileError, match="velocity would meet deltas from other anchors"):
            speech(*job, "cluster.replicas=2")
        speech(*job, "cluster.replicas=1")


@pytest.mark.parametrize("elsewhere", ["cluster.partitions=2", "cluster.device=cuda"])
def test_hogwild_is_refused_where_no_memory_is_shared(elsewhere: str) -> None:
    with pytest.raises(JobFileError, match="threads share the parameters of a whole model on the"):
        speech("algorithm.batch_size=32", "algorithm.preset=hogwild", elsewhere)
