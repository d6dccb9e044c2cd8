"""A Trainer that accumulates two micro-batches with unequal numbers of unmasked tokens."""

import torch
import torch.nn.functional as F
from pytorch_lightning import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

ACCUMULATE = 2


class Module(LightningModule):
    def __init__(self, model, loss, count):
        super().__init__()
        self.model = model
        self.loss = loss
        self.count = count

    def training_step(self, batch, index):
        if self.count is None:
            return self.loss(self.model(batch[0]), batch[1])
        total = self.loss(self.model(batch[0]), batch[1], reduction="sum")
        return total / self.count * ACCUMULATE

    def configure_optimizers(self):
        return torch.optim.SGD(self.model.parameters(), lr=0.1)


def cross_entropy(logits, labels, reduction="mean"):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=reduction)


def make():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(11, 8), torch.nn.Tanh(), torch.nn.Linear(8, 11))
    batches = []
    for _ in range(2):
        tokens = torch.randint(0, 11, (8, 6))
        labels = tokens.roll(-1, 1)
        for sample in range(8):
            labels[sample, sample // 2 + 1 :] = -100
        batches.append((tokens, labels))
    return model, batches, cross_entropy


def fit(model, batches, loss, counts):
    for inputs, targets in batches:
        trainer = Trainer(
            accelerator="cpu",
            max_epochs=1,
            accumulate_grad_batches=ACCUMULATE,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        loader = DataLoader(TensorDataset(inputs, targets), batch_size=len(inputs) // 2)
        count = (targets != -100).sum() if counts else None
        trainer.fit(Module(model, loss, count), loader)


def broken(model, batches, loss):
    fit(model, batches, loss, counts=False)


def fixed(model, batches, loss):
    fit(model, batches, loss, counts=True)
