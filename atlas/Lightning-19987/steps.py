"""A Trainer that accumulates three micro-batches, of which the epoch has two."""

import torch
import torch.nn.functional as F
from pytorch_lightning import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

ACCUMULATE = 3


class Module(LightningModule):
    def __init__(self, model, loss, factor):
        super().__init__()
        self.model = model
        self.loss = loss
        self.factor = factor

    def training_step(self, batch, index):
        return self.loss(self.model(batch[0]), batch[1]) * self.factor

    def configure_optimizers(self):
        return torch.optim.SGD(self.model.parameters(), lr=0.1)


def make():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    batches = [(torch.randn(8, 8), torch.randint(0, 4, (8,))) for _ in range(2)]
    return model, batches, F.cross_entropy


def fit(model, batches, loss, factor):
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
        trainer.fit(Module(model, loss, factor), loader)


def broken(model, batches, loss):
    fit(model, batches, loss, 1)


def fixed(model, batches, loss):
    fit(model, batches, loss, ACCUMULATE / 2)
