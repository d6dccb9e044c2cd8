"""Seconds of a step. Compute and exposed communication of each stage come first, then the pipeline
over them, the data axis and the update.

Overlap is modelled. The data axis hides behind backward as far as there is backward. Tensor and
expert axes stand in the way of the next operation and are exposed. Ring attention hides behind its
own compute.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from plait.predict.cost.model.operations import Block
from plait.predict.cost.sharding import Sharding
from plait.predict.cost.time.groups import group
from plait.predict.cost.time.machine import Machine
from plait.predict.cost.time.messages import Message, block_messages
from plait.predict.cost.widths import BYTES


@dataclass(frozen=True)
class PassSeconds:
    """One block (or stage) and one micro-batch: compute of each pass and exposed communication by
    axis.

    `tensor_forward` to `expert_backward` are parts of `communication_forward` and `_backward`. The
    fields of `host` are the seconds in which the host starts the work of a pass.
    """

    forward: float = 0.0
    input_grad: float = 0.0
    weight_grad: float = 0.0
    recompute: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    expert: float = 0.0
    communication_forward: float = 0.0
    communication_backward: float = 0.0
    tensor_forward: float = 0.0
    tensor_backward: float = 0.0
    expert_forward: float = 0.0
    expert_backward: float = 0.0
    host_forward: float = 0.0
    host_backward: float = 0.0

    def plus(self, other: PassSeconds, times: float) -> PassSeconds:
        """The sum with `times` of another."""
        return PassSeconds(
            *(getattr(self, name) + times * getattr(other, name) for name in _FIELDS)
        )

    def computed_by(self, share: float) -> PassSeconds:
        """The passes where only a part of the device's units compute."""
        return replace(
            self,
            forward=self.forward / share,
            input_grad=self.input_grad / share,
            weight_grad=self.weight_grad / share,
            recompute=self.recompute / share,
        )

    def beside(self, seconds: float) -> PassSeconds:
        """The passes with so many seconds of copies beside their kernels, each way."""
        return replace(
            self,
            host_forward=max(self.host_forward, seconds),
            host_backward=max(self.host_backward, seconds),
        )

    @cached_property
    def waits(self) -> tuple[float, float]:
        """Forward and backward seconds in which the device waits for the host to start its work."""
        forward = self.forward + self.communication_forward
        backward = self.input_grad + self.weight_grad + self.recompute + self.communication_backward
        return max(0.0, self.host_forward - forward), max(0.0, self.host_backward - backward)

    def exposed(self, tensor: float, expert: float) -> tuple[float, float]:
        """Exposed seconds of communication, forward and backward.

        These shares of that on the tensor and the expert axis overlap with compute, as far as there
        is compute.
        """
        backward = self.input_grad + self.weight_grad + self.recompute
        hidden_forward = min(
            self.forward, tensor * self.tensor_forward + expert * self.expert_forward
        )
        hidden_backward = min(
            backward, tensor * self.tensor_backward + expert * self.expert_backward
        )
        return (
            self.communication_forward - hidden_forward,
            self.communication_backward - hidden_backward,
        )

    @property
    def compute(self) -> float:
        """All compute, recomputation included."""
        return self.forward + self.input_grad + self.weight_grad + self.recompute


_FIELDS = tuple(PassSeconds.__dataclass_fields__)


@lru_cache(maxsize=65536)
def block_pass(
    block: Block, machine: Machine, shard: Sharding, numerics: tuple[str, bool, str]
) -> PassSeconds:
    """The passes of one block; `numerics` is (precision, compiled, recomputation)."""
    precision, compiled, remat = numerics
    compute = machine.block_seconds(block, shard, precision, compiled)
    seconds = {"tp": [0.0, 0.0], "cp": [0.0, 0.0], "ep": [0.0, 0.0]}
    calls = [0.0, 0.0]
    again_sent = dict.fromkeys(seconds, 0.0)
    for message in block_messages(block, shard, precision):
        spent = machine.message_seconds(message, shard)
        seconds[message.axis][message.when == "backward"] += spent
        calls[message.when == "backward"] += message.count
        if sent_again(block, message, shard, remat):
            again_sent[message.axis] += spent
    # A ring passes keys while the attention of the previous ones runs.
    hidden = (compute.attention, 2.5 * compute.attention) if shard.context == "ring" else (0.0, 0.0)
    context = [
        max(0.0, sent - machine.efficiency.overlap * behind)
        for sent, behind in zip(seconds["cp"], hidden, strict=True)
    ]
    forward = seconds["tp"][0] + context[0] + seconds["ep"][0]
    backward = seconds["tp"][1] + context[1] + seconds["ep"][1]
    if again_sent["cp"]:
        again_sent["cp"] = context[0]
    inner = block.name not in {"head", "embedding"}
    again = {"full": compute.full, "selective": compute.selective}.get(remat, 0.0) if inner else 0.0
    efficiency = machine.efficiency
    call = efficiency.call_seconds
    late = 0.0
    if machine.num_devices > machine.devices_per_node:
        call += shard.skew * shard.tp
        late = shard.late * shard.tp
    late_forward = late * calls[0]
    late_backward = late * (calls[1] + (calls[0] if again else 0.0))
    host_forward = efficiency.launch_seconds * compute.launches_forward + call * calls[0]
    host_backward = efficiency.launch_seconds * compute.launches_backward + call * calls[1]
    return PassSeconds(
        forward=compute.forward,
        input_grad=compute.input_grad,
        weight_grad=compute.weight_grad,
        recompute=again,
        tensor=sum(seconds["tp"]) + again_sent["tp"] + late_forward + late_backward,
        context=sum(context) + again_sent["cp"],
        expert=sum(seconds["ep"]) + again_sent["ep"],
        communication_forward=forward + late_forward,
        communication_backward=backward + sum(again_sent.values()) + late_backward,
        tensor_forward=seconds["tp"][0],
        tensor_backward=seconds["tp"][1] + again_sent["tp"],
        expert_forward=seconds["ep"][0],
        expert_backward=seconds["ep"][1] + again_sent["ep"],
        host_forward=host_forward,
        host_backward=host_backward + (host_forward if again and remat == "full" else 0.0),
    )


def sent_again(block: Block, message: Message, shard: Sharding, remat: str) -> bool:
    """Whether recomputation inside backward sends a message of the forward once more."""
    if message.when != "forward" or not message.repeats or block.name in {"head", "embedding"}:
        return False
    return remat == "full" or (remat == "selective" and shard.resend)


def send_seconds(
    machine: Machine, shard: Sharding, width: int, precision: str, stride: int
) -> float:
    """Seconds to hand one micro-batch to the next stage, whose rank is `stride` away."""
    payload = shard.tokens * width * shard.message_width(BYTES[precision]) / shard.sequence_split
    there = group(2, stride, machine.devices_per_node)
    if shard.scatters_sends and shard.sequence_split < shard.tp:
        gathered = machine.collective_seconds(
            "all_gather", payload, group(shard.tp, 1, machine.devices_per_node)
        )
        return machine.collective_seconds("send", payload / shard.tp, there) + gathered
    return machine.collective_seconds("send", payload, there)
