"""Batches that threads read ahead, in the order in which they are asked for.

What is read ahead is no part of the place in a stream: a run that resumes reads it again. Threads
share the mapped files of tokens, and nothing travels between processes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import Final

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from plait.datasets.collate import Batch, collate
from plait.datasets.sample_set import SampleSet

DEPTH: Final = 2
"""Batches that each thread has read or is reading."""


def read_ahead(
    dataset: SampleSet, indices: Iterator[Tensor], workers: int, ahead: deque[Future[Batch]]
) -> Iterator[Batch]:
    """The batch of each tensor of indices [B], by so many threads; pinned where there is a GPU.

    `ahead` holds those that are read or being read, the next one first.
    """
    read = partial(_pinned, dataset) if torch.cuda.is_available() else partial(collate, dataset)
    pool = ThreadPoolExecutor(workers, thread_name_prefix="data")
    try:
        ahead.extend(pool.submit(read, one) for one in islice(indices, DEPTH * workers))
        while ahead:
            batch = ahead.popleft().result()
            ahead.extend(pool.submit(read, one) for one in islice(indices, 1))
            yield batch
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _pinned(dataset: SampleSet, indices: Tensor) -> Batch:
    """A batch in memory from which a GPU copies by itself."""
    return tree_map_only(Tensor, Tensor.pin_memory, collate(dataset, indices))
