"""The trials of AMP (Li et al., NeurIPS 2022): 47 plans of one GPT-2 on sixteen T4, ranked by
prediction.

    python -m benchmarks.planner.trials

Every plan that ran is asked of the preset `t4x16` as Megatron-DeepSpeed runs it. The runs were
timed with a wait for the device at every instruction of the pipeline (`wall_clock_breakdown`), so
their seconds are compared with each other only.
"""

from __future__ import annotations

import csv
import statistics
from pathlib import Path

from benchmarks.machine import announce
from benchmarks.planner.validate import error, spearman
from plait.predict.cost import estimate

DATA = Path(__file__).parent / "data" / "amp_trials.csv"
BATCH = 32
CONFIG = {
    "model": {
        **{
            "name": "gpt",
            "num_hidden_layers": 24,
            "hidden_size": 1024,
            "num_attention_heads": 16,
            "vocab_size": 52256,
        },
        **{"max_position_embeddings": 1024, "tie_word_embeddings": True, "attention_dropout": 0.1},
    },
    "data": {"seq_len": 1024},
    "train": {"global_batch": BATCH},
}


def trials() -> list[tuple[float, float, float]]:
    """Seconds of a step of every trial that ran: predicted, measured, and as AMP's own model
    predicts it.
    """
    with DATA.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["status"] == "ok"]
    out = []
    for row in rows:
        micro_batches = BATCH // (int(row["dp"]) * int(row["micro_batch"]))
        plan = f"tp{row['mp']} dp{row['dp']} pp{row['pp']}:1f1b mb{micro_batches} precision:bf16"
        guess = estimate(CONFIG, plan, "t4x16", framework="megatron-deepspeed")
        out.append((guess.step_seconds, float(row["measured_s"]), float(row["predicted_by_amp_s"])))
    return out


def main() -> None:
    announce()
    found = trials()
    ours, amp = (spearman([(row[side], row[1]) for row in found]) for side in (0, 2))
    first = min(found)[1]
    best = min(measured for _, measured, _ in found)
    print(
        f"{len(found)} plans: Spearman {ours:.2f} (AMP's own model {amp:.2f}), first "
        f"{first / best - 1:.1%} behind the best"
    )
    print(
        f"median signed error "
        f"{statistics.median(error(guess, measured) for guess, measured, _ in found):.1%}, not "
        "compared"
    )


if __name__ == "__main__":
    main()
