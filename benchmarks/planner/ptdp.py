"""The table of "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM"
(arXiv 2104.04473, table 1), prediction beside publication.

    python -m benchmarks.planner.ptdp

Sizes, degrees, batch and TFLOP/s are the paper's; micro-batches and stages a rank are those of its
published scripts. TFLOP/s count the recomputed forward as the paper does, so both columns divide
the same flops by their step time.
"""

from __future__ import annotations

import statistics

from benchmarks.machine import announce
from plait.cluster import Cluster
from plait.plan import Plan
from plait.predict.cost.frameworks import MEGATRON_LM
from plait.predict.cost.machines import machine_of
from plait.predict.cost.model.describe import describe
from plait.predict.cost.records import Job
from plait.predict.cost.step import estimate_job

COLUMNS = (
    "name",
    "heads",
    "hidden",
    "layers",
    "tp",
    "pp",
    "devices",
    "batch",
    "tflops",
    "micro",
    "virtual",
)
PUBLISHED = (
    ("1.7B", 24, 2304, 24, 1, 1, 32, 512, 137, 16, 1),
    ("3.6B", 32, 3072, 30, 2, 1, 64, 512, 138, 16, 1),
    ("7.5B", 32, 4096, 36, 4, 1, 128, 512, 142, 16, 1),
    ("18.4B", 48, 6144, 40, 8, 1, 256, 1024, 135, 8, 1),
    ("39.1B", 64, 8192, 48, 8, 2, 512, 1536, 138, 4, 2),
    ("76.1B", 80, 10240, 60, 8, 4, 1024, 1792, 140, 2, 3),
    ("145.6B", 96, 12288, 80, 8, 8, 1536, 2304, 148, 2, 2),
    ("310.1B", 128, 16384, 96, 8, 16, 1920, 2160, 155, 1, 2),
    ("529.6B", 128, 20480, 105, 8, 35, 2520, 2520, 163, 1, 1),
    ("1008.0B", 160, 25600, 128, 8, 64, 3072, 3072, 163, 1, 1),
)
SEQ_LEN = 2048
VOCAB = 51200


def predict(row: dict[str, int | str]) -> float:
    """Predicted TFLOP/s of a device, by the paper's flops (its equation 3)."""
    hidden, layers, batch, devices = (
        int(row[name]) for name in ("hidden", "layers", "batch", "devices")
    )
    keys = {
        "name": "gpt",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": int(row["heads"]),
    }
    keys |= {"vocab_size": VOCAB, "max_position_embeddings": SEQ_LEN, "tie_word_embeddings": True}
    keys |= {"attn_implementation": "eager", "attention_dropout": 0.1}
    dp = devices // (int(row["tp"]) * int(row["pp"]))
    schedule = f"interleaved,v{row['virtual']}" if int(row["virtual"]) > 1 else "1f1b"
    text = (
        f"pp{row['pp']}:{schedule} tp{row['tp']} dp{dp} mb{batch // dp // int(row['micro'])} "
        "remat:full precision:bf16"
    )
    job = Job(describe(keys, SEQ_LEN), batch, runtime=MEGATRON_LM.runtime)
    guess = estimate_job(job, Plan.parse(text), machine_of(Cluster.parse(f"a100-80gbx{devices}")))
    flops = (
        96
        * batch
        * SEQ_LEN
        * layers
        * hidden**2
        * (1 + SEQ_LEN / (6 * hidden) + VOCAB / (16 * layers * hidden))
    )
    return flops / guess.step_seconds / devices / 1e12


def main() -> None:
    announce()
    print(
        f"{'model':>8} {'devices':>8} {'tp':>3} {'pp':>3} {'published':>10} {'predicted':>10} "
        f"{'error':>7}   TFLOP/s a device"
    )
    errors = []
    for values in PUBLISHED:
        row = dict(zip(COLUMNS, values, strict=True))
        predicted = predict(row)
        published = float(row["tflops"])
        errors.append(abs(predicted / published - 1))
        degrees = f"{row['name']:>8} {row['devices']:>8} {row['tp']:>3} {row['pp']:>3}"
        print(f"{degrees} {published:10.0f} {predicted:10.1f} {predicted / published - 1:7.1%}")
    print(f"median error {statistics.median(errors):.1%}, worst {max(errors):.1%}")


if __name__ == "__main__":
    main()
