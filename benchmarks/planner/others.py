"""The published runs through another public estimator, beside plait's: llm-analysis (Li, 2023),
`pip install llm-analysis`.

    python -m benchmarks.planner.others

It takes the efficiency of matrix products as an input, where plait predicts it: each source is
given the one constant that suits its rows best (the median of what each row would need), which no
user could know. Rows that it refuses are counted.
"""

from __future__ import annotations

import logging
import statistics
from typing import Any

from benchmarks.machine import announce, versions_of
from benchmarks.planner.rows import Case, cases
from benchmarks.planner.validate import error, groups, run, summary
from plait.plan import Plan

DEVICES = {
    "v100-16gb": "v100-sxm-16gb",
    "v100-32gb": "v100-sxm-32gb",
    "a100-40gb": "a100-sxm-40gb",
    "a100-80gb": "a100-sxm-80gb",
    "h100": "h100-sxm-80gb",
    "h100-96gb": "h100-sxm-80gb",
}
START = 0.5
"""The efficiency at which each row is asked first."""


def step_seconds(case: Case, efficiency: float) -> tuple[float, float]:
    """(seconds of a step, bytes of the fullest rank) by llm-analysis. Raises what it raises."""
    from llm_analysis.analysis import ActivationRecomputation, DSZeRO, LLMAnalysis  # type: ignore[import-not-found]
    from llm_analysis.config import ModelConfig, ParallelismConfig, get_gpu_config_by_name  # type: ignore[import-not-found]

    model = case.config["model"]
    plan = Plan.parse(case.plan)
    sizes: dict[str, Any] = {key: value for key, value in model.items() if isinstance(value, int)}
    if plan.cp.size > 1:
        raise ValueError("no context parallel")
    analysis = LLMAnalysis(
        ModelConfig(
            name=case.id,
            num_layers=sizes["num_hidden_layers"],
            n_head=sizes["num_attention_heads"],
            hidden_dim=sizes["hidden_size"],
            vocab_size=sizes["vocab_size"],
            max_seq_len=int(str(case.config["data"]["seq_len"])),
            num_key_value_heads=sizes["num_key_value_heads"],
            ffn_embed_dim=sizes["intermediate_size"],
            model_type="llama" if model["name"] == "llama" else "gpt",
        ),
        get_gpu_config_by_name(DEVICES[case.device]),
        parallelism_config=ParallelismConfig(
            tp_size=plan.tp.size,
            pp_size=plan.pp.size,
            dp_size=plan.dp.size,
            sp_size=plan.tp.size if plan.tp.sequence_parallel else 1,
        ),
        flops_efficiency=efficiency,
        hbm_memory_efficiency=0.9,
    )
    stage = int(plan.dp.strategy[-1]) if plan.dp.strategy.startswith("zero") else 0
    batch = int(str(case.config["train"]["global_batch"]))
    found = analysis.training(
        batch_size_per_gpu=max(1, batch // (plan.dp.size * plan.micro_batches)),
        gradient_accumulation_steps=plan.micro_batches,
        seq_len=int(str(case.config["data"]["seq_len"])),
        activation_recomputation=ActivationRecomputation[
            {"none": "NONE", "selective": "SELECTIVE", "full": "FULL"}[plan.remat]
        ],
        ds_zero=DSZeRO(stage),
        flash_attn=model["attn_implementation"] != "eager",
        mlp_gated_linear_units=model["name"] == "llama",
    )
    return float(found["latency_per_iter"]), float(found.get("memory_used_per_gpu", 0.0) or 0.0)


def main() -> None:
    announce()
    print(versions_of("llm-analysis"))
    logging.disable(logging.CRITICAL)
    asked = [case for case in cases()[0] if case.seconds and case.device in DEVICES]
    needed: dict[str, list[float]] = {}
    possible = []
    refused = dict[str, int]()
    for case in asked:
        try:
            low, high = (step_seconds(case, value)[0] for value in (START, 2 * START))
        except Exception as reason:  # whatever it cannot do, it says in its own way
            name = (
                "larger than its memory model"
                if "max_batch_size" in str(reason)
                else str(reason)[:60]
            )
            name = (
                "a width of the feed-forward network that is no multiple of hidden"
                if "ffn" in name
                else name
            )
            refused[name] = refused.get(name, 0) + 1
            continue
        possible.append(case)
        # seconds = fixed + work / efficiency
        work = (low - high) * 2 * START
        fixed = high - work / (2 * START)
        assert case.seconds is not None
        if case.seconds > fixed:
            needed.setdefault(f"{case.source} {case.device}", []).append(
                work / (case.seconds - fixed)
            )
    best = {name: min(1.0, statistics.median(values)) for name, values in needed.items()}
    print(
        "efficiency given to llm-analysis:", {name: round(value, 3) for name, value in best.items()}
    )
    theirs = [
        (case, step_seconds(case, best[f"{case.source} {case.device}"])[0]) for case in possible
    ]
    ours = run(possible)[0]
    print(f"{'step time':12} {'rows':>5} {'llm-analysis':>13} {'p90':>7} {'plait':>7} {'p90':>7}")
    for source in [*sorted({case.source for case in possible}), "all"]:
        rows = (
            [(case, seconds) for case, seconds in theirs if source in {case.source, "all"}],
            [(case, guess.step_seconds) for case, guess in ours if source in {case.source, "all"}],
        )
        one, two = (
            summary(error(seconds, case.seconds or 1.0) for case, seconds in part) for part in rows
        )
        print(
            f"{source:12} {one['n']:5.0f} {one['median']:13.1%} {one['p90']:7.1%} "
            f"{two['median']:7.1%} {two['p90']:7.1%}"
        )
    guess_of = {case.id: seconds for case, seconds in theirs}

    class Said:
        """Only what `groups` reads of an estimate."""

        def __init__(self, seconds: float) -> None:
            self.step_seconds = seconds

    ranked = groups([(case, Said(guess_of[case.id])) for case in possible])  # type: ignore[misc]
    mine = {str(group["group"]): group for group in groups(ours)}
    print("\nSpearman within groups: llm-analysis, plait")
    for group in ranked:
        name = str(group["group"])
        print(f"  {group['spearman']:5.2f} {mine[name]['spearman']:5.2f}  {name}")
    for name, count in refused.items():
        print(f"refused by llm-analysis: {count} rows, {name}")


if __name__ == "__main__":
    main()
