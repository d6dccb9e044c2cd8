"""Trainer on two ranks with unequal numbers of tokens, as it is by default and as it may be."""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


def make():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=17,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        use_cache=False,
    )
    batches = []
    for _ in range(2):
        tokens = torch.randint(0, 17, (4, 6))
        labels = tokens.clone()
        labels[:, 0] = -100
        for sample in range(4):
            labels[sample, sample + 2 :] = -100
        batches.append({"input_ids": tokens, "labels": labels})
    return LlamaForCausalLM(config), batches, None


def train(model, batches, **options):
    samples = []
    for batch in batches:
        for row in range(len(batch["input_ids"])):
            samples.append({key: value[row] for key, value in batch.items()})
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=2,
            max_steps=len(batches),
            learning_rate=1e-2,
            adam_epsilon=1e-5,
            max_grad_norm=0,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            **options,
        )
        Trainer(model=model, args=arguments, train_dataset=samples).train()


def broken(model, batches, loss):
    train(model, batches)


def fixed(model, batches, loss):
    train(model, batches, average_tokens_across_devices=True)
