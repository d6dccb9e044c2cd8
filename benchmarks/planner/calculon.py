"""The eight points on which Calculon (Isaev et al., SC 2023) validates its step times, prediction
beside publication.

    python -m benchmarks.planner.calculon

They are table 5 of Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
Models" (arXiv 2205.05198), with the sizes and degrees of its table 3. Calculon's paper states
errors of 3.65 % in the mean and 8.87 % at worst.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from benchmarks.machine import announce
from plait.predict.cost import estimate
from plait.predict.cost.frameworks import MEGATRON_2022

COLUMNS = (
    "name",
    "layers",
    "hidden",
    "heads",
    "pipeline",
    "batch",
    "micro_batches",
    "full",
    "selective",
)
PUBLISHED = (  # seconds of a step: everything recomputed; only attention, with sequence parallelism
    ("22B", 48, 6144, 64, "pp1", 4, 1, 1.42, 1.10),
    ("175B", 96, 12288, 96, "pp8:interleaved,v3", 64, 64, 18.13, 13.75),
    ("530B", 105, 20480, 128, "pp35:interleaved,v3", 280, 280, 49.05, 37.83),
    ("1T", 128, 25600, 160, "pp64", 512, 512, 94.42, 71.49),
)
PLANS = {"full": "tp8 remat:full", "selective": "tp8:1d,sp remat:selective"}
CALCULON_MEAN = 0.0365
CALCULON_WORST = 0.0887


def points() -> Iterator[tuple[str, str, float, float]]:
    """(model, what is recomputed, published seconds, predicted seconds) of each."""
    for values in PUBLISHED:
        row = dict(zip(COLUMNS, values, strict=True))
        model = {"name": "gpt", "num_hidden_layers": row["layers"], "hidden_size": row["hidden"]}
        model |= {
            "num_attention_heads": row["heads"],
            "vocab_size": 51200,
            "tie_word_embeddings": True,
            "attention_dropout": 0.1,
        }
        config = {
            "model": model,
            "data": {"seq_len": 2048},
            "train": {"global_batch": row["batch"]},
        }
        for what, inner in PLANS.items():
            plan = f"{inner} {row['pipeline']} mb{row['micro_batches']} precision:bf16"
            guess = estimate(config, plan, "a100-80gbx512", framework=MEGATRON_2022)
            yield str(row["name"]), what, float(row[what]), guess.step_seconds


def main() -> None:
    announce()
    print(
        f"{'model':>6} {'recomputed':>10} {'published':>10} {'predicted':>10} {'error':>7}   "
        "seconds of a step"
    )
    errors = []
    for name, what, published, predicted in points():
        errors.append(abs(predicted / published - 1))
        print(
            f"{name:>6} {what:>10} {published:10.2f} {predicted:10.2f} "
            f"{predicted / published - 1:7.1%}"
        )
    print(
        f"mean {statistics.mean(errors):.2%}, worst {max(errors):.2%}; Calculon "
        f"{CALCULON_MEAN:.2%} and {CALCULON_WORST:.2%}"
    )


if __name__ == "__main__":
    main()
