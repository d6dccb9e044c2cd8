"""Options of Megatron-LM that a plan and a config do not hold, with the reason."""

from __future__ import annotations

from typing import Final

from plait.interop.source import Kind

KNOB: Final = "a setting of Megatron-LM's own implementation; results do not depend on it"
LOG: Final = "output of Megatron-LM's own logging; plait writes metrics.jsonl and trace.json"
FILES: Final = "files of Megatron-LM's own format; data comes by [data], checkpoints by --resume"
LAUNCH: Final = "an option of the launcher; plait train --nproc or torchrun takes its place"
LOW: Final = "products in 8 bits or fewer round there; plait computes in the plan's precision"
FINAL_RATE: Final = "the last learning rate; write train.min_lr"

INFERENCE: Final = "an option of inference or of another program; plait trains"

NOTES: Final[tuple[tuple[str, Kind, str], ...]] = (
    *(
        (name, "ignored", LAUNCH)
        for name in ("ENV-VARS*", "TEST-TYPE", "LAUNCHER", "METRICS*", "MODE", "container-*")
    ),
    *(
        (name, "ignored", LAUNCH)
        for name in ("ENV_VARS*", "TEST_TYPE", "NNODES", "SCRIPT*", "*_SCRIPT*", "N_REPEAT")
    ),
    *(
        (name, "ignored", INFERENCE)
        for name in ("inference-*", "temperature", "top-*", "output*", "prompts*", "*-to-generate")
    ),
    *(
        (name, "ignored", INFERENCE)
        for name in ("incoming-*", "return-*", "max-tokens-*", "model-provider", "task", "rerun-*")
    ),
    *(
        (name, "different", "multi-head latent attention is a model by name = 'hf' here")
        for name in ("multi-latent-attention", "q-lora-rank", "kv-lora-rank", "qk-*", "v-head-dim")
    ),
    *(
        (name, "different", "the model is another one than gpt or llama; use name = 'hf'")
        for name in ("spec", "hybrid-*", "mamba-*", "is-hybrid-model", "language-model-type")
    ),
    *(
        (name, "different", "the model is another one than gpt or llama; use name = 'hf'")
        for name in ("img-*", "patch-dim", "decoder-seq-length", "apply-layernorm-1p", "mtp-*")
    ),
    *(
        (name, "different", "rotary positions are scaled there; use name = 'hf'")
        for name in ("rotary-scaling-factor", "mscale*", "rope-*", "use-rope-scaling")
    ),
    *(
        (name, "ignored", KNOB)
        for name in ("decoupled-lr*", "tiktoken-*", "logging-level", "rotary-*", "start-weight-*")
    ),
    *(
        (name, "ignored", KNOB)
        for name in (
            "end-weight-*",
            "weight-decay-incr-style",
            "override-*",
            "retro-*",
            "heterogen*",
        )
    ),
    *(
        (name, "ignored", LAUNCH)
        for name in ("nnodes", "nproc*", "node-rank", "master-*", "rdzv-*")
    ),
    *(
        (name, "ignored", LAUNCH)
        for name in ("standalone", "max-restarts", "local-rank", "redirects")
    ),
    *(
        (name, "ignored", LAUNCH)
        for name in ("distributed-backend", "distributed-timeout-*", "tee")
    ),
    *((name, "ignored", FILES) for name in ("*data-path", "data-cache-path", "split", "mock-data")),
    *(
        (name, "ignored", FILES)
        for name in ("vocab-file", "merge-file", "tokenizer-*", "load", "save")
    ),
    *(
        (name, "ignored", FILES)
        for name in ("save-interval", "ckpt-*", "dist-ckpt-*", "use-dist-ckpt")
    ),
    *((name, "ignored", FILES) for name in ("no-load-*", "no-save-*", "finetune", "async-save")),
    *(
        (name, "ignored", FILES)
        for name in ("*-interval", "dataloader-type", "num-workers", "exit-*")
    ),
    *((name, "ignored", FILES) for name in ("use-checkpoint-args", "auto-detect-ckpt-format")),
    *(
        (name, "ignored", FILES)
        for name in ("pretrained-checkpoint", "num-dataset-builder-threads")
    ),
    *(
        (name, "ignored", LOG)
        for name in ("log-*", "tensorboard-*", "wandb-*", "timing-*", "profile*")
    ),
    *(
        (name, "ignored", LOG)
        for name in ("no-barrier-with-level-1-timing", "record-memory-history")
    ),
    *((name, "ignored", "see [eval]") for name in ("eval-*", "test-mode", "skip-train")),
    ("fp8-*", "different", LOW),
    ("fp4-*", "different", LOW),
    ("fp8", "different", LOW),
    (
        "reset-position-ids",
        "different",
        "positions start again in each document; data.packing does it",
    ),
    ("reset-attention-mask", "different", "documents do not see each other; data.packing does it"),
    ("eod-mask-loss", "different", "the end of a document has no loss there"),
    ("attention-softmax-in-fp32", "ignored", KNOB),
    ("apply-query-key-layer-scaling", "ignored", KNOB),
    ("moe-*", "ignored", "a setting of experts with no word here"),
    ("lr-*", "ignored", "a course of the learning rate that plait has not"),
    ("loss-scale*", "ignored", "the dynamic loss scale of plait has its own rhythm"),
    ("initial-loss-scale", "ignored", "the dynamic loss scale of plait has its own rhythm"),
    ("min-loss-scale", "ignored", "the dynamic loss scale of plait has its own rhythm"),
    ("hysteresis", "ignored", "the dynamic loss scale of plait has its own rhythm"),
    ("accumulate-allreduce-grads-in-fp32", "ignored", "plait always does"),
    ("main-*-dtype", "ignored", KNOB),
    ("exp-avg*-dtype", "ignored", KNOB),
    ("grad-reduce-in-bf16", "different", "gradients are added up in bf16 there, here in float32"),
    ("decoder-first-pipeline-num-layers", "different", "write plan.counts"),
    ("decoder-last-pipeline-num-layers", "different", "write plan.counts"),
    ("account-for-*-in-pipeline-split", "different", "plait balances stages by work"),
    ("pipeline-model-parallel-layout", "different", "write plan.counts"),
    ("microbatch-group-size-per-virtual-pipeline-stage", "ignored", KNOB),
    ("use-tp-pp-dp-mapping", "ignored", KNOB),
    ("*-init-method-*", "different", "initial values are those of plait's models"),
    (
        "init-method-std",
        "different",
        "write model.initializer_range; output layers are scaled there",
    ),
    (
        "make-vocab-size-divisible-by",
        "different",
        "the vocabulary is padded there; here it is exact",
    ),
    ("attention-backend", "ignored", KNOB),
    ("transformer-impl", "ignored", KNOB),
    ("recompute-*", "ignored", KNOB),
    ("distribute-saved-activations", "ignored", KNOB),
    ("cpu-offloading*", "ignored", "activations stay on the device in plait"),
    ("optimizer-*", "ignored", KNOB),
    *(
        (name, "ignored", KNOB)
        for name in ("use-mcore-models", "use-flash-attn", "*-fusion", "no-async-*")
    ),
    *(
        (name, "ignored", KNOB)
        for name in ("overlap-*", "no-overlap-*", "tp-comm-*", "ddp-*", "empty-*")
    ),
    *(
        (name, "ignored", KNOB)
        for name in ("manual-gc*", "cross-entropy-*", "check-*", "no-check-*")
    ),
    *(
        (name, "ignored", KNOB)
        for name in ("enable-cuda-graph", "cuda-graph-*", "external-cuda-graph")
    ),
    *(
        (name, "ignored", KNOB)
        for name in ("use-*", "no-*", "delay-*", "align-*", "defer-*", "enable-*")
    ),
    *(
        (name, "ignored", KNOB)
        for name in ("disable-*", "deterministic-mode", "bias-*", "nccl-*", "gradient-*")
    ),
)
