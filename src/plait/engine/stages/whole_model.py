"""A model whose stages lie on several ranks is called by the schedule alone.

A rank has the numbers of its own stages. Elsewhere parameters are zeros in the right shape. A call
of the whole model, its `state_dict`, or an average of its weights would give plausible nonsense.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from plait.engine.stages.written_after_read import WrittenAfterRead
from plait.errors import ModelError
from plait.parallel.data.absent import Absent, Wanted, become, same_numbers, writes
from plait.parallel.pipeline.elsewhere import take_back

STATE = (
    "engine.save(path) and engine.save_pretrained(path) write all parameters, and "
    "engine.local_parameters() has those of this rank"
)
"""The ways to the parameters of a model that is cut."""


_CUT: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""The modules of models that are cut into stages."""


class OfAnotherStage(Absent):
    """A parameter [...] of a stage that is not on this rank.

    The forward's code between its calls runs on each rank. What it writes into such a parameter is
    left to the rank that has it.
    """

    where = "on another rank of pp"
    is_running: Callable[[], bool]
    """Whether the schedule runs a stage."""

    alias: type[Tensor]
    """The class of what `data` and `detach` of a parameter give."""

    @classmethod
    def of(
        cls, kind: type[nn.Parameter], wanted: Wanted, is_running: Callable[[], bool]
    ) -> type[nn.Parameter]:
        """The class of a parameter of class `kind` on a rank without its stage."""
        running = staticmethod(is_running)
        alias = cls.kind(Tensor, wanted, is_running=running)
        return cls.kind(kind, wanted, is_running=running, alias=alias)

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        kinds: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Leave out writes into such a parameter while a stage runs."""
        first = args[0] if args else None
        if function.__name__.startswith("_foreach_") and writes(function):
            here = [place for place, one in enumerate(args[0]) if not _is_left_out(one)]
            if len(here) < len(args[0]):
                rest = [_at(one, here) if isinstance(one, list | tuple) else one for one in args]
                return function(*rest, **(kwargs or {})) if here else None
        if _is_left_out(first):
            if writes(function):
                return first
            if same_numbers(function):
                kind = getattr(type(first), "alias", type(first))
                with torch._C.DisableTorchFunctionSubclass():
                    return function(*args, **(kwargs or {})).as_subclass(kind)
        return super().__torch_function__(function, kinds, args, kwargs)


def _is_left_out(value: object) -> bool:
    """Whether a value is a parameter of another rank's stage, and a stage runs here."""
    return isinstance(value, OfAnotherStage) and type(value).is_running()


def _at(values: Sequence[Any], places: Sequence[int]) -> list[Any]:
    return [values[place] for place in places]


class WholeModelGuard:
    """Hooks of a model that refuse what needs the numbers of all stages."""

    def __init__(
        self, num_stages: int, is_running: Callable[[], bool], reads: WrittenAfterRead
    ) -> None:
        """`is_running` tells whether the schedule runs one of the stages."""
        self._num_stages = num_stages
        self._is_running = is_running
        self._reads = reads

    def before_forward(self, module: nn.Module, args: object) -> None:
        """Refuse a call that the schedule does not make. Errors: `ModelError`."""
        if not self._is_running():
            raise self._error(
                module,
                "called",
                "engine.step(batch) trains it, engine.evaluate(batch) has its loss, and "
                "engine.measure(batch, [function]) gives functions of its outputs",
            )

    def before_read(self, name: str, place: str, param: Tensor) -> None:
        """Refuse to give zeros for the numbers of a parameter [...] of another rank.

        Code between the calls of a forward may read them, as what it makes is not used. Writes of
        that into parameters of this rank are refused later. Errors: `ModelError`.
        """
        if not self._is_running():
            raise ModelError(
                f"the parameter '{name}' {list(param.shape)} is in {place}, and this rank has no "
                f"numbers of it to read, to copy or to change; {STATE}; a block whose forward "
                "reads it belongs in that stage (plait.Cutting)"
            )
        self._reads.read(name, place, param)

    def before_state_dict(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        """Refuse to copy zeros for numbers; with `keep_vars` names and shapes are asked for.

        Errors: `ModelError`.
        """
        if not keep_vars:
            raise self._error(
                module,
                "read by state_dict()",
                STATE,
            )

    def __deepcopy__(self, memo: object) -> WholeModelGuard:
        """A copy of the model is cut as the model is."""
        return self

    def __reduce__(self) -> NoReturn:
        """A pickle of the model, as `torch.save(model, path)` makes, is refused."""
        raise ModelError(
            f"a model cannot be pickled on one rank: a pipeline has cut it into {self._num_stages} "
            f"stages, and a rank has the numbers of its own alone; {STATE}"
        )

    def _error(self, module: nn.Module, what: str, cure: str) -> ModelError:
        return ModelError(
            f"the {type(module).__name__} cannot be {what} on one rank: a pipeline has cut it into "
            f"{self._num_stages} stages, and a rank has the numbers of its own alone; {cure}"
        )


def refuse_zeros(model: nn.Module) -> NoReturn:
    """Raise `ModelError` for a model that an earlier engine cut, without values since."""
    raise ModelError(
        f"the {type(model).__name__} was cut into stages by an engine that was built of it before, "
        "and has zeros for the parameters of other ranks; call engine.load(path) with what "
        "engine.save(path) of the first has written, before a step or an evaluation, or build an "
        "engine of a new model"
    )


def guard(
    model: nn.Module,
    num_stages: int,
    is_running: Callable[[], bool],
    elsewhere: Mapping[str, str],
    reads: WrittenAfterRead,
) -> None:
    """Let a model refuse calls and copies, if it has several stages.

    `elsewhere` has the places of the parameters that other ranks hold, by name. `reads` is told
    which of them a forward reads.
    """
    if num_stages > 1:
        guarding = WholeModelGuard(num_stages, is_running, reads)
        _CUT.update((module, True) for module in model.modules())
        model.register_forward_pre_hook(guarding.before_forward)
        model.register_state_dict_pre_hook(guarding.before_state_dict)
        for name, place in elsewhere.items():
            param = model.get_parameter(name)
            wanted = partial(guarding.before_read, name, place)
            become(param, OfAnotherStage.of(type(param), wanted, is_running))


def end_guard(model: nn.Module) -> bool:
    """Whether an earlier engine cut a model, which may be called and changed from now on.

    Its values are not restored, and a warning says so.
    """
    take_back(model)
    for param in model.parameters():
        if isinstance(param, OfAnotherStage):
            become(param, param.own)
    is_cut = any(module in _CUT for module in model.modules())
    for module in model.modules():
        _CUT.pop(module, None)
    for hooks in (model._forward_pre_hooks, model._state_dict_pre_hooks):
        for key, hook in list(hooks.items()):
            if isinstance(getattr(hook, "__self__", None), WholeModelGuard):
                del hooks[key]
                is_cut = True
    if is_cut:
        warnings.warn(
            f"the {type(model).__name__} was cut into stages by an earlier engine, and has zeros "
            "for the parameters of other ranks; build an engine of a new model, or call "
            "engine.load(path) next",
            stacklevel=2,
        )
    return is_cut
