"""Two hosts: a server with keys on one, a loop on the other, 1 Gbit/s between them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from distbelief.transport.keys import Allowed, KeyFiles
from experiments.benchmarks.network.hosts import Host, obstacle, switched
from tests.processes.commands import COMMAND, ended
from tests.processes.test_serve import MODULE, Server


pytestmark = [pytest.mark.soak, pytest.mark.root, pytest.mark.processes, pytest.mark.timeout(180)]

LOOP = """
import json, sys
import torch
import distbelief
from nets import make

model = make()
optimizer = distbelief.DownpourSGD(
    model.parameters(), server=sys.argv[1], keys=sys.argv[2]
)
for _ in range(5):
    optimizer.zero_grad()
    model(torch.ones(2, 7)).square().mean().backward()
    optimizer.step()
optimizer.finish()
print(json.dumps(optimizer.counters()))
optimizer.close()
"""


def serve(host: Host, directory: Path) -> "subprocess.Popen[str]":
    command = [*host.prefix, str(COMMAND), "serve", "nets:make", "--shards", "2"]
    command += ["--bind", "tcp://0.0.0.0:7700", "--keys", "server"]
    return subprocess.Popen(
        command, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def test_a_loop_on_another_host_trains_over_tcp(tmp_path: Path) -> None:
    if (why := obstacle()) is not None:
        pytest.skip(why)
    (tmp_path / "nets.py").write_text(MODULE)
    server, worker = KeyFiles(tmp_path / "server"), KeyFiles(tmp_path / "worker")
    server.make()
    server.allow(Allowed(key=worker.make(), roles=("worker",), name="w"))
    with switched(2, bits_per_second=1e9) as lan, serve(lan.hosts[0], tmp_path) as process:
        here, there = lan.hosts
        try:
            running = Server(process)
            address = running.address().partition("&memory=")[0]
            port = address.split("?")[0].rpartition(":")[2]
            found = f"tcp://{here.address}:{port}?{address.partition('?')[2]}"
            done = ended(tmp_path, *there.prefix, sys.executable, "-c", LOOP, found, "worker")
            assert done.returncode == 0, done.stderr
            assert json.loads(done.stdout)["pushes_acknowledged"] == 5
            assert running.end() == 0
        finally:
            process.kill()
