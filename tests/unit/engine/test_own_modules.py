"""Modules that a file keeps for all models are copied; those of one model stay what they are."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD

import plait
from plait.comm.simulated import simulate
from plait.engine.own_modules import own_modules
from plait.mesh import Mesh
from plait.models.losses import cross_entropy

ACT = nn.GELU()
ACTS = {"relu": nn.ReLU(), "tanh": nn.Tanh()}
TABLE = nn.Embedding(8, 4)
HOOKED = nn.Sigmoid()
HOOKED.register_forward_hook(lambda *_: None)


class Layer(nn.Module):
    """Linear layers and what the file keeps."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.act, self.gate, self.hooked, self.table = ACT, ACTS["relu"], HOOKED, TABLE
        self.own = nn.GELU()

    def forward(self, x):
        return x + self.own(self.gate(self.act(self.lin(x))))


def test_what_a_file_keeps_is_copied_once_a_model():
    model = nn.Sequential(Layer(), Layer())
    before = [layer.own for layer in model]
    own_modules(model)
    assert all(layer.act is model[0].act is not ACT for layer in model)
    assert all(layer.gate is model[0].gate is not ACTS["relu"] for layer in model)
    assert all(layer.table is TABLE and layer.hooked is HOOKED for layer in model)
    assert [layer.own for layer in model] == before


class Words(nn.Module):
    """Token numbers [B, S] to logits, with attention between."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(Attending() for _ in range(2))
        self.head = nn.Linear(4, 8)

    def forward(self, tokens):
        x = self.table(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Attending(nn.Module):
    """One head, and the activation of the file."""

    def __init__(self):
        super().__init__()
        self.qkv, self.act = nn.Linear(4, 12), ACT

    def forward(self, x):
        q, k, v = (one[:, None] for one in self.qkv(x).chunk(3, -1))
        return x + self.act(F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0])


def _loss(world):
    model = Words()
    with torch.no_grad():
        for param in model.parameters():  # ranks that are threads share one generator
            param.copy_(torch.linspace(-1, 1, param.numel()).view(param.shape))
    engine = plait.build(
        model, "cp2:ring", loss=cross_entropy, optimizer=lambda p: SGD(p, lr=0.1), world=world
    )
    tokens = torch.arange(16).view(2, 8) % 8
    return engine.step((tokens, tokens)).loss


def test_ranks_that_are_threads_do_not_share_an_activation():
    for _ in range(10):
        assert len(set(simulate(Mesh(cp=2), _loss))) == 1
    assert "forward" not in vars(ACT)
