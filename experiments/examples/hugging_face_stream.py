"""A stream of Hugging Face `datasets`, in another order in each epoch.

[data.train]
factory = "hugging_face_stream:rows"
arguments = { files = "./rows/*.jsonl" }
limit = 50000        # samples of an epoch: the stream has no length

[algorithm]
loss = "hugging_face_stream:loss"
"""

import datasets
import torch
from torch.nn import functional


def rows(files: str) -> datasets.IterableDataset:
    found = datasets.load_dataset("json", data_files=files, split="train", streaming=True)
    # The job calls set_epoch, from which it shuffles anew.
    return found.with_format("torch").shuffle(seed=0, buffer_size=100)


def loss(outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return functional.cross_entropy(outputs, batch["y"])
