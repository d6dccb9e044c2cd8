"""Local SGD and DiLoCo: every rank trains by itself for `every` steps, then all meet in one outer
step.

S. Stich, Local SGD Converges Fast and Communicates Little (ICLR 2019); A. Douillard et al., DiLoCo
(2023), algorithm 1.

    inner     `every` times:
              x_r <- optimizer(x_r, gradient of the mean loss over rank r's own samples)
    outer     d   <- sum_r w_r (anchor - x_r),  w_r = rank r's share of the round's tokens
              m   <- momentum m + d;   anchor <- anchor - lr (d + momentum m)
              x_r <- anchor for all r

With lr 1 and no momentum the outer step is the average, and with `every` 1 and plain SGD inside,
all-reduce SGD. Between two outer steps nothing is sent: no gradient, no loss.

Where ranks come and go (`comm.membership`) they meet again for every outer step. One that has left
or died is missing from the sum. One that comes is given anchor, momentum and step by a member, and
begins with the next round. Where one dies in the outer step itself, the others make it again.
Elsewhere ranks are fixed, and come and go through a checkpoint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from copy import copy

import torch
from torch import Tensor

from plait.comm import Axis, Waitable, wait_all
from plait.comm.rendezvous import RendezvousRound
from plait.outer.compression import Int8Sum
from plait.outer.driver import Change, Driver, StepReport
from plait.outer.options import Asynchrony
from plait.parallel.data import OptimizerShard, ReplicatedParameters


class LocalDriver(Driver):
    """`dpN:local,everyH`. A rank without samples in a round has no weight in it.

    A round is the steps between two outer steps; an anchor holds the weights at its begin.
    """

    is_synchronous = False

    def __init__(
        self,
        strategy: ReplicatedParameters,
        make_update: Callable[[Change], None],
        asynchrony: Asynchrony,
    ) -> None:
        """Where ranks join and leave this one meets the others here. Collective."""
        self.first_step = 0
        self._strategy = strategy
        self._make_update = make_update
        self._options = asynchrony
        self._group = strategy.group
        self._masters = strategy.masters
        self._anchors = [master.clone() for master in self._masters]
        has_momentum = asynchrony.outer_momentum > 0
        self._momenta = [torch.zeros_like(m) for m in self._masters] if has_momentum else []
        group = self._group
        self._sums: list[Int8Sum] = []
        if asynchrony.compress == "int8" and (group.axis.size > 1 or group.membership is not None):
            self._sums = [Int8Sum(group.axis, m.numel(), m.dtype, m.device) for m in self._masters]
        self._steps_in_round = 0
        self._tokens_in_round = 0.0
        self._last = (0.0, 0.0)  # loss sum and tokens of this step
        self._unreported = 0.0
        self._report = StepReport(0.0, 0.0, 0)
        self._ends_round = False
        if group.membership is not None:
            self._outer_step()

    def before_step(self) -> None:
        pass

    def sum_totals(self, totals: Tensor, axis: Axis) -> None:
        """Keep the totals here; the count is this rank's weight in the round."""
        self._last = float(totals[0]), float(totals[1])
        self._tokens_in_round += self._last[1]

    def apply(self, change: Change) -> None:
        """Update this rank's weights, and end the round where it is full."""
        self._make_update(change)
        self.first_step = change.step + 1
        self._strategy.publish()
        self._steps_in_round += 1
        self._ends_round = self._steps_in_round == self._options.every
        if self._ends_round:
            self._outer_step()

    def report(self, loss_sum: float, count: float) -> StepReport:
        """This rank's loss inside a round. At its end it is that of all ranks, with the tokens of
        the round that were not reported yet.
        """
        if self._ends_round:
            self._unreported = 0.0
            return self._report
        self._unreported += count
        return StepReport(loss_sum, count, int(count))

    def metrics(self) -> dict[str, float]:
        return {"outer_step": float(self._ends_round)}

    def staleness(self) -> Counter[int]:
        return Counter()

    def extra_state(self, piece: OptimizerShard) -> dict[str, Tensor]:
        """The momentum of the outer step."""
        if not self._momenta:
            return {}
        return {"momentum": piece.part.view(self._momenta[piece.state.index])}

    def live_tensors(self) -> list[Tensor]:
        errors = [error for s in self._sums for error in (s.worker_error, s.shard_error)]
        return [*self._anchors, *self._momenta, *errors]

    def restart(self) -> None:
        """Begin a round at the parameters as they are; rounding errors of others are gone."""
        for compressed in self._sums:
            compressed.forget()
        self._open_round()

    def _open_round(self) -> None:
        """Begin a round at the parameters as they are."""
        self._steps_in_round = 0
        self._tokens_in_round = 0.0
        for anchor, master in zip(self._anchors, self._masters, strict=True):
            anchor.copy_(master)

    def synchronize(self) -> None:
        """End the round early, and send the rounding errors that eight bits have kept back.

        The saved state is then one model and nothing beside it. Ranks must have done equally many
        steps. No rank joins here, as it could not know that the round has ended early.
        """
        if self._steps_in_round:
            self._outer_step(opens=False)
        if self._sums or self._group.membership is not None:
            self._flush()
        self._unreported = 0.0

    def leave(self) -> None:
        pass

    def close(self) -> None:
        pass

    @torch.no_grad()
    def _outer_step(self, opens: bool = True) -> None:
        """The outer step. Collective."""
        differences = self._together(self._differences, opens)
        lr = self._options.outer_lr
        momentum = self._options.outer_momentum
        for index, difference in enumerate(differences):
            if self._momenta:
                moment = self._momenta[index].mul_(momentum).add_(difference)
                difference.add_(moment, alpha=momentum)
            self._masters[index].copy_(self._anchors[index].sub_(difference, alpha=lr))
        self._begin_round()

    def _begin_round(self) -> None:
        self._strategy.publish()
        self._open_round()

    def _differences(self) -> list[Tensor]:
        """The weighted difference of every bucket; the round's loss and tokens are summed with
        it.
        """
        axis, (loss_sum, count) = self._group.axis, self._last
        own = [self._tokens_in_round, loss_sum, count, self._unreported + count]
        scalars = torch.tensor(own, dtype=torch.float64, device=self._group.device)
        axis.all_reduce(scalars, control=True).wait()
        tokens, loss_sum, count, unreported = scalars.tolist()
        self._report = StepReport(loss_sum, count, int(unreported - self._unreported))
        share = self._tokens_in_round / (tokens or 1.0)
        differences = [
            anchor.sub(master).mul_(share)
            for anchor, master in zip(self._anchors, self._masters, strict=True)
        ]
        self._sum(differences)
        return differences

    @torch.no_grad()
    def _flush(self) -> None:
        """Add the rounding errors kept back, as if the last outer step had known them.

        A saved model has no residuals.
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
            self._begin_round()

    def _sum(self, differences: list[Tensor]) -> None:
        if self._sums:
            for compressed, difference in zip(self._sums, differences, strict=True):
                compressed.sum(difference)
            return
        works: list[Waitable] = [
            self._group.axis.all_reduce(difference, padding=state.bucket.padding)
            for difference, state in zip(differences, self._strategy.states, strict=True)
        ]
        wait_all(works)

    def _together(self, exchange: Callable[[], list[Tensor]], opens: bool) -> list[Tensor]:
        """The result of `exchange` among the ranks that are present.

        Ranks that are lost in it are left out, and it is made again. Empty where all ranks begin.
        """
        membership = self._group.membership
        if membership is None:
            return exchange()
        before = [copy(compressed) for compressed in self._sums]

        def undo() -> None:
            self._sums = [copy(compressed) for compressed in before]

        return membership.together(
            lambda round_: exchange() if self._bring_in(round_) else [], opens, undo
        )

    def _bring_in(self, round_: RendezvousRound) -> bool:
        """Give newcomers the state of a rank that was present.

        False where all ranks are new, and alike by their seed.
        """
        incumbents = [worker for worker in round_.members if worker not in round_.newcomers]
        for compressed in self._sums:
            compressed.regroup()
        if not incumbents or not round_.newcomers:
            return bool(incumbents)
        axis = self._group.axis
        root = round_.members.index(incumbents[0])
        steps = torch.tensor([float(self.first_step)], dtype=torch.float64)
        wait_all(
            [axis.broadcast(tensor, root) for tensor in (steps, *self._anchors, *self._momenta)]
        )
        self.first_step = int(steps)
        if axis.rank != root and round_.members[axis.rank] in round_.newcomers:
            for anchor, master in zip(self._anchors, self._masters, strict=True):
                master.copy_(anchor)
        return True
