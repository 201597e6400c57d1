"""GPT-2 of transformers on the text of Python's own documentation, letter by letter.

    distbelief train experiments/zoo/gpt2.toml
    python -m experiments.zoo.text [--seeds 3] [--steps N] [--set KEY=VALUE]

The second command asks whether replicas that are split, and train at once, reach the same loss as
one process does with as many samples, by the same rule:

1. One replica that waits for each of its pushes takes the steps of one process, whole or split. In
   float64 all weights must agree to rounding, after `EXACT_STEPS` steps.
2. Two replicas of two ranks each add stale gradients to that. Their held-out loss is compared, over
   several seeds (of the weights and of the order of the samples), with that of one process, and of
   one process that applies each gradient one update late.

The help topics come with Python; nothing is downloaded.
"""

import argparse
import contextlib
import json
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from statistics import fmean, stdev
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import TensorDataset

import distbelief
from distbelief.config.job import Job
from distbelief.config.load import load_job
from distbelief.core.errors import DistBeliefError
from distbelief.task.data import BatchCursor, DataShard, read_batch
from distbelief.task.task import build_dataset, build_loss, build_model
from distbelief.worker.downpour_settings import DownpourSettings
from experiments.benchmarks.measuring.measurement import conclude, show
from experiments.zoo.models import Scores, library


HELD_OUT_ONE_IN = 10
N_LETTERS = 128  # those of ASCII
EXACT_STEPS = 40
ALONE = "one process"
DELAYED = "one process, gradients one update old"
SPLIT = "2 replicas of 2 ranks"
JOB = Path(__file__).with_name("gpt2.toml")


def gpt2(
    *,
    layers: int = 2,
    width: int = 32,
    heads: int = 4,
    length: int = 32,
    dropout: float = 0.0,
    double: bool = False,
) -> nn.Module:
    transformers = library("transformers")
    config = transformers.GPT2Config(
        vocab_size=N_LETTERS,
        n_positions=length,
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = Scores(transformers.GPT2LMHeadModel(config), ["input_ids"])
    return model.double() if double else model


def passages(*, part: str, length: int = 32) -> TensorDataset:
    """Return passages of so many letters, and for each letter the next; every tenth is held out."""
    text = "\n".join(topics[name] for name in sorted(topics)).encode("ascii", "replace")
    letters = torch.from_numpy(np.frombuffer(text, dtype=np.uint8).astype(np.int64))
    n = (len(letters) - 1) // length
    inputs = letters[: n * length].view(n, length)
    targets = letters[1 : n * length + 1].view(n, length)
    held_out = torch.arange(n) % HELD_OUT_ONE_IN == 0
    chosen = held_out if part == "test" else ~held_out
    return TensorDataset(inputs[chosen], targets[chosen])


def one_process(job: Job, n_samples: int, *, delay: int = 0) -> nn.Module:
    """Train as one replica would that waits for its pushes, by torch's own optimizer.

    After the warm start, gradients are those of weights `delay` updates ago.
    """
    algorithm = job.algorithm
    assert isinstance(algorithm, DownpourSettings)
    rule, net, data = algorithm.rule, build_model(job.model), build_dataset(job.data.train)
    loss = build_loss(job.task)
    if isinstance(rule, distbelief.Adam):
        betas = rule.beta1, rule.beta2
        optimizer: torch.optim.Optimizer = torch.optim.Adam(
            net.parameters(), lr=rule.learning_rate, betas=betas, eps=rule.epsilon
        )
    else:
        optimizer = torch.optim.Adagrad(net.parameters(), lr=rule.learning_rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rule.schedule.factor)
    shard = DataShard(len(data), replica_index=0, n_replicas=1, seed=algorithm.seed)
    cursor, position, n_steps = BatchCursor(shard), 0, 0
    past: deque[torch.Tensor] = deque(maxlen=1 + delay)
    while position < n_samples:
        indices = cursor.batch(position, algorithm.batch_size)
        batch = read_batch(data, indices.tolist())
        past.append(parameters_to_vector(net.parameters()).detach())
        n_steps += 1
        if n_steps > algorithm.warm_start_steps:
            vector_to_parameters(past[0].clone(), net.parameters())
        optimizer.zero_grad()
        loss(batch.run(net), batch.targets).backward()
        vector_to_parameters(past[-1].clone(), net.parameters())
        optimizer.step()
        schedule.step()
        position += len(indices)
    return net


@torch.no_grad()
def held_out_loss(net: nn.Module, job: Job) -> float:
    assert job.data.test is not None
    data = build_dataset(job.data.test, table="data.test")
    batch = read_batch(data, range(len(data)), table="data.test")
    return float(build_loss(job.task)(batch.run(net.eval()), batch.targets))


def job_of(options: Sequence[str], *, seed: int = 0, **values: object) -> Job:
    """Return the job with these values ("cluster__replicas") and a user's options."""
    own = [f"{key.replace('__', '.')}={json.dumps(value)}" for key, value in values.items()]
    seeds = [f"model.seed={seed}", f"algorithm.seed={seed}"]
    return load_job(JOB, overrides=[*seeds, *options, *own])


def trained(job: Job) -> distbelief.Run:
    with contextlib.redirect_stdout(sys.stderr):
        run = distbelief.train(job)
    if run.summary.error is not None:
        raise DistBeliefError(run.summary.error)
    return run


@torch.no_grad()
def weights_apart(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    apart = max(float((a - b).abs().max()) for a, b in pairs)
    return apart / max(float(a.abs().max()) for a in one.parameters())


def exactness(options: Sequence[str], *, folder: str) -> dict[int, float]:
    """Return how far weights are from those of one process, by the number of ranks."""
    apart: dict[int, float] = {}
    for n_ranks in (1, 2):
        job = job_of(
            options,
            model__arguments__double=True,
            algorithm__blocking=True,
            algorithm__max_steps=EXACT_STEPS,
            cluster__replicas=1,
            cluster__partitions=n_ranks,
            output__directory=f"{folder}/exact-{n_ranks}",
        )
        run = trained(job)
        apart[n_ranks] = weights_apart(one_process(job, run.summary.samples), run.model)
    return apart


def losses(options: Sequence[str], *, seed: int, folder: str) -> dict[str, float]:
    """Return the held-out losses of one seed, and the job's mean staleness."""
    job = job_of(options, seed=seed, output__directory=f"{folder}/seed-{seed}")
    run = trained(job)
    found = {"staleness": run.summary.staleness_mean or 0.0, SPLIT: held_out_loss(run.model, job)}
    for delay, name in enumerate((ALONE, DELAYED)):
        print(f"seed {seed}: {name} ...", file=sys.stderr)
        found[name] = held_out_loss(one_process(job, run.summary.samples, delay=delay), job)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Split replicas against one process: a GPT-2.")
    parser.add_argument("--seeds", type=int, default=3, help="2 or more (default: 3)")
    parser.add_argument("--set", action="append", default=[], metavar="TABLE.KEY=VALUE")
    options = parser.parse_args(arguments)
    if options.seeds < 2:
        parser.error("--seeds: use 2 or more, as their spread is what losses are compared with")
    torch.set_num_threads(1)
    try:
        with TemporaryDirectory() as folder:
            apart = exactness(options.set, folder=folder)
            found = [losses(options.set, seed=n, folder=folder) for n in range(options.seeds)]
    except DistBeliefError as error:
        print(error, file=sys.stderr)
        return 1
    show(
        f"weights after {EXACT_STEPS} steps in float64, against one process",
        {f"1 replica, partitions = {n}": {"apart": f"{far:.0e}"} for n, far in apart.items()},
    )
    by_name = {name: [each[name] for each in found] for name in found[0]}
    show(
        "held-out loss after the same number of samples",
        {
            name: {f"seed {n}": f"{loss:.3f}" for n, loss in enumerate(by_name[name])}
            | {"mean": f"{fmean(by_name[name]):.3f}", "spread": f"{stdev(by_name[name]):.3f}"}
            for name in (ALONE, DELAYED, SPLIT)
        },
    )
    alone, split = by_name[ALONE], by_name[SPLIT]
    conclude(
        "gpt2",
        {
            "apart_1_rank": apart[1],
            "apart_2_ranks": apart[2],
            "one_process": fmean(alone),
            "delayed": fmean(by_name[DELAYED]),
            "split": fmean(split),
            "difference": fmean(split) - fmean(alone),
            "spread": max(stdev(alone), stdev(split)),
            "staleness": fmean(by_name["staleness"]),
        },
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
