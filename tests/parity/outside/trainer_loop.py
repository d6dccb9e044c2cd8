"""Hugging Face Trainer, which owns its loop; and one whose labels are padded unevenly."""

import tempfile

from transformers import Trainer, TrainingArguments

from tests.parity.outside import accelerate_steps

make = accelerate_steps.make


def train(model, batches, loss):
    samples = [
        {key: value[row] for key, value in batch.items()}
        for batch in batches
        for row in range(len(batch["input_ids"]))
    ]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            num_train_epochs=1,
            learning_rate=1e-2,
            adam_epsilon=1e-5,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        Trainer(model=model, args=arguments, train_dataset=samples).train()
