"""The command `distbelief slurm`: the batch script of a job."""

import shlex
import sys
from pathlib import Path
from typing import Final

import typer

from distbelief.cli import options as o
from distbelief.cli.keys import DEFAULT
from distbelief.core.errors import JobError


SIGNAL_SECONDS: Final = 120  # from the signal to Slurm's time limit

_HEAD: Final = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes} --ntasks-per-node=1 --cpus-per-task={cpus}
#SBATCH --time={time}
#SBATCH --signal=B:TERM@{seconds}
#SBATCH --output={name}-%j.out
# Made by: distbelief slurm. Submit it again to go on where the time limit ended it.
set -euo pipefail
cd -- {here}
port=$((20000 + SLURM_JOB_ID % 20000))  # jobs that share a node use several
"""
_HOSTS: Final = """\
names=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
first=${{names%%$'\\n'*}}
srun --nodes={others} --ntasks={others} --exclude="$first" --kill-on-bad-exit=0 \\
    {program} join "tcp://$first:$port?key={key}" --keys {keys} \\
    --cores {cpus} {consent} &
hosts=$!
"""
_TRAIN: Final = """\
if [ -e {run}/job.toml ]; then
    set -- {job} --resume {run}
else
    set -- {job}
fi
{program} train "$@" {sets} --listen "tcp://0.0.0.0:$port" --keys {keys} \\
    --hosts {others} --hosts-seconds 300 --cores {cpus} &
train=$!
trap 'kill -TERM "$train"' TERM  # the job pushes, saves and ends
code=0
wait "$train" || code=$?
while kill -0 "$train" 2> /dev/null; do  # a signal has ended the first wait
    code=0
    wait "$train" || code=$?
done
"""
_END: Final = """\
kill -TERM "$hosts" 2> /dev/null || true  # after a job that has not begun they would wait for one
wait "$hosts" || true
"""


@o.reported
def slurm(
    job_file: Path | None = o.JOB,
    *,
    overrides: list[str] | None = o.SET,
    nodes: int = o.option(2, "N", "Nodes; the first one trains, too.", least=1, most=1025),
    cpus: int = o.option(1, "N", "Cores of each node that the job uses.", least=1, most=4096),
    time: str = o.option("1:00:00", "TIME", "Time limit, as sbatch takes it."),
    keys: Path = o.option(DEFAULT, "DIR", "Key directory, which all nodes share.", "--keys"),
) -> None:
    """Print a batch script for Slurm that trains on several nodes.

    [dim]$[/dim] distbelief slurm speech.toml --nodes 5 --cpus 16 --time 4:00:00
    > speech.sbatch

    [dim]$[/dim] sbatch speech.sbatch

    The nodes share this directory and the keys. The first node trains, the
    others join it. Two minutes before the time limit the job pushes, saves and
    ends; submitted again, the script resumes its run.
    """
    from distbelief.config.load import load_job  # noqa: PLC0415 -- start quickly
    from distbelief.job.launch.role_process import words_of_consent  # noqa: PLC0415 -- torch
    from distbelief.transport.keys import KeyFiles  # noqa: PLC0415 -- pyzmq

    if job_file is None:
        raise JobError("no job: name a job file, as in `distbelief slurm speech.toml`")
    job = load_job(job_file, overrides=overrides or ())
    if not time.replace(":", "").replace("-", "").isdigit():
        raise JobError(f"--time {time}: write it as sbatch takes it, such as 4:00:00")
    directory = keys.expanduser().absolute()
    texts: dict[str, object] = {
        "name": job.name,
        "here": Path.cwd(),
        "program": Path(sys.executable).with_name("distbelief"),
        "run": job.output.directory,
        "job": job_file,
        "keys": directory,
        "time": time,
    }
    fields = {name: shlex.quote(str(text)) for name, text in texts.items()} | {
        "key": KeyFiles(directory).pair().public,
        "consent": words_of_consent(job),
        "sets": " ".join(f"--set {shlex.quote(each)}" for each in overrides or ()),
        "nodes": str(nodes),
        "others": str(nodes - 1),
        "cpus": str(cpus),
        "seconds": str(SIGNAL_SECONDS),
    }
    parts = (_HEAD, _HOSTS, _TRAIN, _END) if nodes > 1 else (_HEAD, _TRAIN)
    typer.echo(f"{''.join(parts).format_map(fields)}exit $code")
