"""Local SGD and DiLoCo: every rank trains by itself for `every` steps, then all meet in one outer
step.

S. Stich, Local SGD Converges Fast and Communicates Little (ICLR 2019); A. Douillard et al., DiLoCo
(2023), algorithm 1.

    inner     x_r <- optimizer(x_r, gradient of the mean loss over rank r's own samples)
    `every` times
    outer     d   <- sum_r w_r (anchor - x_r),  w_r = rank r's share of the round's tokens
              m   <- momentum m + d;   anchor <- anchor - lr (d + momentum m);   x_r <- anchor
              for all r

With lr 1 and no momentum the outer step is the average, and with `every` 1 and plain SGD inside,
all-reduce SGD. Between two outer steps nothing is sent: no gradient, no loss.

Where ranks come and go (`comm.crew`) they meet anew for every outer step: one that has left or died
is simply missing from the sum, one that comes is given anchor, momentum and step by one that was
there, and begins with the next round. Where one dies in the outer step itself, the others make it
again. Elsewhere ranks are fixed, and come and go through a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import ClassVar

import torch
from torch import Tensor

from plait.comm import Axis, Waitable, Work, wait_all
from plait.comm.roster import Meeting
from plait.data.asynchrony import Change
from plait.data.compression import Int8Sum
from plait.data.gradients import BucketState
from plait.data.replicated import Replicated
from plait.data.strategy import DataGroup, Piece, Told, Weight, squared_norm
from plait.data.units import Unit


class Local(Replicated):
    """`dpN:local,everyH`. A rank without samples in a round weighs nothing in it."""

    lockstep: ClassVar[bool] = False

    def __init__(self, units: Sequence[Unit], group: DataGroup) -> None:
        super().__init__(units, group, _not_reduced)
        self._options = group.asynchrony
        self._anchors = [master.clone() for master in self._masters]
        momentum = self._options.outer_momentum > 0
        self._momenta = [torch.zeros_like(master) for master in self._masters] if momentum else []
        self._sums: list[Int8Sum] = []
        if self._options.compress == "int8" and (group.axis.size > 1 or group.crew is not None):
            self._sums = [Int8Sum(group.axis, m.numel(), m.dtype, m.device) for m in self._masters]
        self._steps_in_round = 0
        self._tokens_in_round = 0.0
        self._last = (0.0, 0.0)  # loss sum and tokens of this step
        self._untold = 0.0
        self._told = Told(0.0, 0.0, 0)
        self._met = False

    def start(self, apply: Callable[[Change], None]) -> None:
        super().start(apply)
        if self.group.crew is not None:
            self._meet()

    def _launch(self, state: BucketState) -> None:
        """Gradients stay here."""

    def squared_norm(self, weight: Weight | None = None) -> Tensor:
        """Of this rank's own gradient."""
        return squared_norm(
            (p.value.grad for p in self.pieces if p.value.grad is not None), self.group.device
        )

    def total(self, scalars: Tensor, axis: Axis) -> None:
        """They stay here too; the count is this rank's weight in the round."""
        self._last = float(scalars[0]), float(scalars[1])
        self._tokens_in_round += self._last[1]

    def update(self, change: Change) -> None:
        super().update(change)
        self.steps_before = change.step + 1

    def end_step(self) -> None:
        super().publish()
        self._steps_in_round += 1
        self._met = self._steps_in_round == self._options.every
        if self._met:
            self._meet()

    def tell(self, loss_sum: float, count: float) -> Told:
        """Of this rank inside a round; at its end, of all ranks, with the tokens of the round that
        were not yet told.
        """
        if self._met:
            self._untold = 0.0
            return self._told
        self._untold += count
        return Told(loss_sum, count, int(count))

    def details(self) -> dict[str, float]:
        return {"outer_step": float(self._met)}

    def kept(self, piece: Piece) -> dict[str, Tensor]:
        return (
            {"momentum": piece.part.view(self._momenta[piece.state.index])} if self._momenta else {}
        )

    def settle(self) -> None:
        """End the round early, and send what eight bits have kept back: what is saved is one model
        and nothing beside it.

        Ranks must have done equally many steps. Nobody comes in here, who would not know that a
        round has ended early.
        """
        if self._steps_in_round:
            self._meet(opens=False)
        if self._sums or self.group.crew is not None:
            self._flush()
        self._untold = 0.0

    def publish(self) -> None:
        """The pieces were written from outside: a round begins there."""
        super().publish()
        self._steps_in_round = 0
        self._tokens_in_round = 0.0
        for anchor, master in zip(self._anchors, self._masters, strict=True):
            anchor.copy_(master)

    @torch.no_grad()
    def _meet(self, opens: bool = True) -> None:
        """The outer step. Collective."""
        differences = self._together(self._differences, opens)
        lr = self._options.outer_lr
        momentum = self._options.outer_momentum
        for index, difference in enumerate(differences):
            if self._momenta:
                moment = self._momenta[index].mul_(momentum).add_(difference)
                difference.add_(moment, alpha=momentum)
            self._masters[index].copy_(self._anchors[index].sub_(difference, alpha=lr))
        self.publish()

    def _differences(self) -> list[Tensor]:
        """d of every bucket, and on the way what results tell of this round."""
        axis, (loss_sum, count) = self.group.axis, self._last
        own = [self._tokens_in_round, loss_sum, count, self._untold + count]
        scalars = torch.tensor(own, dtype=torch.float64, device=self.group.device)
        axis.all_reduce(scalars, control=True).wait()
        tokens, loss_sum, count, untold = scalars.tolist()
        self._told = Told(loss_sum, count, int(untold - self._untold))
        share = self._tokens_in_round / max(tokens, 1.0)
        differences = [
            anchor.sub(master).mul_(share)
            for anchor, master in zip(self._anchors, self._masters, strict=True)
        ]
        self._sum(differences)
        return differences

    @torch.no_grad()
    def _flush(self) -> None:
        """Make good what eight bits have kept back, as if the last outer step had known it: a saved
        model has no residuals.
        """
        lr = self._options.outer_lr
        momentum = self._options.outer_momentum
        kept_back = self._together(
            lambda: [compressed.flush() for compressed in self._sums], opens=False
        )
        for index, missing in enumerate(kept_back):
            if self._momenta:
                self._momenta[index].add_(missing)
            self._masters[index].copy_(
                self._anchors[index].sub_(missing, alpha=lr * (1 + momentum))
            )
        if kept_back:
            self.publish()

    def _sum(self, differences: list[Tensor]) -> None:
        if self._sums:
            for compressed, difference in zip(self._sums, differences, strict=True):
                compressed.sum(difference)
            return
        works: list[Waitable] = [
            self.group.axis.all_reduce(difference, padding=state.bucket.padding)
            for difference, state in zip(differences, self.states, strict=True)
        ]
        wait_all(works)

    def _together(self, exchange: Callable[[], list[Tensor]], opens: bool) -> list[Tensor]:
        """What `exchange` gives among those that are in: again without those that are lost in it.
        Nothing where all begin.
        """
        crew = self.group.crew
        if crew is None:
            return exchange()
        before = [copy(compressed) for compressed in self._sums]

        def undo() -> None:
            self._sums = [copy(compressed) for compressed in before]

        return crew.together(
            lambda meeting: exchange() if self._bring_in(meeting) else [], opens, undo
        )

    def _bring_in(self, meeting: Meeting) -> bool:
        """Give those that have come what one that was there has; False where all are new, and alike
        by their seed.
        """
        elders = [seat for seat in meeting.members if seat not in meeting.newcomers]
        for compressed in self._sums:
            compressed.regroup()
        if not elders or not meeting.newcomers:
            return bool(elders)
        axis = self.group.axis
        root = meeting.members.index(elders[0])
        steps = torch.tensor([float(self.steps_before)], dtype=torch.float64)
        wait_all(
            [axis.broadcast(tensor, root) for tensor in (steps, *self._anchors, *self._momenta)]
        )
        self.steps_before = int(steps)
        if axis.rank != root and meeting.members[axis.rank] in meeting.newcomers:
            for anchor, master in zip(self._anchors, self._masters, strict=True):
                master.copy_(anchor)
        return True

    def live_tensors(self) -> dict[str, list[Tensor]]:
        tensors = super().live_tensors()
        errors = [error for s in self._sums for error in (s.worker_error, s.shard_error)]
        return {
            **tensors,
            "optimizer": [*tensors["optimizer"], *self._anchors, *self._momenta, *errors],
        }


def _not_reduced(axis: object, flat: Tensor, padding: int) -> Work:
    raise AssertionError("a local strategy reduces no gradients")
