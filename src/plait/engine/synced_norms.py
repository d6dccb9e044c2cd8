"""torch's `SyncBatchNorm`, which talks to all processes itself, past the plan.

On processors it ends in an error of torch. Under a pipeline or a split of layers some ranks would
wait for others, or count samples twice.
"""

from __future__ import annotations

from torch import nn

from plait.errors import ModelError
from plait.plan import Plan


def refuse_synced_norms(model: nn.Module, plan: Plan, device_type: str) -> None:
    """Raise `ModelError` for a `SyncBatchNorm` in training that the ranks cannot compute."""
    if plan.world_size == 1 or (device_type != "cpu" and plan.world_size == plan.dp.size):
        return
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm) and module.training:
            raise ModelError(
                f"'{name}' (SyncBatchNorm) takes its statistics over all processes at once, which "
                f"torch does on GPUs alone, and plait under dpN alone; the plan is '{plan}' on "
                f"{device_type}: take GroupNorm or LayerNorm, which compute what one device does "
                "under every plan, or BatchNorm, whose statistics are of a rank's micro-batch; "
                "convert_sync_batchnorm is not needed"
            )
