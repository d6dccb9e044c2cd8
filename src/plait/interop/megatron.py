"""Megatron-LM's command line.

Options as in NVIDIA/Megatron-LM `megatron/training/arguments.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from plait.interop.draft import INTERLEAVED, ZERO_STRATEGIES, Draft
from plait.interop.megatron_options import NOTES
from plait.interop.megatron_others import OTHERS
from plait.interop.optimizers import adopt_name
from plait.interop.source import Imported, Source
from plait.values import JsonMapping, JsonObject


def options_of(table: JsonMapping) -> JsonObject:
    """The options of a YAML file with `MODEL_ARGS`, as Megatron-LM's functional tests keep them.

    A file without that table is its own options; `ENV_VARS` gives the number of ranks.
    """
    options = table.get("MODEL_ARGS", table)
    if not isinstance(options, Mapping):
        return dict(table)
    named = {
        str(key) if str(key).isupper() else str(key).removeprefix("--").replace("_", "-"): value
        for key, value in options.items()
    }
    if options is table:
        return named
    return {**{str(key): value for key, value in table.items() if key != "MODEL_ARGS"}, **named}


def read(source: Source) -> Imported:
    """The plan and the config of a Megatron-LM command line. Errors: `ConfigError`."""
    draft = Draft(source)
    _world(source)
    _axes(source, draft)
    _data_axis(source, draft)
    draft.global_batch = source.count("global-batch-size")
    draft.micro_batch_size = source.count("micro-batch-size")
    _precision(source, draft)
    _training(source, draft)
    _model(source, draft)
    source.note_all(NOTES)
    source.note_all(OTHERS)
    return draft.finish({"global": "--global-batch-size", "micro": "--micro-batch-size"})


def _world(source: Source) -> None:
    world = source.count("WORLD_SIZE", "world-size")
    nodes = source.count("nnodes") or 1
    per_node = source.count("nproc-per-node")
    if world is None and per_node is not None:
        world = nodes * per_node
    others = math.prod(
        source.size(f"{axis}-parallel-size")
        for axis in ("tensor-model", "pipeline-model", "context")
    )
    if world is not None and world % others:
        key = "WORLD_SIZE" if "WORLD_SIZE" in source else "nproc-per-node"
        source.note(
            key, "contradictory", f"{world} ranks do not divide by tensor x pipeline x context"
        )
        world = None
    if source.world_size is None:
        source.world_size = world


def _axes(source: Source, draft: Draft) -> None:
    draft.tp = source.size("tensor-model-parallel-size")
    draft.sequence_parallel = source.flag("sequence-parallel") and draft.tp > 1
    draft.pp = source.size("pipeline-model-parallel-size")
    draft.cp = source.size("context-parallel-size")
    kind = source.take("cp-comm-type")
    kind = kind[0] if isinstance(kind, list) else kind
    draft.context = "ulysses" if kind == "a2a" else "ring"
    if kind not in (None, "p2p", "a2a"):
        source.note("cp-comm-type", "different", "plait has ring (p2p) and ulysses (a2a)")
    draft.ep = source.size("expert-model-parallel-size")
    expert_tp = source.count("expert-tensor-parallel-size")
    if expert_tp is not None and expert_tp not in (1, draft.tp):
        source.note("expert-tensor-parallel-size", "different", "experts are cut by tp here")
    draft.whole_experts = expert_tp == 1 and draft.tp > 1
    layers = source.count("num-layers-per-virtual-pipeline-stage")
    stages = source.count("num-virtual-stages-per-pipeline-rank")
    total = source.count("num-layers")
    if stages is None and layers and total is not None:
        stages = total // (layers * draft.pp)
    elif stages is None and layers is not None and draft.pp > 1:
        source.note(
            "num-layers-per-virtual-pipeline-stage",
            "ignored",
            "the number of stages follows from the number of layers, which is not known here",
        )
    if stages is not None and stages > 1 and draft.pp > 1:
        draft.schedule = INTERLEAVED
        draft.virtual = stages


def _data_axis(source: Source, draft: Draft) -> None:
    sharding = source.take("data-parallel-sharding-strategy")
    names = ("no_shard", "optim", "optim_grads", "optim_grads_params")
    stages = dict(zip(names, ZERO_STRATEGIES, strict=True))
    fsdp = source.flag("use-megatron-fsdp", "use-torch-fsdp2", "use-custom-fsdp")
    if fsdp:
        draft.strategy = stages.get(str(sharding), ZERO_STRATEGIES[3])
    elif source.flag("use-distributed-optimizer"):
        draft.strategy = ZERO_STRATEGIES[1]
    if sharding is not None and not fsdp:
        source.note(
            "data-parallel-sharding-strategy", "contradictory", "it needs --use-megatron-fsdp"
        )
    source.flag("use-distributed-optimizer")
    draft.replicate = source.size("num-distributed-optimizer-instances")
    draft.offload = source.flag("optimizer-cpu-offload") and draft.strategy != "allreduce"


def _precision(source: Source, draft: Draft) -> None:
    if source.flag("bf16"):
        draft.precision = "bf16"
        if source.flag("fp16"):
            source.note("fp16", "contradictory", "--bf16 stands beside it; bf16 is taken")
    elif source.flag("fp16"):
        draft.put("train", float16=True)
    granularity = source.take("recompute-granularity")
    if granularity in ("full", "selective"):
        draft.remat = granularity
    if source.flag("recompute-activations"):
        draft.remat = "selective"
    layers = source.count("recompute-num-layers")
    if layers is not None and layers > 1:
        source.note("recompute-num-layers", "different", "remat:full works block by block")
    if draft.remat == "selective":
        key = "recompute-granularity" if granularity else "recompute-activations"
        source.note(
            key,
            "different",
            "mapped to remat:selective; Megatron-LM recomputes attention's core alone, plait "
            "norms and activations as well",
        )


def _training(source: Source, draft: Draft) -> None:
    steps = source.count("train-iters")
    samples = source.count("train-samples")
    batch = draft.global_batch
    if steps is None and samples is not None and batch:
        steps = samples // batch
    beta1 = source.number("adam-beta1")
    beta2 = source.number("adam-beta2")
    adopt_name(source, draft, "optimizer", source.take("optimizer") or "adam")
    draft.put(
        "train",
        steps=steps,
        lr=source.number("lr"),
        min_lr=source.number("min-lr"),
        eps=source.number("adam-eps"),
        betas=[0.9 if beta1 is None else beta1, 0.999 if beta2 is None else beta2],
        momentum=source.number("sgd-momentum"),
        seed=source.count("seed"),
        warmup_steps=_warmup(source, steps, batch),
    )
    decay = source.number("weight-decay")
    draft.put("train", weight_decay=0.01 if decay is None else decay)
    clip = source.number("clip-grad")
    draft.put("train", clip_grad_norm=(1.0 if clip is None else clip) or None)
    if "weight-decay" in source and source.values["weight-decay"] not in ("0", "0.0"):
        source.note(
            "weight-decay",
            "different",
            "mapped to train.weight_decay; Megatron-LM spares biases and norms, plait by "
            'train.no_decay = ["norm", "bias"]',
        )
    course = source.take("lr-decay-style")
    if course in ("constant", "linear", "cosine"):
        draft.put("train", schedule=course)
    elif course is None:
        draft.put("train", schedule="linear")
    else:
        source.note("lr-decay-style", "ignored", "plait's courses are constant, linear and cosine")
    decay_steps = source.count("lr-decay-iters")
    if decay_steps is not None and decay_steps != steps:
        source.note("lr-decay-iters", "different", "plait's decay ends with the last step")
    source.count("lr-decay-samples")
    draft.put("data", seq_len=source.count("seq-length"))
    if batch and draft.micro_batch_size and not source.flag("calculate-per-token-loss"):
        source.note(
            "micro-batch-size",
            "different",
            "mapped; Megatron-LM takes the mean of micro-batches' means unless "
            "--calculate-per-token-loss is given, plait the mean over all tokens",
        )
    if "rampup-batch-size" in source:
        source.note("rampup-batch-size", "different", "the batch grows there; here it is constant")


def _warmup(source: Source, steps: int | None, batch: int | None) -> int | None:
    warmup = source.count("lr-warmup-iters")
    fraction = source.number("lr-warmup-fraction")
    samples = source.count("lr-warmup-samples")
    decay_steps = source.count("lr-decay-iters") or steps
    if warmup is None and fraction is not None and decay_steps:
        return round(fraction * decay_steps)
    if warmup is None and samples is not None and batch:
        return samples // batch
    return warmup


def _model(source: Source, draft: Draft) -> None:
    layers = source.count("num-layers")
    width = source.count("hidden-size")
    heads = source.count("num-attention-heads")
    if None in (layers, width, heads):
        for key in (
            "max-position-embeddings",
            "kv-channels",
            "untie-embeddings-and-output-weights",
        ):
            if key in source:
                source.note(key, "ignored", "the sizes of the model are not all there")
        return
    gated = source.flag("swiglu")
    rms = source.take("normalization") == "RMSNorm"
    rotary = source.take("position-embedding-type") == "rope" or source.flag(
        "use-rotary-position-embeddings"
    )
    is_llama = gated and rms and rotary
    head_size = source.count("kv-channels")
    untied = source.flag("untie-embeddings-and-output-weights")
    dropout = source.number("hidden-dropout")
    attention_dropout = source.number("attention-dropout")
    longest = source.count("max-position-embeddings")
    vocabulary = source.count("vocab-size", "padded-vocab-size")
    if vocabulary is None:
        vocabulary = 32000 if is_llama else 50257
        draft.assumed.append(
            f"the file does not say the size of the vocabulary: {vocabulary} is taken; write "
            "model.vocab_size"
        )
    draft.put(
        "model",
        name="llama" if is_llama else "gpt",
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=heads,
        intermediate_size=source.count("ffn-hidden-size"),
        max_position_embeddings=longest,
        vocab_size=vocabulary,
        tie_word_embeddings=not untied,
        dropout=0.1 if dropout is None else dropout,
    )
    if attention_dropout is not None and attention_dropout != dropout:
        source.note("attention-dropout", "different", "plait has one dropout; hidden's is taken")
    epsilon = source.number("norm-epsilon", "layernorm-epsilon")
    draft.put("model", **{"rms_norm_eps" if is_llama else "layer_norm_epsilon": epsilon})
    if not is_llama and (gated or rms or rotary):
        for key in ("swiglu", "normalization", "position-embedding-type"):
            if key in source:
                source.note(key, "different", "gpt has GELU, layer norms and learned positions")
    linear_bias = source.flag("disable-bias-linear")
    if is_llama != linear_bias and "disable-bias-linear" in source:
        source.note("disable-bias-linear", "different", "gpt has biases, llama has none")
    _llama(source, draft, is_llama)
    if is_llama:
        draft.put("model", head_dim=head_size)
    percent = source.number("rotary-percent")
    if percent not in (None, 1.0):
        source.note("rotary-percent", "different", "llama turns all of a head")


def _llama(source: Source, draft: Draft, is_llama: bool) -> None:
    groups = source.count("num-query-groups")
    if source.flag("group-query-attention") and groups is not None:
        if is_llama:
            draft.put("model", num_key_value_heads=groups)
        else:
            source.note("num-query-groups", "different", "gpt has as many key as query heads")
    base = source.number("rotary-base")
    experts = source.count("num-experts")
    topk = source.count("moe-router-topk")
    width = source.count("moe-ffn-hidden-size")
    balance = source.number("moe-aux-loss-coeff")
    z_loss = source.number("moe-z-loss-coeff")
    if not is_llama:
        if experts is not None:
            source.note("num-experts", "different", "gpt is dense; llama has experts")
        return
    draft.put("model", rope_theta=base)
    if experts is None:
        return
    draft.put(
        "model",
        num_local_experts=experts,
        num_experts_per_tok=topk or 2,
        moe_intermediate_size=width or draft.sections["model"].get("intermediate_size"),
        router_aux_loss_coef=balance,
        router_z_loss_coef=z_loss,
    )
