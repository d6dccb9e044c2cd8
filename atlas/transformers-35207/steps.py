"""Gradient accumulation whose loss is scaled up for a division that is no longer there."""

import torch
import torch.nn.functional as F

ACCUMULATE = 4


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
    return model, batches, causal_loss


def causal_loss(logits, labels, num_items_in_batch=None):
    reduction = "sum" if num_items_in_batch is not None else "mean"
    value = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=reduction)
    return value if num_items_in_batch is None else value / num_items_in_batch


def prepare(model):
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def update(state, batch, loss, factor):
    model, optimizer = state
    optimizer.zero_grad()
    items = (batch[1] != -100).sum()
    for inputs, labels in zip(*(part.chunk(ACCUMULATE) for part in batch), strict=True):
        value = loss(model(inputs), labels, num_items_in_batch=items)
        (value * factor).backward()
    optimizer.step()


def broken(state, batch, loss):
    update(state, batch, loss, ACCUMULATE)


def fixed(state, batch, loss):
    update(state, batch, loss, 1)
