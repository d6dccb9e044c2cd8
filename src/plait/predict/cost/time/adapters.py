"""Seconds that adapters add to a frozen model.

An adapter is two products and a sum, with gradients of their own. Products so narrow take the time
to read and to write their long side. Codes of frozen weights are decoded before forward and before
backward. DoRA takes the norms of sums in each forward.
"""

from __future__ import annotations

from functools import lru_cache

from plait.predict.cost.memory.rank_memory import Numerics
from plait.predict.cost.model.adapters import Adapters
from plait.predict.cost.model.operations import Block, Matmul, is_layer
from plait.predict.cost.sharding import Sharding
from plait.predict.cost.time.machine import Machine
from plait.predict.cost.time.passes import PassSeconds
from plait.predict.cost.time.stages import StageBlocks
from plait.predict.cost.widths import BYTES

DECODING_PASSES = 3.0
"""Times that a decoded number passes memory: written, then copied to its place
(`CodedWeight.decode`).
"""
NORM_PASSES = {True: 3.0, False: 7.0}
"""Times that a number whose norm DoRA takes passes memory, by whether blocks are compiled.

A compiled norm reads weight and product. One that is not makes the scaled product and the sum
first.
"""


def adapter_pass(
    adapters: Adapters,
    stage: StageBlocks,
    machine: Machine,
    shard: Sharding,
    numerics: Numerics,
) -> PassSeconds:
    """The adapters of a stage's layers for one micro-batch; layers share them evenly.

    `numerics` is (precision, compiled, recomputation). What a tensor axis sends for adapters is not
    counted: it is as narrow as they are.
    """
    total = PassSeconds()
    for block, count, remat in stage.recomputed(numerics[2]):
        if is_layer(block):
            own = (*numerics[:2], remat)
            total = total.plus(_of_layer(adapters, machine, shard, own), count)
            total = total.plus(_of_frozen(adapters, block, machine, shard, own), count)
    return total


@lru_cache(maxsize=4096)
def _of_layer(
    adapters: Adapters, machine: Machine, shard: Sharding, numerics: Numerics
) -> PassSeconds:
    """The adapters of one layer of the model."""
    precision, compiled, remat = numerics
    total = PassSeconds()
    for adapter, number in adapters.layers:
        one = machine.block_seconds(adapter, shard, precision, compiled)
        again = {"full": one.full, "selective": one.selective}.get(remat, 0.0)
        launch = machine.efficiency.launch_seconds
        seconds = PassSeconds(
            forward=one.forward,
            input_grad=one.input_grad,
            weight_grad=one.weight_grad,
            recompute=again,
            host_forward=launch * one.launches_forward,
            host_backward=launch * one.launches_backward,
        )
        total = total.plus(seconds, number)
    return total


def _of_frozen(
    adapters: Adapters, block: Block, machine: Machine, shard: Sharding, numerics: Numerics
) -> PassSeconds:
    """Seconds that the frozen weights of one block cost besides their products.

    Kernels of their gradients are not started.
    """
    precision, compiled, remat = numerics
    experts = block.expert_parameters
    numbers = ((block.parameters - experts) + experts / shard.ep) / shard.tp
    width = BYTES[precision]
    decoded = adapters.coded * (adapters.coded_bytes + DECODING_PASSES * width)
    normed = adapters.normed * NORM_PASSES[compiled] * width
    spared = sum(isinstance(op, Matmul) and op.parameters > 0 for op in block.operations)
    return PassSeconds(
        forward=machine.copy_seconds(numbers * (decoded + normed)),
        input_grad=machine.copy_seconds(numbers * decoded),
        recompute=machine.copy_seconds(numbers * normed) if remat == "full" else 0.0,
        host_backward=-machine.efficiency.launch_seconds * spared,
    )
