"""Which modules of a model a step trains, and which its caller has left in evaluation.

A frozen batch norm, or a dropout that is off, is a module in evaluation inside a model in training.
A step keeps it so, as a plain loop would. A model that is in evaluation as a whole is trained as a
whole: `from_pretrained` gives it so.
"""

from __future__ import annotations

from torch import nn

from plait.engine.weight_modes import WeightModes


class TrainingModes:
    """The modes of a model's modules, which an evaluation between two steps leaves as they were.

    Attributes:
        weights: which weights of the optimizer are in place.
    """

    def __init__(self, model: nn.Module, weights: WeightModes) -> None:
        """Take the model, and the sets of weights of its optimizer, which go with the modes."""
        self.weights = weights
        self._model = model
        self._evaluated: list[nn.Module] = []

    def train(self) -> None:
        """Put the model in training, but for the modules that were in evaluation inside it.
        Collective where the optimizer has two sets of weights.
        """
        self.weights.train()
        if self._model.training:
            self._note()
            return
        self._model.train()
        for module in self._evaluated:
            module.training = False

    def eval(self) -> None:
        """Put the whole model in evaluation, until the next `train`. Collective as `train`."""
        self.weights.eval()
        if self._model.training:
            self._note()
        self._model.eval()

    def _note(self) -> None:
        self._evaluated = [module for module in self._model.modules() if not module.training]
