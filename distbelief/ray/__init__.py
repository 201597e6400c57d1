"""Training on the rows of a Ray Dataset, where Ray has them.

    run = distbelief.ray.fit(dataset, "job.toml", inputs="features", targets="label")

One task per host has some blocks of the Dataset; `spark.training` says what happens to them.
"""

import os
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from distbelief.core.arguments import checked
from distbelief.core.errors import JobError
from distbelief.job.hosts.ray import RayTasks, connect
from distbelief.job.run.result import Run
from distbelief.spark.columns import cast_blocks
from distbelief.spark.training import (
    ELSEWHERE,
    Names,
    check_counts,
    columns_of,
    kind_of,
    reached,
    train_on_rows,
)
from distbelief.task.imports import check_is_no_import


if TYPE_CHECKING:
    from ray.data import Dataset


@checked("ray.fit", ELSEWHERE)
def fit(  # noqa: PLR0913 -- options of one call
    dataset: "Dataset",
    job: str | os.PathLike[str] | Mapping[str, object],
    *,
    inputs: Names,
    targets: str,
    decode: Mapping[str, str] | None = None,
    dtype: str = "float32",
    test: "Dataset | None" = None,
    hosts: int | None = None,
    cores: int | None = None,
    listen: str | None = None,
    keys: str | os.PathLike[str] | None = None,
    insecure: bool = False,
    overrides: Mapping[str, object] | None = None,
    callbacks: Sequence[object] = (),
    resume: str | os.PathLike[str] | None = None,
    show: bool = True,
) -> Run:
    """Train the model of a job on the rows of a Ray Dataset, on Ray's nodes.

    Options are those of `distbelief.spark.fit`. Rows are numbers, lists, tensors or bytes. By
    default there is one host for each of Ray's nodes, and no more than blocks of the Dataset.

    Returns:
        The run; `run.model` is the trained module.

    Raises:
        JobError: this cannot be run, or the job failed. What it saved is kept.
    """
    check_is_no_import("distbelief.ray.fit")
    columns = columns_of(inputs, targets, decode=decode, dtype=dtype, user="ray.fit")
    check_counts("ray.fit", hosts=hosts, cores=cores)
    reach = reached(listen, keys=keys, insecure=insecure)
    connect(is_local=reach.is_local)
    import ray  # noqa: PLC0415 -- an extra

    check_is_dataset(dataset, "dataset")
    if test is not None:
        check_is_dataset(test, "test")
    nodes = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
    nodes = [n for n in nodes if n] or [1]
    whole = dataset.materialize()
    n_hosts = max(1, min(hosts or len(nodes), whole.num_blocks()))
    run, _ = train_on_rows(
        RayTasks(
            [part.to_arrow_refs() for part in whole.split(n_hosts)],
            read=partial(cast_blocks, columns=columns),
        ),
        job,
        user="ray.fit",
        columns=columns,
        test=None if test is None else cast_blocks(map(ray.get, test.to_arrow_refs()), columns),
        n_hosts=n_hosts,
        cores=cores or max(1, min(nodes) // -(-n_hosts // len(nodes))),
        reach=reach,
        directory=Path(tempfile.gettempdir()) / f"distbelief-rows-{secrets.token_hex(8)}",
        overrides=overrides,
        callbacks=callbacks,
        resume=resume,
        show=show,
    )
    return run


def check_is_dataset(given: object, name: str) -> None:
    """Raise JobError if this is no Dataset of Ray."""
    from ray.data import Dataset  # noqa: PLC0415 -- an extra

    if not isinstance(given, Dataset):
        raise JobError(
            f"ray.fit: {name} is of {kind_of(given)}; use a Dataset of Ray: ray.data.from_pandas, "
            "read_parquet and others make one"
        )
