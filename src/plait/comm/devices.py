"""The device of a rank, and by what its messages go."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist


def own_device(device: torch.device | str | None, rank: int | None) -> torch.device:
    """The device of this rank: the one that is given, else the GPU of its local rank, else the CPU.

    A GPU becomes the current one, on which NCCL works.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type != "cuda":
        return device
    if device.index is None:
        if rank is None:
            rank = dist.get_rank() if dist.is_initialized() else 0
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def backend_for(device: torch.device, backend: str) -> str:
    """The backend of a rank whose tensors lie on a device. `auto` may become `native`; other names
    stay.

    `native` is NCCL on GPUs, which refuses two ranks on one GPU. So `auto` becomes `native` where
    this host has a GPU for each of its ranks. Elsewhere messages of GPUs are copied to the host.
    """
    if backend != "auto" or device.type == "cpu":
        return backend
    num_local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return "native" if num_local_ranks <= torch.cuda.device_count() else "auto"


def group_kind(device: torch.device, backend: str) -> str:
    """The kind of torch's process group on which a backend stands."""
    return "nccl" if device.type == "cuda" and backend == "native" else "gloo"
