"""Refusals of models that a pipeline cannot cut where the stages end."""

from __future__ import annotations

from collections.abc import Sequence

from plait.errors import ModelError
from plait.parallel.pipeline.dataflow import Flow
from plait.parallel.pipeline.watch import IN_OBJECT, UNRETURNED


def check_draws(flow: Flow, stage_of: Sequence[int]) -> None:
    """Raise for a random number of the glue that a later stage would draw another time.

    Glue before a stage's first call runs there again, from the same seed, without the draws of
    earlier modules. Every rank checks every stage.

    Raises:
        ModelError: there is such a number.
    """
    if not flow.drawing:
        return
    first_calls = {stage: list(stage_of).index(stage) for stage in stage_of}
    holders = (*stage_of, max(stage_of))
    for draws, stage in zip(flow.draws, holders, strict=True):
        earlier = [before for before in draws if before < first_calls[stage]]
        drawn = [call for call in sorted(flow.drawing) if earlier and call < max(earlier)]
        if drawn:
            raise ModelError(
                "the forward of the model draws random numbers between its modules, after "
                f"'{flow.calls[drawn[0]]}' has drawn some (dropout), and uses them on "
                "several stages of the pipeline; put the draw into a module of its own"
            )


def check_states(flow: Flow, stage_of: Sequence[int]) -> None:
    """Raise for a state between the modules that a stage reads and cannot keep up to date.

    A stage runs the code between the modules as far as its own last call. Every rank checks every
    stage.

    Raises:
        ModelError: there is such a state.
    """
    last_calls = {stage: call for call, stage in enumerate(stage_of)}
    for state in flow.states:
        for call, stage in enumerate(stage_of):
            if state.place not in flow.reads[call]:
                continue
            is_written = (state.written_after or 0) <= last_calls[stage] + 1
            if not is_written or any(stage_of[one.call] > stage for one in state.results):
                name = ".".join(filter(None, state.place))
                raise ModelError(
                    f"the forward of the model reads '{name}' for '{flow.calls[call]}' and writes "
                    "it later between its modules, where that stage of the pipeline has ended; "
                    "read and write it inside one block"
                )


def check_objects(flow: Flow, stage_of: Sequence[int]) -> None:
    """Raise for a tensor that a later stage needs and no pipeline can put in its place.

    A call returns it inside an object, or leaves it outside its result.

    Tensors pass between stages alone, in lists, in tuples and in dictionaries, and in attributes.
    Every rank checks every stage.

    Raises:
        ModelError: there is such a tensor.
    """
    for boundary in range(max(stage_of)):
        for result in flow.crossing(stage_of, boundary):
            if result.leaf == IN_OBJECT:
                raise ModelError(
                    f"'{flow.calls[result.call]}' returns an object with tensors that a later "
                    "stage of the pipeline needs; return tensors in a tuple or a dictionary, or "
                    "register the class with torch.utils._pytree.register_pytree_node"
                )
            if result.leaf == UNRETURNED:
                raise ModelError(
                    f"'{flow.calls[result.call]}' leaves a tensor outside its result, such as in a "
                    "list that it got, by a hook, in a buffer that it writes into or in an "
                    "attribute with values that are no tensors, and a later stage of the pipeline "
                    "reads it there; return the tensor, keep it in an attribute of the module that "
                    "holds tensors alone, give each block a cache of its own or none, or cut "
                    "elsewhere (counts, splits)"
                )
