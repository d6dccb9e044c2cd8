"""Is a training step that somebody else parallelised right? Three steps of torch's own
Schedule1F1B, checked by `differential`.

The first is right. The second adds up gradients over two calls of `schedule.step`, which by default
divides *all* gradients by the number of micro-batches each time. The third pads its targets
unevenly under a loss that is a mean. Their loss curves fall in all three cases. Run it: `python
examples/check_torch_pipelining.py`
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import plait
from plait.verify import (
    Facts,
    Parallel,
    Recipe,
    Report,
    Slice,
    differential,
    gradients_of,
    parameters_of,
    run_reference,
)

MICRO_BATCHES = 4
SAMPLES = 8
LENGTH = 6
VOCABULARY = 31
WIDTH = 16


class Model(nn.Module):
    """Two halves; a pipeline stage is a model whose other half is None."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first: nn.Module | None = nn.Sequential(
            nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()
        )
        self.second: nn.Module | None = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, VOCABULARY)
        )
        self.double()

    def forward(self, values: Tensor) -> Tensor:
        values = self.first(values) if self.first is not None else values
        return self.second(values) if self.second is not None else values


def make_batches(number: int, padded: bool) -> list[tuple[Tensor, Tensor]]:
    """Batches of (tokens, targets), each [SAMPLES, LENGTH]; padded ones end after 1 to LENGTH
    tokens.
    """
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(number):
        tokens = torch.randint(0, VOCABULARY, (SAMPLES, LENGTH), generator=generator)
        targets = torch.randint(0, VOCABULARY, (SAMPLES, LENGTH), generator=generator)
        if padded:
            for sample in range(SAMPLES):
                targets[sample, sample % LENGTH + 1 :] = -100
        found.append((tokens, targets))
    return found


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """What most training scripts write: the mean over the targets of this micro-batch."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


def summed_loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """What it should mean: a sum and a count, divided once."""
    total = F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum"
    )
    return total, (targets != -100).sum()


def sgd(params) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.5)


def pipeline_step(batches: list[tuple[Tensor, Tensor]]) -> dict:
    """One update from all batches, as a user of torch's pipelining writes it: accumulate, then
    step.
    """
    rank = dist.get_rank()
    stages = dist.get_world_size()
    model = Model()
    if rank == 0:
        model.second = None
    else:
        model.first = None
    stage = PipelineStage(model, rank, stages, torch.device("cpu"))
    schedule = Schedule1F1B(
        stage,
        MICRO_BATCHES,
        loss_fn=lambda output, target: mean_loss(output, target) / len(batches),
    )
    optimizer = sgd(model.parameters())
    losses: list[Tensor] = []
    for tokens, targets in batches:
        of_batch: list[Tensor] = []
        if rank == 0:
            schedule.step(tokens)
        else:
            schedule.step(target=targets, losses=of_batch)
        losses += of_batch
    grads = gradients_of(model)
    optimizer.step()
    loss = float(torch.stack(losses).detach().sum()) / MICRO_BATCHES if losses else float("nan")
    return {"loss": loss, "grads": grads, "params": parameters_of(model)}


def micro_batches(step: int, batch: tuple[Tensor, Tensor]) -> list[Slice]:
    """The same global batch, cut as the pipeline cuts it: this sharpens the diagnosis."""
    parts = zip(*(tensor.split(SAMPLES // MICRO_BATCHES) for tensor in batch), strict=True)
    return [Slice(0, index, part) for index, part in enumerate(parts)]


def gather(value: object) -> list:
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def check(*, accumulate: int = 1, padded: bool = False) -> Report:
    """Compare one update by the pipeline with one device on the whole batch. Every rank calls it
    and gets the report.
    """
    batches = make_batches(accumulate, padded)
    whole = tuple(torch.cat(column) for column in zip(*batches, strict=True))
    truth = run_reference(
        Model(), [whole], Recipe(summed_loss, sgd), micro_batches, contributions=True
    )
    about = Parallel(
        Facts({"pp": dist.get_world_size(), "mb": MICRO_BATCHES}), gather, name="Schedule1F1B"
    )
    return differential(
        lambda step: truth.steps[step],
        lambda step: pipeline_step(batches),
        parallel=about,
        start=truth.start,
    )


def rank_main() -> list[str]:
    dist.init_process_group("gloo")
    cases = {
        "equal micro-batches": check(),
        "two accumulation steps": check(accumulate=2),
        "padded targets, mean loss": check(padded=True),
    }
    dist.destroy_process_group()
    return [f"== {title}\n{report.text()}\n" for title, report in cases.items()]


if __name__ == "__main__":
    print("\n".join(plait.launch(rank_main, nproc=2)[0]))
