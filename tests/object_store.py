"""An object store on this host that speaks S3's protocol, if moto and s3fs are installed."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


BUCKET = "bucket"


@contextmanager
def object_store() -> Iterator[str]:
    """Run a store with one bucket, which drivers find by the environment; yield its URL."""
    s3fs = pytest.importorskip("s3fs")
    pytest.importorskip("moto")
    server = subprocess.Popen(
        [sys.executable, "-u", "-m", "moto.server", "-p", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert server.stdout is not None
    try:
        url = next(line for line in server.stdout if "Running on" in line).split()[-1]
        with pytest.MonkeyPatch.context() as patch:
            for name, value in {
                "AWS_ENDPOINT_URL": url,
                "AWS_ACCESS_KEY_ID": "anybody",
                "AWS_SECRET_ACCESS_KEY": "nothing",
                "AWS_DEFAULT_REGION": "us-east-1",
            }.items():
                patch.setenv(name, value)
            s3fs.S3FileSystem.clear_instance_cache()  # they know an earlier store
            s3fs.S3FileSystem().mkdir(BUCKET)
            yield f"s3://{BUCKET}"
    finally:
        server.kill()
        server.wait()
        server.stdout.close()
