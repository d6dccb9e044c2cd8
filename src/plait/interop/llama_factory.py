"""LLaMA-Factory's YAML.

Keys as in LLaMA-Factory's `src/llamafactory/hparams` (`finetuning_args.py`, `model_args.py`,
`data_args.py`, `training_args.py`), and in transformers' `TrainingArguments`, which these extend.
With `USE_MCA=1` the sizes of Megatron-Core stand beside them (`examples/megatron`). Recomputation
is on unless a key disables it (`model/model_utils/checkpointing.py`).
"""

from __future__ import annotations

import re
from typing import Final

from plait.interop.deepspeed import adopt_below, word_on_file
from plait.interop.draft import INTERLEAVED, ZERO_STRATEGIES, Draft
from plait.interop.optimizers import adopt_course, adopt_name
from plait.interop.source import Imported, Kind, Source

LOG: Final = "output of LLaMA-Factory's own logging; plait writes metrics.jsonl and trace.json"
FILES: Final = "LLaMA-Factory's own folders and tokens; plait writes into --out"
KERNEL: Final = "a kernel of LLaMA-Factory; results do not depend on it"
DATA: Final = "LLaMA-Factory's own reading of data; see [data] files, tokenizer and packing"
TALK: Final = "a setting of answers, not of training"
OTHER: Final = "another kind of training than plait's"
RULE: Final = "the update is another one there"
FORWARD: Final = "the model computes something else there"
ROUNDED: Final = "weights are rounded there"
LAUNCH: Final = "an option of the launcher; plait train --nproc or torchrun takes its place"
PARTS: Final = "plait trains all parameters, or adapters alone; see [[train.groups]] freeze"
ADAPTER: Final = "a setting of adapters with no word here"

NAMED: Final[tuple[tuple[Kind, str, str], ...]] = (
    ("ignored", LOG, "logging_* plot_loss report_to run_name include_* log_* use_swanlab"),
    ("ignored", LOG, "swanlab_* print_param_status disable_tqdm project trackio_* debug"),
    ("ignored", LOG, "skip_memory_metrics"),
    ("ignored", FILES, "output_dir overwrite_output_dir save_* cache_dir *_hub_token hub_*"),
    ("ignored", FILES, "push_to_hub resume_from_checkpoint export_* load_best_model_at_end"),
    ("ignored", FILES, "adapter_folder offload_folder model_revision low_cpu_mem_usage"),
    ("ignored", FILES, "ignore_data_skip restore_callback_* enable_jit_checkpoint"),
    ("ignored", LAUNCH, "no_cuda use_ipex dispatch_batches split_batches mp_parameters"),
    ("ignored", KERNEL, "fp16_backend half_precision_backend torchdynamo jit_mode_eval past_index"),
    ("ignored", "see [eval]", "evaluation_strategy"),
    ("different", "write tpN, cpN and dpN into the plan", "parallelism_config*"),
    ("ignored", FILES, "metric_for_best_model greater_is_better"),
    ("ignored", DATA, "dataset dataset_dir media_dir template train_on_prompt mask_history"),
    ("ignored", DATA, "streaming buffer_size mix_strategy interleave_probs overwrite_cache"),
    ("ignored", DATA, "preprocessing_* max_samples ignore_pad_token_for_loss tool_format"),
    ("ignored", DATA, "tokenized_path default_system enable_thinking data_shared_file_system"),
    ("ignored", DATA, "dataloader_* remove_unused_columns group_by_length disable_shuffling"),
    ("ignored", DATA, "data_seed train_sampling_strategy length_column_name label_names"),
    ("ignored", DATA, "use_fast_tokenizer split_special_tokens add_* new_special_tokens_config"),
    ("ignored", DATA, "init_special_tokens image_* video_* audio_* crop_to_patches"),
    ("ignored", DATA, "use_audio_in_video"),
    ("different", "the model has more tokens there", "resize_vocab"),
    ("ignored", "see [eval]", "eval_* val_size per_device_eval_* do_eval do_predict"),
    ("ignored", "see [eval]", "compute_accuracy early_stopping_steps prediction_loss_only"),
    ("ignored", "see [eval]", "batch_eval_metrics *_full_eval"),
    ("ignored", TALK, "predict_with_generate generation_* do_sample temperature top_p top_k"),
    ("ignored", TALK, "num_beams max_length max_new_tokens *_penalty skip_special_tokens"),
    ("ignored", TALK, "system_message sortish_sampler infer_* vllm_* sglang_* use_kv_cache"),
    ("ignored", KERNEL, "flash_attn enable_liger_kernel use_unsloth* use_v1_kernels tf32"),
    ("ignored", KERNEL, "use_reentrant_gc gradient_checkpointing* activation_checkpointing*"),
    ("ignored", KERNEL, "upcast_* torch_compile_* use_liger_kernel liger_kernel_config"),
    ("ignored", KERNEL, "use_cache torch_empty_cache_steps use_kt kt_* cpu_infer chunk_size mode"),
    ("ignored", KERNEL, "overlap_* *_fusion moe_grouped_gemm moe_token_dispatcher_type"),
    ("ignored", KERNEL, "moe_shared_expert_overlap recompute_method recompute_num_layers"),
    ("ignored", LAUNCH, "ddp_* ray_* resources_per_worker* placement_strategy local_rank"),
    ("ignored", LAUNCH, "use_cpu accelerator_config* use_mca"),
    ("ignored", "plait runs no code from a model's folder", "trust_remote_code"),
    ("ignored", "plait train trains", "do_train"),
    ("ignored", "the batch is what [train] says", "auto_find_batch_size"),
    ("ignored", "see train.deterministic", "full_determinism"),
    ("ignored", "plait's courses are constant, linear and cosine", "lr_scheduler_kwargs*"),
    ("ignored", "plait's steps always have the whole global batch", "average_tokens_*"),
    ("ignored", "a setting of FSDP's implementation", "fsdp_config.* fsdp_config"),
    ("ignored", "the optimizer of this name has no such setting here", "optim_args"),
    ("different", OTHER, "pref_* dpo_* kto_* simpo_* ppo_* ref_model* reward_model* ld_alpha"),
    ("different", OTHER, "use_dft_loss neftune_noise_alpha label_smoothing_factor"),
    ("different", RULE, "use_galore galore_* use_apollo apollo_* use_badam badam_*"),
    ("different", RULE, "use_adam_mini loraplus_* optim_target_modules"),
    ("different", FORWARD, "rope_scaling shift_attn mixture_of_depths moe_aux_loss_coef"),
    ("different", ROUNDED, "fp8* quantization_method quantization_type"),
    ("different", PARTS, "freeze_* use_llama_pro additional_target oft_* module_dropout"),
    ("different", "the adapters start elsewhere there", "pissa_* adapter_name_or_path"),
    ("different", "the factor of an adapter is alpha / sqrt(rank) there", "use_rslora"),
    ("ignored", ADAPTER, "create_new_adapter lora_* use_dora double_quantization"),
    ("ignored", ADAPTER, "quantization_device_map"),
)
"""Keys that are named and not read: the kind, the reason, and patterns."""
NOTES: Final[tuple[tuple[str, Kind, str], ...]] = tuple(
    (pattern, kind, reason) for kind, reason, patterns in NAMED for pattern in patterns.split()
)
TRAINER: Final = {
    "optimizer": "adamw",
    "lr": 5e-5,
    "schedule": "linear",
    "clip_grad_norm": 1.0,
    "seed": 42,
}
"""Values of transformers' `TrainingArguments` for keys that a file leaves out."""
BATCH: Final = 8
"""The samples of a device and micro-batch that a file leaves out."""
LENGTH: Final = 2048
"""The tokens of a sample where a file leaves them out."""
RANK: Final = 8
"""The rank of an adapter where a file leaves it out."""


def read(source: Source) -> Imported:
    """The plan and the config of a LLaMA-Factory YAML. Errors: `ConfigError`."""
    draft = Draft(source)
    draft.micro_batch_size = source.size("per_device_train_batch_size", default=BATCH)
    draft.micro_batches = source.size("gradient_accumulation_steps")
    _precision(source, draft)
    _axes(source, draft)
    _strategy(source, draft)
    _training(source, draft)
    _method(source, draft)
    _data(source, draft)
    base = source.take("model_name_or_path")
    is_new = source.flag("train_from_scratch")
    if base is not None:
        draft.put("model", name="hf", config=str(base), weights=None if is_new else str(base))
    source.note_all(NOTES)
    return draft.finish({"micro": "per_device_train_batch_size"})


def _precision(source: Source, draft: Draft) -> None:
    pure = source.flag("pure_bf16")
    if source.flag("bf16") or pure:
        draft.precision = "bf16"
    elif source.flag("fp16"):
        draft.put("train", float16=True)
    if pure:
        source.note("pure_bf16", "different", "weights and states are bf16 there; here float32")
    if not source.flag("disable_gradient_checkpointing"):
        draft.remat = "full"
    draft.compile = source.flag("torch_compile")


def _axes(source: Source, draft: Draft) -> None:
    """The sizes of Megatron-Core, which counts where the environment says USE_MCA=1."""
    draft.tp = source.size("tensor_model_parallel_size")
    draft.pp = source.size("pipeline_model_parallel_size")
    draft.cp = source.size("context_parallel_size")
    draft.ep = source.size("expert_model_parallel_size")
    draft.sequence_parallel = source.flag("sequence_parallel") and draft.tp > 1
    stages = source.size("virtual_pipeline_model_parallel_size")
    if stages > 1 and draft.pp > 1:
        draft.schedule = INTERLEAVED
        draft.virtual = stages
    if source.flag("use_distributed_optimizer"):
        draft.strategy = ZERO_STRATEGIES[1]
    granularity = source.take("recompute_granularity")
    if granularity is not None:
        draft.remat = "selective" if granularity == "selective" else "full"


def _strategy(source: Source, draft: Draft) -> None:
    """DeepSpeed by the name of its file, whose keys are read where it is there, or FSDP."""
    file = source.take("deepspeed")
    words = str(source.take("fsdp") or "").lower().replace(",", " ").split()
    if file is not None:
        stage = re.search(r"(?:z|zero|stage)_?([0-3])", str(file).rpartition("/")[2].lower())
        if stage is not None:
            draft.strategy = ZERO_STRATEGIES[int(stage[1])]
        source.note("deepspeed", *word_on_file(source, str(file), draft.strategy))
        adopt_below(source, draft, str(file))
    elif adopt_below(source, draft, "deepspeed"):  # the keys themselves
        pass
    elif "full_shard" in words or "hybrid_shard" in words:
        draft.strategy = ZERO_STRATEGIES[3]
        if "hybrid_shard" in words:
            source.note("fsdp", "different", "write dpN:zero3,replicateM with M nodes")
    elif "shard_grad_op" in words:
        draft.strategy = ZERO_STRATEGIES[2]
    draft.offload |= "offload" in words and draft.strategy != "allreduce"


def _training(source: Source, draft: Draft) -> None:
    adopt_name(source, draft, "optim", source.take("optim"))
    if source.flag("use_muon"):
        draft.put("train", optimizer="muon")
    adopt_course(source, draft, "lr_scheduler_type", source.take("lr_scheduler_type"))
    beta1, beta2 = source.number("adam_beta1"), source.number("adam_beta2")
    if beta1 is not None or beta2 is not None:
        draft.put("train", betas=[beta1 or 0.9, beta2 or 0.999])
    clip = source.number("max_grad_norm")
    decay = source.number("weight_decay")
    steps = source.count("max_steps")
    draft.put(
        "train",
        lr=source.number("learning_rate"),
        eps=source.number("adam_epsilon"),
        weight_decay=decay,
        no_decay=["bias", "norm"] if decay else None,
        clip_grad_norm=clip or None,
        seed=source.count("seed"),
        steps=steps if steps is not None and steps > 0 else None,
    )
    for key, value in TRAINER.items():
        if key != "clip_grad_norm" or clip is None:
            draft.sections["train"].setdefault(key, value)
    _warmup(source, draft)


def _warmup(source: Source, draft: Draft) -> None:
    """The warm-up in steps; a part of the steps where the file says these."""
    warmup = source.number("warmup_steps")  # below 1 a part, as transformers 5 takes it
    ratio = source.number("warmup_ratio")
    steps = draft.sections["train"].get("steps")
    key = "warmup_ratio"
    if warmup is not None and 0 < warmup < 1:
        key, ratio, warmup = "warmup_steps", warmup, None
    if warmup:
        draft.put("train", warmup_steps=int(warmup))
    elif ratio and steps:
        draft.put("train", warmup_steps=-int(-ratio * steps // 1))
    elif ratio:
        source.note(key, "ignored", "write train.warmup_steps once steps are known")
    if "num_train_epochs" in source:
        source.note("num_train_epochs", "ignored", "plait counts steps: write train.steps")


def _method(source: Source, draft: Draft) -> None:
    """The aim of the training, and the parameters that it trains."""
    stage = source.take("stage")
    if stage is not None and stage not in ("pt", "sft"):
        source.note("stage", "different", OTHER)
    kind = str(source.take("finetuning_type") or "lora").lower()
    bits = source.count("quantization_bit")
    if bits is not None:
        source.note("quantization_bit", "different", ROUNDED)
    if kind != "lora":
        if kind != "full":
            source.note("finetuning_type", "different", PARTS)
        return
    rank = source.size("lora_rank", default=RANK)
    alpha = source.number("lora_alpha")
    target = source.take("lora_target")
    names = target.split(",") if isinstance(target, str) else list(target or ())
    targets = [str(name).strip() for name in names]
    base = {4: "nf4", 8: "int8"}.get(bits or 0)
    is_dora = source.flag("use_dora")
    draft.put(
        "adapter",
        kind="dora" if is_dora else "lora",
        base=None if is_dora else base,
        rank=rank,
        alpha=2 * rank if alpha is None else alpha,
        dropout=source.number("lora_dropout"),
        targets=None if targets in ([], ["all"]) else targets,
    )


def _data(source: Source, draft: Draft) -> None:
    draft.put("data", seq_len=source.size("cutoff_len", default=LENGTH))
    is_neat = source.flag("neat_packing")
    if source.flag("packing") or is_neat:
        draft.put("data", packing=True)
    if "packing" in source and draft.sections["data"].get("packing") and not is_neat:
        source.note("packing", "different", "tokens see other samples of a row there; not here")
