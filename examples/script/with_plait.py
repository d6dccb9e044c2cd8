"""The training of `plain.py` under a plan, for `torchrun --nproc-per-node 2`."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import plait


class Net(nn.Module):
    """A residual network of two blocks."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 32)
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        x = self.inner(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)


torch.manual_seed(0)
points = torch.randn(110, 16)
loader = DataLoader(TensorDataset(points, points[:, :4].argmax(1)), batch_size=32, shuffle=True)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
engine, loader = plait.prepare(model, loader, "dp2", loss=F.cross_entropy, optimizer=optimizer)

for _epoch in range(3):
    for inputs, targets in loader:
        loss = engine.step((inputs, targets)).loss
        print(f"loss {loss:.9f}")
