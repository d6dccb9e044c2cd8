"""The loaders that are compared: endless batches of the same samples, each from its own format.

A sample is a window of S + 1 tokens, and a batch is (input_ids [B, S], labels [B, S]) of int64.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from plait.datasets import Loader
from plait.datasets.sample_set import SampleSet

TokenBatch: TypeAlias = tuple[Tensor, Tensor]
TokenBatches: TypeAlias = Iterator[TokenBatch]
ROWS: Final = "rows"
SHARDS: Final = "shards"


def write_formats(samples: SampleSet, folder: Path, seq_len: int) -> None:
    """The windows as a saved set of the library `datasets`, and as shards of MosaicML."""
    import datasets as library

    windows = np.stack([_window(samples, index) for index in range(len(samples))])
    features = library.Features({"tokens": library.List(library.Value("int32"), seq_len + 1)})
    rows = library.Dataset.from_dict({"tokens": windows}, features=features)
    rows.save_to_disk(str(folder / ROWS))
    with streaming().MDSWriter(
        out=str(folder / SHARDS), columns={"tokens": f"ndarray:int32:{seq_len + 1}"}
    ) as shards:
        for window in windows:
            shards.write({"tokens": window})


def _window(samples: SampleSet, index: int) -> np.ndarray[Any, Any]:
    """All tokens of a sample, the last label included."""
    tokens, labels = samples[index]
    return torch.cat([tokens, labels[-1:]]).numpy().astype(np.int32)


def plait(samples: SampleSet, folder: Path, batch: int, workers: int) -> TokenBatches:
    """Windows of the mapped file of tokens, in a keyed permutation."""
    return Loader(samples, batch, workers=workers)


def hf_rows(samples: SampleSet, folder: Path, batch: int, workers: int) -> TokenBatches:
    """Rows of Arrow in torch's format, shuffled and stacked by torch's loader."""
    loader: Any = DataLoader(
        _rows(folder),
        batch_size=batch,
        shuffle=True,
        num_workers=workers,
        persistent_workers=workers > 0,
    )
    return _endless(loader)


def hf_batches(samples: SampleSet, folder: Path, batch: int, workers: int) -> TokenBatches:
    """The library's batches of rows, each asked for at once: its guide's way for speed."""
    rows = _rows(folder)
    sampler = BatchSampler(RandomSampler(rows), batch, drop_last=False)
    loader: Any = DataLoader(
        rows,
        sampler=sampler,
        batch_size=None,
        num_workers=workers,
        persistent_workers=workers > 0,
    )
    return _endless(loader)


def mosaic(samples: SampleSet, folder: Path, batch: int, workers: int) -> TokenBatches:
    """Shards of MosaicML, shuffled by its own order and read by its own loader."""
    library = streaming()
    local = Path(tempfile.mkdtemp(dir=folder)) / SHARDS  # sets of a process may not share a folder
    local.symlink_to(folder / SHARDS)
    loader: Any = library.StreamingDataLoader(
        library.StreamingDataset(local=str(local), shuffle=True, batch_size=batch),
        batch_size=batch,
        num_workers=workers,
        persistent_workers=workers > 0,
    )
    return _endless(loader)


Starter: TypeAlias = Callable[[SampleSet, Path, int, int], TokenBatches]
SYSTEMS: Final[Mapping[str, Starter]] = {
    "plait": plait,
    "datasets": hf_rows,
    "datasets, batched": hf_batches,
    "StreamingDataset": mosaic,
}


def _rows(folder: Path) -> Any:
    import datasets as library

    return library.load_from_disk(str(folder / ROWS)).with_format("torch")


def _endless(loader: Any) -> TokenBatches:
    """Epoch after epoch, as inputs and labels."""
    while True:
        for rows in loader:
            tokens = rows["tokens"].long()
            yield tokens[:, :-1], tokens[:, 1:]


def streaming() -> Any:
    """The package of MosaicML, which also has sets of pictures.

    Those import torchvision; where it isn't installed, empty modules stand in its place.
    """
    if "streaming" not in sys.modules and importlib.util.find_spec("torchvision") is None:
        _stand_in("torchvision")
        _stand_in("torchvision.datasets", VisionDataset=object)
        _stand_in("torchvision.transforms")
        _stand_in("torchvision.transforms.functional", to_tensor=None)
    import streaming as library

    return library


def _stand_in(name: str, **contents: object) -> None:
    """An empty module of a name."""
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    vars(module).update(contents)
    sys.modules[name] = module
