"""Hugging Face Accelerate over a llama, and a loop that forgets to accumulate over ranks."""

import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
}


def make():
    torch.manual_seed(0)
    batches = []
    for _ in range(2):
        ids = torch.randint(0, 32, (8, 6))
        batches.append({"input_ids": ids, "labels": ids.clone()})
    return LlamaForCausalLM(LlamaConfig(**SIZES)), batches, None


def prepare(model):
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5)
    model, optimizer = accelerator.prepare(model, optimizer)
    return accelerator, model, optimizer


def train_step(state, batch, loss, wrong=False):
    accelerator, model, optimizer = state
    rank = accelerator.process_index
    batch = {key: value.chunk(accelerator.num_processes)[rank] for key, value in batch.items()}
    if wrong:
        model = accelerator.unwrap_model(model)
    value = model(**batch).loss
    accelerator.backward(value)
    accelerator.clip_grad_norm_(model.parameters(), 100.0)
    optimizer.step()
    optimizer.zero_grad()
    return accelerator.reduce(value.detach(), "mean")


def unwrapped(state, batch, loss):
    return train_step(state, batch, loss, wrong=True)
