"""Published runs as cases of the estimator: config, plan text, device, and what was measured.

A row is left out only with a reason that is printed. What a table does not say and its framework
fixes (which attention kernel, how wide gradients are) is `plait.predict.cost.frameworks`; what its
runs have in common beside stands in `PRACTICE`.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from plait.predict.cost.frameworks import (
    FSDP,
    LLM_FOUNDRY,
    MAXTEXT,
    MEGATRON_2022,
    MEGATRON_CORE,
    MEGATRON_DEEPSPEED,
    MEGATRON_LM,
    NANOTRON,
    TORCHTITAN,
    Framework,
)
from plait.predict.cost.memory.rules import COMMUNICATOR_BYTES, PROCESS_BYTES

DATA = Path(__file__).parent / "data" / "published_runs.csv"
TPU = DATA.with_name("maxtext_runs.csv")
"""MaxText on TPU v6e, from Google's recipes. No constant was set with them in sight."""
EXPERTS = DATA.with_name("expert_runs.csv")
"""Megatron-Bridge with experts; sizes of the models from their own configs. None was fitted to."""
FAILED = DATA.with_name("failed_runs.csv")
"""Plans of the sweep 09d that did not run: too little memory or a crash, not told apart."""


@dataclass(frozen=True)
class Practice:
    """How a framework of its year computes, and what its runs have in common."""

    framework: Framework
    dropout: float = 0.0
    family: str = "gpt"
    precision: str = "bf16"

    def but(self, **habits: Any) -> Practice:
        """The same with other habits."""
        runtime = replace(self.framework.runtime, **habits)
        return replace(self, framework=replace(self.framework, runtime=runtime))


MEGATRON_2021 = Practice(MEGATRON_LM, 0.1)
LATER = Practice(MEGATRON_2022, 0.1)
DEEPSPEED = Practice(MEGATRON_DEEPSPEED, 0.1)
CORE = Practice(MEGATRON_CORE)
SHARDED = Practice(FSDP)
FOUNDRY = Practice(LLM_FOUNDRY)
TITAN = Practice(TORCHTITAN, family="llama")
INTERNEVO = Practice(replace(FSDP, attention="flash_attention_1"), family="llama")
"""The installation page of 2023 (InternLM, doc/en/install.md) builds FlashAttention 1.0.5."""
ZERO_BUBBLE = LATER.but(overlap_gradients=True, scatters_sends=False)
SAILOR = replace(
    MEGATRON_2021.but(scatters_sends=False, fused_kernels=False), dropout=0.0, precision="float32"
)
"""No half precision in its launch script; published memory agrees: four-byte scores, no dropout
masks.
"""

PRACTICE = {  # by table: what its framework's code of that time does
    "01": FOUNDRY,
    "02a": MEGATRON_2021,
    "02b": MEGATRON_2021,
    "02c": CORE,
    "02d": LATER,
    "03": TITAN,
    "06a": ZERO_BUBBLE,
    "09b": CORE,
    "09c": CORE,
    **dict.fromkeys(("09d", "09e"), Practice(NANOTRON, family="llama")),
    "09g": DEEPSPEED,
    "09g2": DEEPSPEED,
    "09i": INTERNEVO,
    "09j": replace(SHARDED.but(fused_kernels=True), family="llama"),
    "12a": SAILOR,
    "12d": MEGATRON_2021,
}
FRAMEWORKS = (  # for other tables, by the words of their framework column, first match
    ("zero-bubble", ZERO_BUBBLE),
    ("sailor", SAILOR),
    ("deepspeed", DEEPSPEED),
    ("core", CORE),
    ("bridge", CORE),
    ("nemo", CORE),
    ("megascale", CORE),
    ("megatron", MEGATRON_2021),
    ("nanotron", Practice(NANOTRON, family="llama")),
    ("torchtitan", TITAN),
    ("maxtext", Practice(MAXTEXT)),
)


def practice_of(row: dict[str, str]) -> Practice:
    """How the framework of a row computes."""
    table = row["id"].split("_")[0]
    if table == "09b" and row["gpu_type"].startswith("A100"):
        return LATER  # NeMo of 2022-23: unfused attention, hence its selective recomputation
    if table in PRACTICE:
        return PRACTICE[table]
    words = row["framework"].lower()
    return next((practice for word, practice in FRAMEWORKS if word in words), SHARDED)


@dataclass(frozen=True)
class Case:
    """One run: what to ask the estimator, and what was published."""

    id: str
    source: str
    group: str
    config: dict[str, dict[str, object]]
    plan: str
    device: str
    num_devices: int
    framework: Framework
    seconds: float | None
    peak_bytes: float | None
    row: dict[str, str]


def cases(
    paths: Sequence[Path] = (DATA,), *, eight_bits: bool = False
) -> tuple[list[Case], dict[str, list[str]]]:
    """All complete rows of files of the common schema, and the reasons for which others are left
    out. `eight_bits`: those whose linear layers multiply in eight bits instead. No constant was set
    on them.
    """
    kept = []
    dropped = dict[str, list[str]]()
    for path in paths:
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                reason = incomplete(row)
                if not reason and eight_bits != bool(precision(row, "")):
                    reason = "8-bit products: not asked for" if not eight_bits else "16 bits"
                if reason:
                    dropped.setdefault(f"{row['id'].split('_')[0]}: {reason}", []).append(row["id"])
                else:
                    kept.append(case(row))
    return kept, dropped


def failed_cases() -> list[Case]:
    """The plans that did not run, as if they had."""
    with FAILED.open(newline="") as file:
        return [case(row) for row in csv.DictReader(file)]


def incomplete(row: dict[str, str]) -> str:
    """Why a row cannot be asked of the estimator; empty when it can."""
    if row["status"] != "ok":
        return f"status {row['status']}"
    if not row["gpu_type"]:
        return "device not published"
    if not device(row):
        return f"no preset for {row['gpu_type']}"
    if row["n_experts"] and not row.get("expert_ffn"):
        return "mixture of experts: its expert sizes are not in the table"
    for key in ("layers", "hidden", "heads", "seq_len", "n_gpus", "dp"):
        if not row[key] and not (key == "seq_len" and row["id"].startswith("03")):
            return f"{key} not published"
    if not row["micro_batch"] and row["pp"] != "1":
        return "micro-batch not published"
    if not row["global_batch"] and not row["n_microbatches"] and not row["micro_batch"]:
        return "batch not published"
    if not row["micro_batch"]:
        return "micro-batch not published"
    if seconds(row) is None and not row["peak_mem"]:
        return "neither time nor memory published"
    return ""


def seq_len(row: dict[str, str]) -> int:
    """Tokens of a sample; torchtitan's tables leave out 8192, its default."""
    return int(row["seq_len"] or 8192)


def vocabulary(row: dict[str, str]) -> int:
    """The vocabulary; GPT-2's padded 51200 where a table leaves it out."""
    return int(row["vocab"] or 51200)


def global_batch(row: dict[str, str]) -> int:
    """Samples a step."""
    if row["global_batch"]:
        return int(row["global_batch"])
    return int(row["micro_batch"]) * int(row["n_microbatches"] or 1) * int(row["dp"])


def seconds(row: dict[str, str]) -> float | None:
    """Measured seconds of a step, from whichever rate the table prints."""
    if row["step_time_s"]:
        return float(row["step_time_s"])
    batch = global_batch(row)
    length = seq_len(row)
    if row["tokens_s_gpu"]:
        return batch * length / (float(row["tokens_s_gpu"]) * int(row["n_gpus"]))
    if row["tflops_gpu"] and row["id"].startswith("02a"):
        layers = int(row["layers"])
        hidden = int(row["hidden"])
        flops = (
            96.0
            * batch
            * length
            * layers
            * hidden**2
            * (1 + length / (6 * hidden) + vocabulary(row) / (16 * layers * hidden))
        )
        return flops / (float(row["tflops_gpu"]) * 1e12 * int(row["n_gpus"]))
    return None


def peak_bytes(row: dict[str, str]) -> float | None:
    """Published peak of the allocator in bytes: what a device-wide reading also sees, the process
    itself, is taken off.

    nanotron's log says GB and divides by 2^30 (`create_table_log` of its `helpers.py`).
    """
    if not row["peak_mem"]:
        return None
    unit = row["mem_unit"]
    device_wide = "nvidia-smi" in unit or "max over GPUs" in unit
    binary = unit.startswith(("GiB", "GB (max reserved as logged"))
    scale = 1.0 if unit.startswith("bytes") else 2**30 if binary else 1e9
    outside = (
        PROCESS_BYTES
        + COMMUNICATOR_BYTES * sum(int(row[axis] or 1) > 1 for axis in ("tp", "pp", "dp"))
        if device_wide
        else 0.0
    )
    return float(row["peak_mem"]) * scale - outside


DEVICES = {
    "V100-16": "v100-16gb",
    "V100-32": "v100-32gb",
    "A100-40": "a100-40gb",
    "A100-80": "a100-80gb",
    "H100-80": "h100",
    "H100-96": "h100-96gb",
    "GH200": "gh200",
    "H200": "h200",
    "B200": "b200",
    "GB200": "gb200",
    "GB300": "gb300",
    "MI300X": "mi300x",
    "L40S": "l40s",
    "TPU v6e": "tpu-v6e",
}


def device(row: dict[str, str]) -> str:
    """The preset of a row's device."""
    kind = row["gpu_type"].replace(" SXM", "")
    return next((preset for start, preset in DEVICES.items() if kind.startswith(start)), "")


def data_term(row: dict[str, str]) -> str:
    """`dp8:zero1,replicate2` from a table's words."""
    size = int(row["dp"])
    words = row["zero_stage"].lower()
    if size == 1:
        return "dp1"
    if "hsdp" in words:
        return f"dp{size}:zero3,replicate{max(1, size // 8)}"
    if "within 8" in words and size > 8:
        return f"dp{size}:zero1,replicate{size // 8}"
    stage = next(
        (digit for digit in "321" if words.startswith(digit) or f"zero-{digit}" in words), ""
    )
    return f"dp{size}:zero{stage}" if stage else f"dp{size}"


def schedule_term(row: dict[str, str], layers: int) -> str:
    """`pp8:interleaved,v6` from a table's words."""
    size = int(row["pp"])
    if size == 1:
        return "pp1"
    words = row["pp_schedule"].lower()
    virtual = row["virtual_pp"]
    if words.startswith("zb-1p"):
        return f"pp{size}:zb-h1"
    if words.startswith("zb-2p"):
        return f"pp{size}:zb-h2"
    if virtual.startswith("max"):
        return f"pp{size}:interleaved,v{-(-layers // size)}"
    if virtual and int(virtual) > 1:
        return f"pp{size}:interleaved,v{virtual}"
    return f"pp{size}:1f1b"


def remat(row: dict[str, str]) -> str:
    """The nearest recomputation policy."""
    words = row["act_ckpt"].lower()
    if row["id"].startswith("02b"):
        return "full"  # its rates count the recomputation
    return (
        "full"
        if words.startswith("full")
        else "selective"
        if words.startswith("selective")
        else "none"
    )


def compiled(row: dict[str, str]) -> bool:
    """Whether a torchtitan row says that it was compiled."""
    notes = row["notes"].lower()
    return "compile" in notes and "eager;" not in notes


def precision(row: dict[str, str], usual: str) -> str:
    """The plan's word for the precision of a row: eight bits where it says so, else `usual`."""
    words = row["precision"].lower()
    if words == "mxfp8":
        return words
    return "fp8" if "fp8" in words or "float8" in words else usual


def case(row: dict[str, str]) -> Case:
    """The case of a complete row."""
    table = row["id"].split("_")[0]
    practice = practice_of(row)
    layers = int(row["layers"])
    hidden = int(row["hidden"])
    heads = int(row["heads"])
    inner = int(row["ffn"] or 4 * hidden)
    gated = practice.family == "llama" or "llama" in row["model"].lower()
    model: dict[str, object] = {
        "name": "llama" if gated else "gpt",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": int(row["kv_heads"] or heads),
        "intermediate_size": inner,
        "vocab_size": vocabulary(row),
        "tie_word_embeddings": not gated or table in {"09d", "09e"},
        "attn_implementation": practice.framework.attention,
        "attention_dropout": practice.dropout,
        "fused_cross_entropy": practice.framework.fused_loss,
    }
    if row.get("expert_ffn"):
        model |= {
            "num_local_experts": int(row["n_experts"]),
            "num_experts_per_tok": int(row["topk"]),
            "moe_intermediate_size": int(row["expert_ffn"]),
            "head_dim": int(row["head_dim"]),
        }
    tp = int(row["tp"])
    sequence = ",sp" if row["sp"] == "1" and tp > 1 else ""
    batch = global_batch(row)
    dp = int(row["dp"])
    micro = max(1, round(batch / dp / int(row["micro_batch"])))
    terms = [
        schedule_term(row, layers), data_term(row), f"cp{row['cp'] or 1}", f"tp{tp}:1d{sequence}",
        f"mb{micro}", f"ep{row['ep'] or 1}",
        f"remat:{remat(row)}", f"precision:{precision(row, practice.precision)}",
    ]  # fmt: skip
    if compiled(row):
        terms.append("compile")
    config = {
        "model": model,
        "data": {"seq_len": seq_len(row)},
        "train": {"global_batch": batch, "optimizer": "adamw"},
    }
    group = f"{row['model']}/{row['gpu_type']}/{row['n_gpus']}/{seq_len(row)}"
    return Case(
        row["id"], table, group, config, " ".join(terms), device(row), int(row["n_gpus"]),
        practice.framework,
        seconds(row), peak_bytes(row), row,
    )  # fmt: skip
