"""Small models that the features are used on, and steps that many of them share."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

CLASSES = 6
WIDTH = 8


class Block(nn.Module):
    """A residual block with a norm."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 16)
        self.down = nn.Linear(16, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks and a head."""

    def __init__(self, blocks=2):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Tokens(nn.Module):
    """A table of tokens, blocks, and a head that may share the table."""

    def __init__(self, tied):
        super().__init__()
        self.table = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, x):
        x = self.table(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Unused(Net):
    """A layer that no forward uses."""

    def __init__(self):
        super().__init__()
        self.idle = nn.Linear(WIDTH, 3)


class Twice(Net):
    """The first block runs two times."""

    def forward(self, x):
        return super().forward(self.blocks[0](x))


def vectors(model, samples=8):
    """The model, batches of vectors with classes, and their loss."""
    batches = [
        (torch.randn(samples, WIDTH), torch.randint(0, CLASSES, (samples,))) for _ in range(2)
    ]
    return model, batches, F.cross_entropy


def make():
    torch.manual_seed(0)
    return vectors(Net())


def make_deep():
    torch.manual_seed(0)
    return vectors(Net(blocks=4))


def make_unused():
    torch.manual_seed(0)
    return vectors(Unused())


def make_twice():
    torch.manual_seed(0)
    return vectors(Twice())


def make_frozen():
    torch.manual_seed(0)
    model = Net()
    for part in (model.blocks[0].up.weight, model.blocks[1].norm.bias):
        part.requires_grad_(False)
    return vectors(model)


def token_loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_tokens():
    torch.manual_seed(0)
    batches = [(torch.randint(0, CLASSES, (8, 6)), torch.randint(0, CLASSES, (8, 6)))] * 2
    return Tokens(tied=False), batches, token_loss


def make_tied():
    torch.manual_seed(0)
    model = Tokens(tied=True)
    return model, make_tokens()[1], token_loss


def share(batch):
    """This rank's samples."""
    return (part.chunk(dist.get_world_size())[dist.get_rank()] for part in batch)


def adamw(model, **options):
    """The optimizer of most features."""
    own = [one for one in model.parameters() if one.requires_grad]
    return torch.optim.AdamW(own, lr=1e-2, eps=1e-5, **options)


def of_shares(state, batch, loss):
    """One update; every rank has its share of the batch."""
    model, optimizer = state
    inputs, targets = share(batch)
    loss(model(inputs), targets).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()


def of_all(state, batch, loss):
    """One update; every rank has the whole batch."""
    model, optimizer = state
    loss(model(batch[0]), batch[1]).backward()
    optimizer.step()
    optimizer.zero_grad()
