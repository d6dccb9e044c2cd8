"""Messages of a tensor axis: their lines of ranks are those of the mesh."""

from __future__ import annotations

from plait.mesh import Mesh
from plait.plan import Plan
from plait.predict.cost.model.operations import Block, Matmul, Saved
from plait.predict.cost.sharding import sharding
from plait.predict.cost.time.messages import block_messages


def test_messages_of_3d_go_along_the_axes_of_the_engine() -> None:
    plan = Plan.parse("tp8:3d")
    inputs, outputs = 48, 32
    block = Block("block", (Matmul("up", inputs, outputs, "column"),), Saved(), inputs)
    messages = block_messages(block, sharding(plan, 16, 4.0), "float32")
    weight_bytes = inputs * outputs / 4 * 4
    gathers = [m for m in messages if m.op == "all_gather" and m.payload_bytes == weight_bytes]
    line = Mesh.of(plan).line(0, "tp_i")
    assert len(gathers) == 2
    assert {(m.size, m.stride) for m in gathers} == {(2, line[1] - line[0])}
