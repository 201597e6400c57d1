"""Jobs on the rows of a Ray Dataset, on a Ray cluster of two nodes on this machine."""

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from distbelief.core.errors import JobError
from distbelief.supervisor.view import JobView
from tests.spark.nets import Counts


ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.processes,
    pytest.mark.soak,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore"),  # of ray
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    pytest.importorskip("pyarrow", reason="needs pyarrow: pip install '.[ray]'")
    utils = pytest.importorskip("ray.cluster_utils", reason="needs ray: pip install '.[ray]'")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (*sys.path, str(ROOT))))
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 -- Ray's name; its own tasks last, too
    head = {"num_cpus": 1, "include_dashboard": False}
    made = utils.Cluster(initialize_head=True, connect=True, head_node_args=head)
    made.add_node(num_cpus=1)
    made.wait_for_nodes()
    yield made
    import ray  # noqa: PLC0415 -- skipped without

    ray.shutdown()
    made.shutdown()


def counting(directory: Path, n: int, **more: object) -> dict[str, object]:
    return {
        "model": {"factory": "tests.spark.nets:Counts", "arguments": {"n": n, **more}},
        "algorithm": {
            "name": "downpour",
            "loss": "tests.spark.nets:minus_sum",
            "batch_size": 10,
            "order": "dealt",
            "rule": {"name": "sgd", "learning_rate": 1.0},
        },
        "stop": {"epochs": 3},
        "output": {"directory": str(directory)},
        "source": {"file": "test", "import_paths": [str(ROOT)]},
    }


def with_ones(batch: Mapping[str, object]) -> dict[str, object]:
    row = np.asarray(batch["id"])
    return {"row": row, "one": np.ones(len(row))}


def fit(dataset: object, wanted: dict[str, object], **more: object) -> list[float]:
    from distbelief import ray  # noqa: PLC0415 -- skipped without

    options = {"inputs": "row", "targets": "one", "show": False, **more}
    run = cast("Any", ray.fit)(dataset, wanted, **options)
    return cast("list[float]", cast("Counts", run.model).weight.mean(0).tolist())


@pytest.mark.usefixtures("cluster")
def test_rows_of_uneven_blocks_count_once_an_epoch(tmp_path: Path) -> None:
    import pyarrow as pa  # noqa: PLC0415 -- skipped without
    from ray import data  # noqa: PLC0415 -- skipped without

    n, parts = 440, [np.arange(40), np.arange(40, 440)]
    dataset = data.from_arrow([pa.table({"id": part}) for part in parts]).map_batches(with_ones)
    assert fit(dataset, counting(tmp_path / "run", n)) == [3.0] * n
    log = (tmp_path / "run" / "logs" / "supervisor.log").read_text()
    assert log.count("has joined") == 2
    with pytest.raises(JobError, match="has no rows"):
        fit(data.range(10).filter(lambda row: row["id"] < 0), counting(tmp_path / "none", n))
    with pytest.raises(JobError, match="there is no column 'z': the Dataset has row, one"):
        fit(dataset, counting(tmp_path / "z", n), inputs="z")
    with pytest.raises(JobError, match="dataset is of type list; use a Dataset of Ray"):
        fit([{"row": 1, "one": 1.0}], counting(tmp_path / "list", n))
    with pytest.raises(JobError, match="hosts is 0; use a whole number from 1"):
        fit(dataset, counting(tmp_path / "hosts", n), hosts=0)


def test_rows_of_a_lost_node_are_read_again(cluster: Any, tmp_path: Path) -> None:  # noqa: ANN401 -- ray has no types
    from ray import data  # noqa: PLC0415 -- skipped without

    n, removed = 400, list[int]()

    class RemovesANode:
        def on_step(self, view: JobView) -> None:
            if not removed and view.samples > 150:
                removed.append(view.samples)
                cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
                cluster.add_node(num_cpus=1)

    dataset = data.range(n, override_num_blocks=4).map_batches(with_ones)
    found = fit(dataset, counting(tmp_path / "run", n, seconds=0.1), callbacks=[RemovesANode()])
    assert removed
    assert found == [3.0] * n
