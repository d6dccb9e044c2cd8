"""axolotl's YAML. Keys as in axolotl's `utils/schemas/config.py`."""

from __future__ import annotations

from typing import Final

from plait.interop.deepspeed import adopt_below, word_on_file
from plait.interop.draft import ZERO_STRATEGIES, Draft
from plait.interop.optimizers import adopt_course, adopt_name
from plait.interop.source import Imported, Kind, Source
from plait.values import PyTree

LOG: Final = "output of axolotl's own logging; plait writes metrics.jsonl and trace.json"
FILES: Final = "axolotl's own folders; plait writes into --out"
KERNEL: Final = "a kernel of axolotl; results do not depend on it"
DATA: Final = "axolotl's own reading of data; see [data] files, tokenizer and packing"
OTHER: Final = "another kind of training than plait's"
RULE: Final = "the update is another one there"
COURSE: Final = "the learning rate or the model is another one there"
ALL_LINEAR: Final = "adapter.targets left out means every linear layer but the output here"
LAUNCH: Final = "an option of the launcher; plait train --nproc or torchrun takes its place"

NOTES: Final[tuple[tuple[str, Kind, str], ...]] = (
    *((name, "ignored", LOG) for name in ("wandb_*", "mlflow_*", "comet_*", "use_*", "logging_*")),
    *(
        (name, "ignored", LOG)
        for name in ("debug", "profiler_*", "include_tokens_per_second", "tensorboard*")
    ),
    *((name, "ignored", FILES) for name in ("output_dir", "save_*", "hub_*", "push_*", "resume_*")),
    *(
        (name, "ignored", FILES)
        for name in ("auto_resume_*", "dataset_prepared_path", "load_best_model_at_end")
    ),
    *(
        (name, "ignored", KERNEL)
        for name in ("*_attention", "xformers*", "*_kernel", "*_fused_*", "liger*")
    ),
    *(
        (name, "ignored", KERNEL)
        for name in ("torch_compile_*", "plugins*", "cut_cross_entropy", "tf32", "unsloth*")
    ),
    *(
        (name, "ignored", KERNEL)
        for name in ("flash_attn*", "attn_implementation", "gc_steps", "device_map")
    ),
    *(
        (name, "ignored", DATA)
        for name in ("dataset*", "test_datasets*", "val_set_size", "shuffle*", "chat_template*")
    ),
    *(
        (name, "ignored", DATA)
        for name in ("train_on_inputs", "group_by_length", "pad_*", "special_tokens*", "tokens*")
    ),
    *(
        (name, "ignored", DATA)
        for name in ("tokenizer_*", "*_sequence_len", "dataloader_*", "eval_sample_packing")
    ),
    *(
        (name, "ignored", DATA)
        for name in (
            "excess_length_strategy",
            "streaming*",
            "pretraining_dataset*",
            "roles_to_train",
        )
    ),
    *(
        (name, "ignored", DATA)
        for name in (
            "sample_packing_*",
            "multipack_*",
            "added_tokens_overrides*",
            "remove_unused_columns",
        )
    ),
    *(
        (name, "ignored", "see [eval]")
        for name in ("eval*", "early_stopping_patience", "do_*", "metric_*")
    ),
    *(
        (name, "different", OTHER)
        for name in ("rl", "rl_*", "trl.*", "dpo_*", "kto_*", "orpo_*", "grpo*", "reward_model")
    ),
    *(
        (name, "different", OTHER)
        for name in ("process_reward_model", "vllm.*", "relora*", "galore*", "neftune_noise_alpha")
    ),
    *((name, "ignored", LOG) for name in ("trackio_*", "swanlab_*", "project_name", "num_labels")),
    *(
        (name, "ignored", FILES)
        for name in ("saves_per_epoch", "skip_prepare_dataset", "torchdistx_path")
    ),
    *(
        (name, "ignored", FILES)
        for name in ("hf_use_auth_token", "secrets", "gpu", "gpu_count", "local_rank")
    ),
    *(
        (name, "ignored", DATA)
        for name in ("eot_tokens", "min_sample_len", "resize_token_embeddings*", "image_*")
    ),
    *(
        (name, "ignored", KERNEL)
        for name in ("activation_offloading", "experimental_*", "*_experts*", "tiled_mlp*")
    ),
    *(
        (name, "ignored", KERNEL)
        for name in ("*attn_*", "flash_optimum", "experts_implementation", "accelerator_config.*")
    ),
    *(
        (name, "different", OTHER)
        for name in ("ebft.*", "diffusion*", "distill*", "kd_*", "opd*", "chunked_*")
    ),
    *(
        (name, "different", "weights are rounded there")
        for name in ("gptq*", "bnb_*", "quantize_*", "*_fp4_*")
    ),
    ("model_quantization_config*", "different", "weights are rounded there"),
    ("loss_watchdog_*", "ignored", "see recovery.on_nan"),
    ("freeze_*", "different", "plait trains all parameters, or adapters alone"),
    ("quantization.*", "different", "weights are rounded there"),
    ("qat.*", "different", "weights are rounded while training there"),
    ("type_of_model", "ignored", "the config says the family"),
    ("is_*", "ignored", "the config says the family"),
    ("*_type", "ignored", "the config says the family"),
    ("*model_config*", "ignored", "a place of files; model.config names the config"),
    ("trust_remote_code", "ignored", "plait runs no code from a model's folder"),
    ("strict", "ignored", "plait's configs are always strict"),
    ("optim_args*", "ignored", "settings of that optimizer's implementation"),
    ("lr_*", "ignored", "plait's courses are constant, linear and cosine"),
    ("cosine_*", "ignored", "plait's cosine ends at train.min_lr"),
    ("lora_*", "ignored", "a setting of adapters with no word here"),
    ("peft*", "ignored", "a setting of adapters with no word here"),
    ("adapter_*", "ignored", "a setting of adapters with no word here"),
    ("fsdp_config.*", "ignored", "a setting of FSDP's implementation"),
    ("fsdp*", "ignored", "a setting of FSDP's implementation"),
    ("gradient_checkpointing_kwargs*", "ignored", KERNEL),
    ("gpu_memory_limit", "ignored", "plait estimate predicts memory"),
    ("ddp_*", "ignored", KERNEL),
    ("context_parallel_*", "ignored", KERNEL),
    ("heads_k_stride", "ignored", KERNEL),
    ("ring_attn_func", "ignored", KERNEL),
    ("max_memory*", "ignored", KERNEL),
    ("unfrozen_parameters*", "different", "plait trains all parameters, or adapters alone"),
    *((name, "different", COURSE) for name in ("jagged_*", "rope_scaling", "overrides_of_*")),
    *((name, "different", RULE) for name in ("loraplus_*", "embedding_lr*", "optim_target_*")),
    *((name, "different", RULE) for name in ("adam_epsilon2", "adam_beta3", "dion_*", "qgalore_*")),
    *((name, "different", RULE) for name in ("lisa_*", "noisy_embedding_alpha", "reinit_weights")),
    *((name, "different", OTHER) for name in ("rpo_alpha", "simpo_gamma", "cpo_alpha", "eaft_*")),
    *(
        (name, "different", OTHER)
        for name in ("center_rewards_*", "precompute_ref_*", "trainer_cls", "scaling_softmax*")
    ),
    *((name, "different", "weights are rounded there") for name in ("fp8_*", "nvfp4_*")),
    *(
        (name, "different", "samples are made in another way there; see [data]")
        for name in ("pose_*", "curriculum_sampling", "batch_flattening", "role_boundaries")
    ),
    ("selective_checkpointing.*", "different", "write remat:selective"),
    ("auto_find_batch_size", "different", "plait's batch is what [train] says"),
    ("context_parapllel_size", "different", "misspelt, so axolotl does not read it"),
    *((name, "ignored", LOG) for name in ("hf_mlflow_*", "otel_*", "include_tkps", "generat*")),
    *((name, "ignored", LOG) for name in ("bench_*", "greater_is_better", "num_generation_*")),
    *((name, "ignored", LAUNCH) for name in ("ray_*", "resources_per_worker*", "device", "ddp")),
    *((name, "ignored", LAUNCH) for name in ("world_size", "gradio_*", "axolotl_config_path")),
    *((name, "ignored", LAUNCH) for name in ("provider", "node_count", "volumes", "branch")),
    *((name, "ignored", LAUNCH) for name in ("dockerfile_*", "memory*", "timeout*")),
    *((name, "ignored", FILES) for name in ("merge_*", "dynamic_checkpoint.*", "revision_of_*")),
    *((name, "ignored", FILES) for name in ("num_dataset_shards_*", "base_model_ignore_*")),
    *((name, "ignored", DATA) for name in ("processor_kwargs*", "max_prompt_len", "pretrain*")),
    *((name, "ignored", DATA) for name in ("default_system_message", "fix_untrained_tokens")),
    *((name, "ignored", DATA) for name in ("preprocess_iterable", "total_num_tokens")),
    *((name, "ignored", DATA) for name in ("total_supervised_tokens", "*_embeddings")),
    *((name, "ignored", KERNEL) for name in ("qlora_sharded_*", "embeddings_skip_upcast")),
    *((name, "ignored", KERNEL) for name in ("torch_empty_cache_*", "gc_*", "float32", "sdpa_*")),
    *((name, "ignored", KERNEL) for name in ("layer_offloading*", "ple_cpu_offload", "fp32_*")),
    *((name, "ignored", KERNEL) for name in ("deepcompile", "low_cpu_mem_usage", "torch_dtype")),
    *((name, "ignored", KERNEL) for name in ("accelerator_config", "expert_parallel_*")),
)
MAX_NORM: Final = 1.0
"""The gradient norm that transformers' Trainer clips at, where a file leaves it out."""


def read(source: Source) -> Imported:
    """The plan and the config of an axolotl YAML. Errors: `ConfigError`."""
    draft = Draft(source)
    draft.micro_batch_size = source.count("micro_batch_size")
    draft.micro_batches = source.count("gradient_accumulation_steps") or 1
    draft.global_batch = source.count("batch_size")
    _sizes(source, draft)
    _precision(source, draft)
    _strategy(source, draft)
    _training(source, draft)
    _adapter(source, draft)
    base = source.take("base_model")
    if base is not None:
        draft.put("model", name="hf", config=str(base), weights=str(base))
    draft.put("data", seq_len=source.count("sequence_len"))
    if source.flag("sample_packing"):
        draft.put("data", packing=True)
    source.note_all(NOTES)
    return draft.finish({"global": "batch_size", "micro": "micro_batch_size"})


def _sizes(source: Source, draft: Draft) -> None:
    draft.tp = source.size("tensor_parallel_size")
    draft.cp = source.size("context_parallel_size", "sequence_parallel_degree")
    draft.ep = source.size("expert_parallel_size")


def _strategy(source: Source, draft: Draft) -> None:
    replicate = source.count("dp_replicate_size")
    shard = source.count("dp_shard_size")
    file = source.take("deepspeed")
    version = source.take("fsdp_version")
    has_fsdp = source.under("fsdp_config") or source.values.get("fsdp") not in (None, [], "")
    if file is not None:
        stage = next((number for number in (3, 2, 1) if ZERO_STRATEGIES[number] in str(file)), None)
        if stage is not None:
            draft.strategy = ZERO_STRATEGIES[stage]
        source.note("deepspeed", *word_on_file(source, str(file), draft.strategy))
        adopt_below(source, draft, str(file))
    elif adopt_below(source, draft, "deepspeed"):  # the keys themselves
        pass
    elif has_fsdp or version is not None or (shard or 1) > 1:
        draft.strategy = ZERO_STRATEGIES[3]
        reshard = source.take("fsdp_config.reshard_after_forward")
        if reshard is not None and not reshard:
            draft.strategy = ZERO_STRATEGIES[2]
        draft.offload = source.flag("fsdp_config.offload_params", "fsdp_config.fsdp_offload_params")
        if source.flag("fsdp_config.activation_checkpointing"):
            draft.remat = "full"
    if replicate is not None or shard is not None:
        draft.dp = (replicate or 1) * (shard or 1)
        draft.replicate = (replicate or 1) if draft.strategy != "allreduce" else 1


def _precision(source: Source, draft: Draft) -> None:
    bf16 = source.values.get("bf16")
    if source.flag("bf16", "bfloat16") or bf16 == "auto":
        draft.precision = "bf16"
        source.flag("fp16", "float16")
    elif source.flag("fp16", "float16"):
        draft.put("train", float16=True)
    if source.flag("fp8"):
        source.note("fp8", "different", "products in 8 bits round there")
    if source.flag("gradient_checkpointing"):
        draft.remat = "full"
    draft.compile = source.flag("torch_compile")


def _training(source: Source, draft: Draft) -> None:
    adopt_name(source, draft, "optimizer", source.take("optimizer"))
    adopt_course(source, draft, "lr_scheduler", source.take("lr_scheduler"))
    beta1 = source.number("adam_beta1")
    beta2 = source.number("adam_beta2")
    clip = source.number("max_grad_norm")
    if beta1 is not None or beta2 is not None:
        draft.put("train", betas=[beta1 or 0.9, beta2 or 0.999])
    draft.put(
        "train",
        lr=source.number("learning_rate"),
        eps=source.number("adam_epsilon", "adam_eps"),
        weight_decay=source.number("weight_decay"),
        clip_grad_norm=clip or None,
        seed=source.count("seed"),
        min_lr=source.number("eta_min"),
        steps=source.count("max_steps"),
    )
    train = draft.sections["train"]  # a DeepSpeed file may have said it
    if "lr_scheduler" not in source:
        train.setdefault("schedule", "cosine")
    if clip is None:
        train.setdefault("clip_grad_norm", MAX_NORM)
    warmup = source.number("warmup_steps")
    if warmup is not None and warmup == int(warmup):
        draft.put("train", warmup_steps=int(warmup))
    ratio = source.number("warmup_ratio")
    steps = draft.sections["train"].get("steps")
    if ratio is not None and steps:
        draft.put("train", warmup_steps=round(ratio * steps))
    elif ratio is not None:
        source.note("warmup_ratio", "ignored", "write train.warmup_steps once steps are known")
    if "num_epochs" in source:
        source.note("num_epochs", "ignored", "plait counts steps: write train.steps")


def _adapter(source: Source, draft: Draft) -> None:
    kind = source.take("adapter")
    base = _base(source)
    if kind is None or kind == "":
        return
    is_dora = source.flag("peft_use_dora", "lora_use_dora")
    if is_dora and base != "none":
        source.note("adapter", "different", "the base of dora is as the plan says, not in codes")
        base = "none"
    if str(kind).lower() not in ("lora", "qlora"):
        source.note("adapter", "ignored", "plait has lora and dora")
        return
    targets = _targets(source)
    draft.put(
        "adapter",
        kind="dora" if is_dora else "lora",
        base=None if base == "none" else base,
        rank=source.count("lora_r"),
        alpha=source.number("lora_alpha"),
        dropout=source.number("lora_dropout"),
        targets=targets or None,
    )


def _targets(source: Source) -> list[str]:
    """The names of the layers that have adapters; none for every linear layer."""
    modules = _as_list(source.take("lora_target_modules"))
    parameters = _as_list(source.take("lora_target_parameters"))  # of packed experts
    if source.flag("lora_target_linear"):
        if parameters:
            source.note("lora_target_linear", "different", "name the layers in adapter.targets")
        else:
            source.note("lora_target_linear", "ignored", ALL_LINEAR)
            modules = []
    return [*modules, *parameters]


def _as_list(value: PyTree) -> list[str]:
    """The names of a key that may hold one or several."""
    return [value] if isinstance(value, str) else list(value or ())


def _base(source: Source) -> str:
    """How the frozen weights are kept."""
    in_four, in_eight = source.flag("load_in_4bit"), source.flag("load_in_8bit")
    if in_four:
        source.note("load_in_4bit", "different", "base nf4: scales are float32, not rounded again")
    elif in_eight:
        source.note("load_in_8bit", "different", "base int8: weights are rounded, inputs are not")
    return "nf4" if in_four else "int8" if in_eight else "none"
