"""What a machine of a replica is made of, whatever the algorithm it computes for."""

from dataclasses import dataclass
from typing import final

import torch

from distbelief.data.dataset import Dataset
from distbelief.errors import JobError
from distbelief.parameter_server.client.client import ParameterClient
from distbelief.runtime.assembling import Split, client_of, dtype_of
from distbelief.runtime.common_roles import layout_of
from distbelief.runtime.execution.counting import with_counts
from distbelief.runtime.execution.dataflow import dataflow
from distbelief.runtime.execution.operations import Dataflow
from distbelief.runtime.machine.machine_names import Place
from distbelief.runtime.machine.portions import PortionReader
from distbelief.runtime.task.task import BuildContext


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaParts:
    """Parts of one machine.

    Attributes:
        flow: What it computes, and keeps.
        dtype: Of what it keeps.
        client: Of the shards that hold that; it pushes.
        dataset: The training data.
        reader: Of what the machine needs of them.
    """

    flow: Dataflow
    dtype: torch.dtype
    client: ParameterClient
    dataset: Dataset
    reader: PortionReader


def replica_parts(
    place: Place, *, context: BuildContext, split: Split, batch: tuple[str, int]
) -> ReplicaParts:
    """Return the parts of a machine.

    Args:
        place: Which machine.
        context: Of the job.
        split: How its model is split.
        batch: Which key of [algorithm] says how many samples are computed at once, and
            what it says.

    Raises:
        JobError: the plan is for other batches, or the data cannot be built.
    """
    key, n_samples = batch
    if n_samples != split.plan.batch:
        raise JobError(
            f"[algorithm] {key} is {n_samples}, and the plan is for batches of "
            f"{split.plan.batch}: plan again, or use that"
        )
    flow = with_counts(
        dataflow(split.compiled(), place.machine, loss=split.graph.outputs[-1]),
        {spec.name for spec in layout_of(context).tensors},
    )
    dtype, dataset = dtype_of(context), context.train_data()
    return ReplicaParts(
        flow=flow,
        dtype=dtype,
        client=client_of(flow, context, pushes=True),
        dataset=dataset,
        reader=PortionReader(dataset, graph=split.graph, reads=flow.reads, dtype=dtype),
    )
