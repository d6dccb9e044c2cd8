"""How often the ranks of a plan meet in a step. A probe divides by these counts to find the loss of
one meeting.
"""

from __future__ import annotations

from plait.plan import Plan
from plait.predict.cost.layout import lay_out
from plait.predict.cost.model.operations import Attention
from plait.predict.cost.records import Job
from plait.predict.cost.time.messages import block_messages
from plait.predict.cost.time.processor import Processor
from plait.predict.cost.time.synchronization import COLLECTS, meeting, ring_steps


def meetings_of_step(job: Job, plan: Plan, machine: Processor) -> float:
    """Synchronisations of a rank in a step of a plan that has one axis.

    The units are those of `plait.predict.cost.time.synchronization.meeting_seconds`. They are
    transfers of micro-batches, parameters in collectives of the data axis, steps of a ring, or
    messages inside blocks.
    """
    layout = lay_out(job, plan)
    times = plan.micro_batches
    if plan.pp.size > 1:
        return 2.0 * times * plan.pp.virtual
    if plan.dp.size > 1:
        data = layout.ranks[0].data
        each = len(data.forward) + len(data.backward)
        once = sum(message.op not in COLLECTS for message in data.reduce)
        return float((times * each + once) * layout.ranks[0].buckets.tensors)
    blocks = [block for block, count in layout.stages[0].runs for _ in range(count)]
    if plan.cp.size > 1 and plan.cp.strategy == "ring":
        cores = sum(isinstance(op, Attention) for block in blocks for op in block.operations)
        return (
            times * cores * ring_steps(plan.cp.size, job.model.seq_len, machine.profile.met_at_once)
        )
    messages = (
        message
        for block in blocks
        for message in block_messages(block, layout.shard, plan.precision)
    )
    return times * sum(message.count for message in messages if meeting(message, layout.shard))
