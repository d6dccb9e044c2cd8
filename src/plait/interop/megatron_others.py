"""Options of Megatron-LM for other models, other training and its own services, with the reason.

The options of training a language model itself are in `megatron_options`.
"""

from __future__ import annotations

from typing import Final

from plait.interop.source import Kind

KNOB: Final = "a setting of Megatron-LM's own implementation; results do not depend on it"
MODEL: Final = "the model is another one than gpt or llama; use name = 'hf'"

GROUPS: Final[tuple[tuple[Kind, str, str], ...]] = (
    (
        "different",
        MODEL,
        "bert-* biencoder-* ict-* dino-* vision-* swin-* mask-* num-classes num-channels "
        "head-lr-mult classes-fraction data-per-class-fraction iter-per-epoch embedding-path "
        "indexer-* retriever-* query-in-block-prob encoder-num-layers decoder-num-layers linear-* "
        "dsa-* gdp-* mhc-* mrope-* experimental-attention-* attention-output-gate yarn-* "
        "relative-attention-* window-* softmax-type glu-linear-offset activation-func-* "
        "apply-residual-* layernorm-zero-* add-bias-linear add-qkv-bias squared-relu openai-gelu "
        "quick-geglu onnx-safe mup-* cache-mla-latents freeze-* pixel-shuffle clone-scatter-* "
        "num-speculative-tokens short-seq-prob sample-rate encoder-seq-length "
        "init-method-xavier-uniform perform-initialization data-parallel-random-init",
    ),
    (
        "different",
        "reinforcement learning, which is another kind of training than plait's",
        "rl-* grpo-* langrl-* perform-rl-step refit-method",
    ),
    (
        "different",
        "learning from another model's outputs, another kind of training than plait's",
        "logits-load-* kd-*",
    ),
    (
        "different",
        "products in 8 bits or fewer round there; plait computes in the plan's precision",
        "fp4 te-precision-config-file kitchen-* first-last-layers-bf16 num-layers-at-*-in-bf16 "
        "fp16-lm-cross-entropy",
    ),
    (
        "different",
        "a setting of that optimizer there",
        "muon-* lion-* apply-wd-to-qk-layernorm adaptive-* soap-*",
    ),
    (
        "different",
        "the course is another one there; plait's are constant, linear and cosine",
        "wd-incr-steps wsd-* warmup decoupled-min-lr step-batch-size-schedule "
        "phase-transition-iterations decrease-batch-size-if-needed iterations-to-skip",
    ),
    (
        "different",
        "samples are made in another way there; see [data]",
        "fim-* sft sft-* vocab-extra-ids pad-vocab-size dataloader-inter-document-masking",
    ),
    (
        "different",
        "weights are split a second time there, beside tensor parallelism",
        "*tensor-parallel-num-weight-shards gtp-* outer-dp-sharding-strategy",
    ),
    (
        "different",
        "an option of older versions; write its successor",
        "batch-size model-parallel-size checkpoint-activations yaml-cfg",
    ),
    (
        "different",
        "activations move to the host there; plait keeps or recomputes them",
        "fine-grained-* offload-modules min-offloaded-* delta-offload-* activation-offload-*",
    ),
    (
        "ignored",
        "see [recovery]",
        "inprocess-* straggler-* run-workload-* calc-ft-timeouts ft-* fault-injector-* "
        "flight-recorder-* adlr-autoresume replication* error-injection-* result-rejected-*",
    ),
    (
        "ignored",
        "output of Megatron-LM's own logging; plait writes metrics.jsonl and trace.json",
        "one-logger-* app-tag-* otel-* pytorch-profiler-* memory-snapshot-path record-shapes "
        "nvtx-ranges barrier-with-* config-logger-dir dump-* logits-save-* verify-integrity",
    ),
    (
        "ignored",
        "files of Megatron-LM's own format; data comes by [data], checkpoints by --resume",
        "non-persistent-* fully-parallel-* async-* strict-* load-main-params-* save-tokenizer-* "
        "distrib-optim-* *data-args-path per-* dataloader-* object-storage-* mid-level-* "
        "chat-template special-tokens null-tokenizer-* trust-remote-code allow-ambiguous-*",
    ),
    (
        "ignored",
        "see [eval]",
        "start-eval-at-iter full-validation multiple-validation-sets validation-set-names",
    ),
    (
        "ignored",
        "an option of inference or of another program; plait trains",
        "decode-only-* flash-decode mlp-chunks-* batch-invariant-* out-seq-length prompt-* "
        "num-partitions partition-id gt-path input-*",
    ),
    (
        "ignored",
        "the sizes of the model are not all there, or it has no such part",
        "ffn-hidden-size normalization attention-dropout hidden-dropout position-embedding-type "
        "swiglu group-query-attention num-query-groups num-experts num-moe-experts vocab-size "
        "padded-vocab-size layernorm-epsilon norm-epsilon",
    ),
    (
        "ignored",
        "no effect without a global and a micro-batch size",
        "calculate-per-token-loss",
    ),
    (
        "ignored",
        KNOB,
        "*fsdp* create-all-gather-group suggested-communication-unit-size keep-fp8-* "
        "fake-process-group lazy-mpu-init high-priority-* sharp-enabled-group reuse-grad-buf-* "
        "pipeline-model-parallel-comm-backend hierarchical-context-* max-seqlen-per-* "
        "ep-overlap-* wgrad-deferral-limit microbatch-group-size-* flash-attention-version "
        "fused-* te-* fp32-residual-connection symmetric-ar-type init-model-with-meta-device",
    ),
)


def _rows() -> list[tuple[str, Kind, str]]:
    """One row a pattern, in the order of the groups."""
    rows: list[tuple[str, Kind, str]] = []
    for kind, reason, patterns in GROUPS:
        rows += [(pattern, kind, reason) for pattern in patterns.split()]
    return rows


OTHERS: Final = tuple(_rows())
"""A pattern of names, its kind and the reason."""
