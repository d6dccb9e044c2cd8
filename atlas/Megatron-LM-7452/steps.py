"""Two ranks with unequal numbers of targets, and a second head that looks one token further."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

SCALE = 0.3


class Net(torch.nn.Module):
    """Logits of the next token, and of the one after it."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(11, 8)
        self.head = torch.nn.Linear(8, 11)
        self.later = torch.nn.Linear(8, 11)

    def forward(self, tokens):
        hidden = torch.tanh(self.embed(tokens))
        return torch.stack([self.head(hidden), self.later(hidden)])


def targets_of(labels):
    """The labels of both heads; what has no token is left out."""
    later = labels.roll(-1, 1)
    later[:, -1] = -100
    return labels, later.masked_fill(labels == -100, -100)


def parts(output, labels):
    """Both losses summed over tokens, and their numbers of tokens."""
    found = []
    for logits, wanted in zip(output, targets_of(labels), strict=True):
        total = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum")
        found.append((total, (wanted != -100).sum()))
    return found


def whole(output, labels):
    (main, tokens), (later, rest) = parts(output, labels)
    return main / tokens + SCALE * later / rest


def make():
    torch.manual_seed(0)
    batches = []
    for _ in range(2):
        tokens = torch.randint(0, 11, (4, 6))
        labels = tokens.roll(-1, 1)
        for row, length in enumerate((6, 5, 3, 2)):
            labels[row, length - 1 :] = -100
        batches.append((tokens, labels))
    return Net(), batches, whole


def prepare(model):
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def update(state, batch, gathered):
    model, optimizer = state
    optimizer.zero_grad()
    tokens, labels = (part.chunk(2)[dist.get_rank()] for part in batch)
    (main, count), (later, rest) = parts(model(tokens), labels)
    everywhere = torch.stack([count, rest])
    dist.all_reduce(everywhere)
    ratio = everywhere[0] / everywhere[1] if gathered else count / rest
    (main + SCALE * later * ratio).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= everywhere[0]
    optimizer.step()


def broken(state, batch, loss):
    update(state, batch, gathered=False)


def fixed(state, batch, loss):
    update(state, batch, gathered=True)
