"""A Trainer that accumulates three micro-batches, of which the epoch has two."""

import tempfile

import torch
import torch.nn.functional as F
from transformers import Trainer, TrainingArguments

ACCUMULATE = 3


class Net(torch.nn.Module):
    """A model of one's own, which takes no keywords for its loss."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 4)

    def forward(self, x, labels):
        logits = self.layer(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def make():
    torch.manual_seed(0)
    batches = [{"x": torch.randn(4, 8), "labels": torch.randint(0, 4, (4,))} for _ in range(2)]
    return Net(), batches, None


def fit(kind, model, batches):
    for batch in batches:
        samples = [{key: value[row] for key, value in batch.items()} for row in range(4)]
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=2,
                gradient_accumulation_steps=ACCUMULATE,
                num_train_epochs=1,
                learning_rate=1e-2,
                optim="sgd",
                max_grad_norm=0,
                use_cpu=True,
                report_to=[],
                save_strategy="no",
                logging_strategy="no",
                disable_tqdm=True,
            )
            kind(model=model, args=arguments, train_dataset=samples).train()


class Rescaled(Trainer):
    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs) * ACCUMULATE / 2


def broken(model, batches, loss):
    fit(Trainer, model, batches)


def fixed(model, batches, loss):
    fit(Rescaled, model, batches)
