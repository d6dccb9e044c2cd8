"""Trainer with samples of six labels, of which five are targets."""

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
        batches.append({"input_ids": tokens, "labels": tokens.clone()})
    return LlamaForCausalLM(config), batches, None


class Shifted(Trainer):
    """Counts the labels that are targets."""

    def get_batch_samples(self, *args):
        samples, _ = super().get_batch_samples(*args)
        return samples, sum((one["labels"][:, 1:] != -100).sum() for one in samples)


def train(kind, model, batches):
    samples = []
    for batch in batches:
        for row in range(len(batch["input_ids"])):
            samples.append({key: value[row] for key, value in batch.items()})
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            max_steps=len(batches),
            learning_rate=1e-2,
            adam_epsilon=1e-5,
            max_grad_norm=0,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        kind(model=model, args=arguments, train_dataset=samples).train()


def broken(model, batches, loss):
    train(Trainer, model, batches)


def fixed(model, batches, loss):
    train(Shifted, model, batches)
