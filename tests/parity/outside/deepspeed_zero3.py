"""DeepSpeed with ZeRO 3."""

from tests.parity.outside import deepspeed_zero

make = deepspeed_zero.make
train_step = deepspeed_zero.train_step
scaled_once_more = deepspeed_zero.scaled_once_more


def prepare(model):
    return deepspeed_zero.prepare(model, stage=3)
