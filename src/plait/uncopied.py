"""The refusal of copies and pickles of what ranks have between them."""

from __future__ import annotations

from typing import NoReturn

from plait.errors import ModelError


class Uncopied:
    """An object of one rank of one world, whose copies and pickles are refused."""

    def __reduce__(self) -> NoReturn:
        """Refuse a copy or a pickle, as of a model whose modules talk to other ranks."""
        raise ModelError(
            "what talks to other ranks cannot be copied or pickled; if this is the model of an "
            "engine, whose modules hold parts of it: copy it before plait.build, or read what is "
            "trained by engine.save(path), engine.save_pretrained(path) or, on each rank for its "
            "own parts, engine.local_parameters(); an average of the weights is "
            "optimizer=plait.AveragedWeights(make_optimizer)"
        )
