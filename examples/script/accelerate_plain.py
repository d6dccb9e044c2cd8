"""A script of Accelerate on one device; `accelerate_with_plait.py` is the same training."""

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
sizes = {"n_layer": 4, "n_embd": 16, "n_head": 4, "vocab_size": 32, "n_positions": 12}
dropout = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
model = GPT2LMHeadModel(GPT2Config(**sizes, **dropout, bos_token_id=0, eos_token_id=0))
tokens = torch.randint(0, 32, (80, 8))
loader = DataLoader([{"input_ids": row, "labels": row} for row in tokens], batch_size=8)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
config = DataLoaderConfiguration(split_batches=True)
accelerator = Accelerator(dataloader_config=config)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for batch in loader:
    loss = model(**batch).loss
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss.item():.9f}")
