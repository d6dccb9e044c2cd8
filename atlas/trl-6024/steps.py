"""An update over a third of a generation batch, divided by the tokens of all of it."""

import torch
import torch.nn.functional as F

ACCUMULATE = 2
STEPS_PER_GENERATION = 6


def make():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(11, 8), torch.nn.Tanh(), torch.nn.Linear(8, 11))
    batches = []
    for _ in range(2):
        tokens = torch.randint(0, 11, (4, 6))
        batches.append((tokens, tokens.roll(-1, 1)))
    return model, batches, cross_entropy


def cross_entropy(logits, labels, reduction="mean"):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=reduction)


def prepare(model):
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def update(state, batch, loss, items):
    model, optimizer = state
    optimizer.zero_grad()
    for inputs, labels in zip(*(part.chunk(ACCUMULATE) for part in batch), strict=True):
        (loss(model(inputs), labels, reduction="sum") / items).backward()
    optimizer.step()


def broken(state, batch, loss):
    generated = batch[1].numel() // ACCUMULATE * STEPS_PER_GENERATION
    update(state, batch, loss, generated)


def fixed(state, batch, loss):
    update(state, batch, loss, batch[1].numel())
