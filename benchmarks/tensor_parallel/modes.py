"""The four modes side by side as width grows: time, bytes sent, activations and parameters held, on
as many ranks.

    python -m benchmarks.tensor_parallel.modes [--ranks 4 8] [--widths 64 128 256 512] [--rounds 5]
    [--plot FILE.svg]

`linear` is a column to four times the width and the row back; `block` is a whole transformer block.
The modes live in the same ranks and take turns, a step a round; times are medians, bytes and memory
those of the fullest rank. Activations are what autograd keeps for backward, parameters excepted, as
its own hooks see it. Ranks beyond the cores take turns on them: compare times at one number of
ranks only.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.machine import announce
from benchmarks.tensor_parallel.plot import Panel, small_multiples
from plait import comm, models
from plait.comm import World
from plait.launcher import launch
from plait.mesh import Mesh
from plait.parallel.tensor import TensorGroup, apply
from plait.plan import Plan
from plait.products import Products

MODES = {
    4: ["tp4", "tp4:1d,sp", "tp4:2d"],
    8: ["tp8", "tp8:1d,sp", "tp8:2.5d,depth2", "tp8:3d"],
}
KINDS = ("linear", "block")
SEQUENCE = 128
BATCH = 8
HEADS = 8
PICTURED = {"seconds": "seconds", "sent_bytes": "bytes sent", "activation_bytes": "bytes kept"}


@dataclass
class Row:
    """One mode at one width; of a rank."""

    kind: str
    plan: str
    ranks: int
    width: int
    seconds: float = 0.0
    sent_bytes: int = 0
    activation_bytes: int = 0
    parameter_bytes: int = 0


class Case:
    """A layer or block under one plan, on this rank."""

    def __init__(self, kind: str, plan_text: str, width: int, world: World) -> None:
        plan = Plan.parse(plan_text)
        self.row = Row(kind, plan_text, plan.world_size, width)
        self.world = world
        torch.manual_seed(0)
        self.model: Any = (
            nn.Sequential(nn.Linear(width, 4 * width), nn.Linear(4 * width, width))
            if kind == "linear"
            else _gpt(width)
        )
        roles = {"0": "column", "1": "row"} if kind == "linear" else models.roles_for(self.model)
        group = TensorGroup(
            self.world,
            plan.tp.mode,
            plan.tp.sequence_parallel,
            plan_text,
            products=Products("torch"),
        )
        self.split = apply(self.model, roles, group)
        for name, param in self.model.named_parameters():
            param.data = torch.randn(self.split.placements[name].local_shape) * 0.02
        self.part = self.model if kind == "linear" else self.model.blocks[0]
        stream = self.split.mode.residual
        self.x = stream.local_part(torch.zeros(BATCH, SEQUENCE, width)).clone().requires_grad_()
        self.row.parameter_bytes = sum(
            param.numel() * param.element_size() for param in self.part.parameters()
        )

    def forward(self) -> Tensor:
        self.split.context.layout = self.split.mode.residual
        y: Tensor = self.part(self.x)
        return y

    def step(self) -> None:
        """Forward, backward, and the sums of gradients that the mode leaves to the end of a
        step.
        """
        self.forward().sum().backward()
        gradients = [
            (name, param.grad)
            for name, param in self.model.named_parameters()
            if param.grad is not None
        ]
        self.split.sum_partial(gradients)
        self.split.context.forget()
        for param in self.model.parameters():
            param.grad = None
        self.x.grad = None

    def account(self) -> None:
        """Bytes that one step sends, and what one forward keeps."""
        before = self.world.ledger.copy()
        self.step()
        self.row.sent_bytes = self.world.ledger.since(before).bytes()
        held = {param.untyped_storage().data_ptr() for param in self.model.parameters()}
        kept: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in held:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            y = self.forward()
        self.row.activation_bytes = sum(kept.values())
        y.sum().backward()
        self.split.context.forget()


def _gpt(width: int) -> nn.Module:
    return models.make(
        "gpt",
        num_hidden_layers=1,
        hidden_size=width,
        num_attention_heads=HEADS,
        vocab_size=64,
        max_position_embeddings=SEQUENCE,
    )


def measure(
    number: int, widths: list[int], rounds: int, limit_seconds: float
) -> list[dict[str, Any]]:
    """The rows of every mode on `number` ranks. Runs in every rank."""
    torch.set_num_threads(1)
    worlds = {plan: comm.init(Mesh.of(Plan.parse(plan))) for plan in MODES[number]}
    rows = []
    start = time.monotonic()
    told = worlds[MODES[number][0]].axis("world").gather_objects
    for kind in KINDS:
        for width in widths:
            cases = [Case(kind, plan, width, world) for plan, world in worlds.items()]
            seconds: list[list[float]] = [[] for _ in cases]
            for case in cases:
                case.account()
            for index in range(rounds):
                if index > 1 and max(told(time.monotonic() - start)) > limit_seconds:
                    break
                for case, own in zip(cases, seconds, strict=True):
                    case.world.barrier()
                    began = time.perf_counter()
                    case.step()
                    case.world.barrier()
                    own.append(time.perf_counter() - began)
            for case, own in zip(cases, seconds, strict=True):
                case.row.seconds = statistics.median(own)
                rows.append(asdict(case.row))
    return rows


def fullest(by_rank: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Of each row the largest number of any rank."""
    return [
        {key: max(row[key] for row in same) for key in same[0]}
        for same in zip(*by_rank, strict=True)
    ]


def draw(rows: list[dict[str, Any]]) -> str:
    """A row of panels for each kind and number of ranks, a line for each mode."""
    panels = []
    for kind in KINDS:
        for number in sorted({row["ranks"] for row in rows}):
            here = [row for row in rows if row["kind"] == kind and row["ranks"] == number]
            for key, title in PICTURED.items():
                lines = {
                    plan: [(row["width"], row[key]) for row in here if row["plan"] == plan]
                    for plan in MODES[number]
                }
                panels.append(Panel(f"{kind}, {number} ranks: {title}", lines))
    return small_multiples(panels, columns=3)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8], choices=sorted(MODES))
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--seconds", type=float, default=120.0, help="after which every cell gets two rounds only"
    )
    parser.add_argument("--plot", type=Path, help="a picture of the table, as SVG")
    parser.add_argument(
        "--json",
        type=Path,
        help="the rows; rows of other numbers of ranks that are there are kept and drawn",
    )
    args = parser.parse_args()
    announce()
    rows = [] if args.json is None or not args.json.exists() else json.loads(args.json.read_text())
    rows = [row for row in rows if row["ranks"] not in args.ranks]
    for number in args.ranks:
        rows += fullest(
            launch(measure, number, args.widths, args.rounds, args.seconds, nproc=number)
        )
    rows.sort(key=lambda row: (KINDS.index(row["kind"]), row["ranks"]))
    print(
        "| | plan | width | ms | sent, KB | activations kept, KB | parameters, KB "
        "|\n|---|---|---|---|---|---|---|"
    )
    for row in rows:
        sizes = " | ".join(
            f"{row[key] / 1e3:.0f}" for key in ("sent_bytes", "activation_bytes", "parameter_bytes")
        )
        print(
            f"| {row['kind']} | {row['plan']} | {row['width']} | {row['seconds'] * 1e3:.1f} | "
            f"{sizes} |"
        )
    if args.json is not None:
        args.json.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    if args.plot is not None:
        args.plot.write_text(draw(rows))


if __name__ == "__main__":
    main()
