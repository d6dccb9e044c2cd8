#!/bin/bash
# A script as people write it: variables, arrays, continued lines.
GPUS_PER_NODE=8
NUM_NODES=4
WORLD_SIZE=$(($GPUS_PER_NODE*$NUM_NODES))
TP=4

DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
    --master_addr localhost
)
MODEL_ARGS="
    --num-layers 24 --hidden-size 2048 --ffn-hidden-size 5504 \
    --num-attention-heads 16 --group-query-attention --num-query-groups 8 \
    --seq-length 4096 --max-position-embeddings 4096 \
    --swiglu --normalization RMSNorm --position-embedding-type rope \
    --untie-embeddings-and-output-weights --disable-bias-linear --vocab-size 32000 \
    --hidden-dropout 0 --attention-dropout 0
"
TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 128
    --train-iters 500
    --lr 1.0e-4 --min-lr 1.0e-5
    --lr-decay-style cosine
    --lr-warmup-fraction .01
    --weight-decay 0.1
    --adam-beta1 0.9 --adam-beta2 0.95
    --clip-grad 1.0
    --bf16
)
PARALLEL_ARGS=(
    --tensor-model-parallel-size ${TP}
    --sequence-parallel
    --pipeline-model-parallel-size 2
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
)
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py ${MODEL_ARGS[@]} ${TRAINING_ARGS[@]} \
    ${PARALLEL_ARGS[@]} --log-interval 10 --made-up-option 3
