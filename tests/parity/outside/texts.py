"""Batches of texts, divided over the ranks by the script."""

from tests.parity import lists_of_samples
from tests.parity.outside import lists

equal_data = lists.equal_data
prepare = lists.prepare
train = lists.train
train_step = lists.train_step


def make():
    return lists_of_samples.texts(), lists.batches("texts"), lists.loss
