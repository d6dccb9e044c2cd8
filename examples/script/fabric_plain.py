"""A script of Fabric on one device; `fabric_with_plait.py` is the same training."""

import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
sizes = {"n_layer": 4, "n_embd": 16, "n_head": 4, "vocab_size": 32, "n_positions": 12}
dropout = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
model = GPT2LMHeadModel(GPT2Config(**sizes, **dropout, bos_token_id=0, eos_token_id=0))
tokens = torch.randint(0, 32, (80, 8))
loader = DataLoader([{"input_ids": row, "labels": row} for row in tokens], batch_size=8)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
fabric = Fabric(accelerator="cpu", devices=1)
fabric.launch()
model, optimizer = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(loader)

for batch in loader:
    loss = model(**batch).loss
    fabric.backward(loss)
    fabric.clip_gradients(model, optimizer, max_norm=0.5)
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss.item():.9f}")
