"""What each pipeline stage keeps for backward, measured and by formula: `python -m
benchmarks.hybrid.activations`.

Measured are the bytes that the forward of one micro-batch has made and that still live when it is
over, with what the stage received and without what it sends on; times the micro-batches that the
stage had under way at most. The formula is the cost model's
(`plait.predict.cost.memory.rank_memory`), times what the schedule keeps when it is simulated.
"""

from __future__ import annotations

import argparse
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import plait
from benchmarks.hybrid.subject import Subject
from benchmarks.machine import announce
from plait.parallel.pipeline import schedules
from plait.parallel.pipeline.payload import Payload
from plait.parallel.pipeline.simulate import simulate
from plait.plan import Plan
from plait.predict.cost.memory.rank_memory import stage_activations
from plait.predict.cost.model.describe import describe_keys
from plait.predict.cost.sharding import sharding
from plait.predict.cost.time.stages import StageBlocks

MICRO_BATCH = 2  # samples
NUM_MICRO_BATCHES = 8
SUBJECT = Subject(hidden_size=64, seq_len=64, num_samples=MICRO_BATCH * NUM_MICRO_BATCHES)
PLANS = (
    "pp4:1f1b mb8",
    "pp4:gpipe mb8",
    "pp4:zb-h1 mb8",
    "pp2:zbv mb8",
    "pp4:1f1b mb8 remat:selective",
    "pp4:1f1b mb8 remat:full",
)


def measure(text: str) -> dict[int, tuple[int, int, tuple[str, ...]]]:
    """For each stage of this rank: bytes saved by one micro-batch, micro-batches under way at most,
    names of its links.
    """
    world = SUBJECT.join(text)
    engine = SUBJECT.engine(text, world)
    saved: dict[int, int] = {}
    for number, part in engine.pipeline.parts.items():
        part.stage.module.forward = _counting(
            part.stage.module.forward, saved, number, engine.model
        )  # type: ignore[method-assign]
    engine.step(SUBJECT.share(world), trace=False)
    world.close()
    return {
        number: (saved[number], part.stage.peak_live, _links(part))
        for number, part in engine.pipeline.parts.items()
    }


def _links(part: Any) -> tuple[str, ...]:
    return tuple(name for name, _ in part.stage.module._links)


class _Made(TorchDispatchMode):
    """The memory of every tensor that is made inside, as long as somebody holds it."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in tensors(output):
            storage = tensor.untyped_storage()
            self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return output

    def living(self) -> dict[int, int]:
        """Bytes by storage."""
        return {
            key: num_bytes
            for key, (storage, num_bytes) in self._made.items()
            if not storage.expired()
        }


def tensors(tree: Any) -> list[Tensor]:
    """What a stage receives or returns, as a list."""
    return [
        leaf
        for leaf in tree_leaves(tree.tensors if isinstance(tree, Payload) else tree)
        if isinstance(leaf, Tensor)
    ]


def _counting(forward: Any, saved: dict[int, int], number: int, model: Any) -> Any:
    def counted(inputs: Any, received: Payload | None) -> Any:
        with _Made() as made:
            output = forward(inputs, received)
        living = made.living() | {
            x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors(received)
        }
        others = [*tensors(output), *model.parameters()]
        for tensor in others:
            living.pop(tensor.untyped_storage()._cdata, None)
        saved[number] = sum(living.values())
        return output

    return counted


def formula(text: str, stage: int, links: tuple[str, ...]) -> tuple[float, int]:
    """(bytes of one micro-batch, micro-batches kept) of one stage, without the head's logits, which
    the loss keeps.
    """
    plan = Plan.parse(text)
    model = describe_keys({"name": "gpt", **SUBJECT.keys}, SUBJECT.seq_len)
    blocks = {block.name: block for block in model.blocks()}
    inner = next(block for name, block in blocks.items() if name not in ("embedding", "head"))
    count = sum(link.startswith("blocks.") for link in links)
    shard = sharding(plan, SUBJECT.seq_len, MICRO_BATCH)
    _, each, _ = stage_activations(
        StageBlocks(((inner, count),)), shard, (plan.precision, plan.compile, plan.remat)
    )
    schedule = schedules.make(plan.pp.schedule, plan.pp.size, plan.micro_batches, plan.pp.virtual)
    return each, simulate(schedule).peak_activations[stage]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plans", nargs="+", default=PLANS)
    given = parser.parse_args()
    announce()
    print(
        "| plan | stage | links | kept (formula) | measured kB | formula kB | measured / formula |"
    )
    print("|---|---|---|---|---|---|---|")
    for text in given.plans:
        found: dict[int, Any] = {}
        for rank in plait.launch(measure, text, nproc=Plan.parse(text).world_size):
            found |= rank
        for stage, (num_bytes, live, links) in sorted(found.items()):
            each, kept = formula(text, stage, links)
            measured = num_bytes * live
            told = each * kept
            blocks = sum(link.startswith("blocks.") for link in links)
            ratio = f"{measured / told:.2f}" if told else "-"
            print(
                f"| {text} | {stage} | {blocks} blocks of {len(links)} | {live} ({kept}) "
                f"| {measured / 1e3:,.0f} | {told / 1e3:,.0f} | {ratio} |"
            )


if __name__ == "__main__":
    main()
