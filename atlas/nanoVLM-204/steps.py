"""Three documents packed into one row, with rotary positions that run on and that start anew."""

import torch
import torch.nn.functional as F

DOCUMENTS = 3
LENGTH = 5


class Net(torch.nn.Module):
    """Attention with rotated queries and keys, over rows of tokens."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(11, 8)
        self.mixed = torch.nn.Linear(8, 24)
        self.head = torch.nn.Linear(8, 11)

    def forward(self, tokens, positions=None, documents=None):
        length = tokens.shape[1]
        if positions is None:
            positions = torch.arange(length)
        query, key, value = self.mixed(self.embed(tokens)).chunk(3, -1)
        query, key = rotated(query, positions), rotated(key, positions)
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        if documents is not None:
            mask = mask & (documents[:, None] == documents[None])
        return self.head(F.scaled_dot_product_attention(query, key, value, attn_mask=mask))


def rotated(x, positions):
    half = x.shape[-1] // 2
    angles = positions[:, None] * 0.1 ** torch.arange(half)
    one, other = x.chunk(2, -1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat([one * cos - other * sin, other * cos + one * sin], -1)


def cross_entropy(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def make():
    torch.manual_seed(0)
    batches = []
    for _ in range(2):
        tokens = torch.randint(0, 11, (DOCUMENTS, LENGTH))
        batches.append((tokens, tokens.roll(-1, 1)))
    return Net(), batches, cross_entropy


def prepare(model):
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def update(state, batch, loss, **layout):
    model, optimizer = state
    optimizer.zero_grad()
    packed, labels = (part.reshape(1, -1) for part in batch)
    value = loss(model(packed, **layout), labels)
    value.backward()
    optimizer.step()
    return value


def broken(state, batch, loss):
    return update(state, batch, loss)


def fixed(state, batch, loss):
    tokens = torch.arange(DOCUMENTS * LENGTH)
    return update(state, batch, loss, positions=tokens % LENGTH, documents=tokens // LENGTH)
