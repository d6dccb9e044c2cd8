"""Trainer with four micro-batches of unequal lengths; the control counts the items itself."""

import tempfile

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

ACCUMULATE = 4


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
        for sample in range(4):
            labels[sample, sample + 2 :] = -100
        batches.append({"input_ids": tokens, "labels": labels})
    return LlamaForCausalLM(config), batches, None


def train(kind, model, batches):
    samples = []
    for batch in batches:
        for row in range(len(batch["input_ids"])):
            samples.append({key: value[row] for key, value in batch.items()})
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=ACCUMULATE,
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
        trainer = kind(model=model, args=arguments, train_dataset=samples)
        trainer.train()


class Counting(Trainer):
    """A sum over tokens, over the number of tokens in all micro-batches of the update."""

    def get_train_dataloader(self):
        found = list(super().get_train_dataloader())
        self.counts = []
        for start in range(0, len(found), ACCUMULATE):
            window = found[start : start + ACCUMULATE]
            count = sum(int((one["labels"][:, 1:] != -100).sum()) for one in window)
            self.counts += [count] * len(window)
        return found

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        logits = model(input_ids=inputs["input_ids"]).logits[:, :-1]
        labels = inputs["labels"][:, 1:].flatten()
        total = F.cross_entropy(logits.flatten(0, 1), labels, reduction="sum")
        return total / self.counts.pop(0) * ACCUMULATE


def broken(model, batches, loss):
    train(Trainer, model, batches)


def fixed(model, batches, loss):
    train(Counting, model, batches)
