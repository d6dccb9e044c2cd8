"""Four documents packed into one row, with a causal mask and with one of blocks."""

import torch
import torch.nn.functional as F

DOCUMENTS = 4
LENGTH = 6


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(11, 8)
        self.mixed = torch.nn.Linear(8, 24)
        self.head = torch.nn.Linear(8, 11)

    def forward(self, tokens, mask=None):
        if mask is None:
            mask = causal(tokens.shape[1])
        query, key, value = self.mixed(self.embed(tokens)).chunk(3, -1)
        return self.head(F.scaled_dot_product_attention(query, key, value, attn_mask=mask))


def causal(length):
    return torch.ones(length, length, dtype=torch.bool).tril()


def of_documents(length):
    return causal(length) & torch.block_diag(*[causal(LENGTH)] * DOCUMENTS)


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


def update(state, batch, loss, mask):
    model, optimizer = state
    optimizer.zero_grad()
    packed, labels = (part.reshape(1, -1) for part in batch)
    value = loss(model(packed, mask(packed.shape[1])), labels)
    value.backward()
    optimizer.step()
    return value


def broken(state, batch, loss):
    return update(state, batch, loss, causal)


def fixed(state, batch, loss):
    return update(state, batch, loss, of_documents)
