"""Micro-batches that are weighed by their tokens, masked prompts included."""

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
            labels[sample, : 5 - sample // 2] = -100
        batches.append((tokens, labels))
    return model, batches, cross_entropy


def cross_entropy(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def prepare(model):
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def update(state, batch, loss, count):
    model, optimizer = state
    optimizer.zero_grad()
    whole = count(*batch)
    for inputs, labels in zip(*(part.chunk(ACCUMULATE) for part in batch), strict=True):
        (loss(model(inputs), labels) * count(inputs, labels) / whole).backward()
    optimizer.step()


def tokens(inputs, labels):
    return inputs.numel()


def targets(inputs, labels):
    return (labels != -100).sum()


def broken(state, batch, loss):
    update(state, batch, loss, tokens)


def fixed(state, batch, loss):
    update(state, batch, loss, targets)
