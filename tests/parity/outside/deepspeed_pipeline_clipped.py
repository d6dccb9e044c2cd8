"""DeepSpeed's pipeline with clipping: 0.19.8 clips every stage by the norm of the first alone."""

from tests.parity.outside import deepspeed_pipeline

make = deepspeed_pipeline.make
train_step = deepspeed_pipeline.train_step


def prepare(model):
    return deepspeed_pipeline.prepare(model, clipping=0.3)
