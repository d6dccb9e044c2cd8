"""Optimizers that need whole tensors, as Shampoo and SOAP do, where each rank has parts of them.

One owner of a tensor keeps the optimizer's whole state of it. It gets the values and gradients of
all parts, and makes the step of the user's own optimizer. Then it sends the new values back. A
tensor that lies whole on a rank stays there (`plait.engine.whole`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from plait.engine.group_counts import GroupCounts, rates_of, set_rates
from plait.engine.state.trees import flat, grown
from plait.engine.whole import SharedUnits, WholeMatrices
from plait.errors import OptimizerError
from plait.mesh.boxes import Box
from plait.mesh.matrices import MatrixPlace
from plait.mesh.units import UnitPart
from plait.models.parameters import Parameters
from plait.parallel.data import has_modes
from plait.plan import Plan
from plait.plan.facts import STRATEGIES

STATE = "whole."
"""How the names of an owner's state begin in a checkpoint: `whole.<unit>.state.<key>`."""
MakeOptimizer = Callable[[Parameters], torch.optim.Optimizer]


class WholeTensors:
    """Declares that an optimizer needs whole tensors, such as Shampoo or SOAP.

    Under ZeRO, tensor and expert axes its parameters are then whole all the same. Each has one
    owner, which keeps the optimizer's state of it. So results are those of one device. Values and
    gradients travel to the owner, and new values back, in two all-to-alls a step.

    Source: owners as in Distributed Shampoo (Shi et al. 2023, arXiv 2309.06497).
    """

    needs_whole = True
    keeps_state_whole = True

    def __init__(
        self,
        make_optimizer: MakeOptimizer,
        *,
        heads: Mapping[str, int] | None = None,
        experts: Sequence[str] = (),
    ) -> None:
        """Take the function that makes the optimizer, and the names of tensors that are units.

        `heads` maps patterns of names to a number of heads. A weight [heads * features, inputs] of
        such a name is one matrix [features, inputs] a head. A tensor [experts, rows, columns]
        whose name fits one of `experts` is one matrix [rows, columns] an expert. A head or an
        expert that lies on one rank does not travel. `*` stands for any characters.

        `make_optimizer(params)` gets whole parameters with names, as `name[3]` of a head or expert.

        Raises:
            OptimizerError: a number of heads is no positive whole number.
        """
        for pattern, count in (heads or {}).items():
            if not isinstance(count, int) or count < 1:
                raise OptimizerError(
                    f"heads['{pattern}'] = {count!r} is no number of heads; give one from 1 on"
                )
        self._make = make_optimizer
        self._heads = dict(heads or {})
        self._experts = tuple(experts)

    def __call__(self, params: Iterable[nn.Parameter]) -> WholeOptimizer:
        """The optimizer of the parts that a rank has. Collective where ranks hold parts."""
        if not isinstance(params, Parameters):
            given = list(params)
            params = Parameters([(f"parameter {at}", one) for at, one in enumerate(given)])
        return WholeOptimizer(params, self._make, self._count)

    def _count(self, name: str, shape: tuple[int, ...]) -> int:
        if shape and any(fnmatchcase(name, pattern) for pattern in self._experts):
            return shape[0]
        fits = (count for pattern, count in self._heads.items() if fnmatchcase(name, pattern))
        return next(fits, 1)


class WholeOptimizer(torch.optim.Optimizer):
    """Steps the user's optimizer with whole parameters, and writes the parts of this rank.

    Its `state` has the user's optimizer's state of the tensors that this rank computes with. It is
    by part, and each number and tensor has a name of its own.

    Attributes:
        inner: the user's optimizer.
    """

    def __init__(
        self, params: Parameters, make: MakeOptimizer, count_of: Callable[..., int]
    ) -> None:
        """Make the user's optimizer of the tensors that this rank computes with. Collective.

        Raises:
            OptimizerError: a tensor is a part that no rank can make whole, or has no such units.
        """
        super().__init__(list(params), {"lr": 1.0})  # a factor on the inner rates
        self._tensors = dict(params.named())
        try:
            self._units = _units(params, count_of)
        except ValueError as error:
            raise OptimizerError(f"an optimizer of whole tensors: {error}") from error
        self._computed = {
            name: _empty(part, self._tensors[part.tensor])
            for name, part in self._units.parts.items()
            if self._units.is_computed(name)
        }
        named = list(self._computed.items()) or [("nothing", nn.Parameter(torch.zeros(0)))]
        self.inner = _checked(make(Parameters(named)), named)
        self._rates = rates_of(self.inner)
        self._counts = GroupCounts(self.inner, has_schedule=True)  # the outer group's rate is kept
        self._units_of: dict[int, list[tuple[str, UnitPart]]] = {}
        for name, part in self._units.parts.items():
            self._units_of.setdefault(id(self._tensors[part.tensor]), []).append((name, part))
        self._release()
        self._list_state()

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]  # no closure here
        """Update every tensor. Collective where ranks hold parts; a closure is not called."""
        if not self.state:  # the caller has cleared it
            self.inner.state.clear()
        set_rates(self.inner, self._rates, self.param_groups[0]["lr"])
        sent = {name: both for name, both in self._parts() if self._units.is_split(name)}
        travel = self._units.travel
        wholes = {} if travel is None else travel.gathered(sent, rows=2)
        local = {name: both for name, both in self._parts() if not self._units.is_split(name)}
        for name, (value, grad) in (*wholes.items(), *local.items()):
            param = self._computed[name]
            shape = _shape(self._units.parts[name])
            param.data = value.view(shape)
            param.grad = grad.view(shape)
        with torch.enable_grad():
            self._counts.step()
        updated = {name: self._computed[name].detach().reshape(-1) for name in (*wholes, *local)}
        results = {name: updated[name] for name in local}
        results |= {} if travel is None else travel.scattered(sent, updated)
        for name, values in results.items():
            self._values(self._units.parts[name]).copy_(values)
        self._release()
        self._list_state()

    @property
    def shares(self) -> bool:
        """Whether ranks agreed on owners; else each has all tensors whole."""
        return self._units.shares

    def is_saved(self, param: Tensor, key: str) -> bool:
        """Whether this rank saves a key of the state of a part [...], where ranks agreed
        on owners.
        """
        unit = int(key.removeprefix(STATE).partition(".")[0])
        own = self._units_of[id(param)]
        return any(part.index == unit and self._units.is_saved(name) for name, part in own)

    def take(self, param: Tensor, read: Callable[[str], Tensor], keys: Iterable[str]) -> None:
        """Take the state of a part [...] from a checkpoint: `read` gives the tensor of one of
        `keys`.
        """
        names = list(keys)
        for name, part in self._units_of.get(id(param), []):
            if name not in self._computed:
                continue
            prefix = f"{STATE}{part.index}."
            own = [key for key in names if key.startswith(prefix)]
            tree = grown({key.removeprefix(prefix): read(key).to(param.device) for key in own})
            inner = self._computed[name]
            self._counts.take(inner, tree.get("group", {}))
            if "state" in tree:
                self.inner.state[inner] = tree["state"]
            else:
                self.inner.state.pop(inner, None)
        self._list_state()

    def _parts(self) -> Iterator[tuple[str, Tensor]]:
        """The values and gradients [2, elements] of each unit that has some, by name."""
        for name, part in self._units.parts.items():
            grad = self._tensors[part.tensor].grad
            if grad is not None:
                values = self._values(part)
                yield name, torch.stack([values, grad.reshape(-1)[part.span].to(values.dtype)])

    def _values(self, part: UnitPart) -> Tensor:
        """The elements of a unit in this rank's part of its tensor."""
        return self._tensors[part.tensor].detach().view(-1)[part.span]

    def _release(self) -> None:
        """Let go of whole values and gradients, which live during a step alone."""
        for param in self._computed.values():
            param.data = param.data.new_empty(0)
            param.grad = None

    def _list_state(self) -> None:
        """Bring `state` up to date."""
        self.state.clear()
        for name, inner in self._computed.items():
            part = self._units.parts[name]
            kept = self.inner.state.get(inner)
            if kept:
                tree = {"state": kept, "group": self._counts.of(inner)}
                own = self.state[self._tensors[part.tensor]]
                own.update({f"{STATE}{part.index}.{key}": one for key, one in flat(tree).items()})


def check_state_whole(optimizer: object, plan: Plan) -> None:
    """Refuse an optimizer with whole states where no rank can keep them.

    Errors: `OptimizerError`.
    """
    facts = STRATEGIES[plan.dp.strategy]
    if getattr(optimizer, "keeps_state_whole", False) and (
        plan.dp.offload or not facts.synchronous
    ):
        raise OptimizerError(
            f"an optimizer of whole tensors cannot run under {plan}, whose ranks update parts or "
            f"copies of their own; choose dp{plan.dp.size}:zero1 without offload"
        )


def _units(params: Parameters, count_of: Callable[..., int]) -> SharedUnits:
    """The units of a rank's parameters, shared with others where they hold parts."""
    if isinstance(params.whole, WholeMatrices):
        return params.whole.units(count_of)
    places = []
    for name, param in params.named():
        shape = tuple(param.shape)
        if params.whole_shape(name, param) != shape:
            raise ValueError(f"'{name}' is here in part, and no owner can have it whole")
        places.append(MatrixPlace(name, shape, Box.whole(shape), 0, param.numel()))
    return SharedUnits(None, [places], count_of)


def _shape(part: UnitPart) -> tuple[int, ...]:
    """The shape of a unit; one row of a stack has no dimension of rows."""
    shape = part.place.shape
    is_of_stack = part.place.name != part.tensor and shape[0] == 1 and len(shape) > 1
    return shape[1:] if is_of_stack else shape


def _empty(part: UnitPart, tensor: Tensor) -> nn.Parameter:
    """A parameter for a unit, of zeros while optimizers look at its shape."""
    value = nn.Parameter(torch.zeros(_shape(part), dtype=tensor.dtype, device=tensor.device))
    vars(value).update(vars(tensor))
    return value


def _checked(optimizer: object, named: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """The user's optimizer; an error where it is none, or leaves parameters out."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise OptimizerError(
            "the function of plait.WholeTensors must return a torch.optim.Optimizer; it returned "
            f"a {type(optimizer).__name__}"
        )
    if has_modes(optimizer):
        raise OptimizerError(
            f"{type(optimizer).__name__} has train() and eval(), which exchange the weights, and "
            "an owner of whole tensors would exchange its own alone; use it without "
            "plait.WholeTensors where it is elementwise"
        )
    taken = {id(param) for group in optimizer.param_groups for param in group["params"]}
    missing = [name for name, param in named if id(param) not in taken]
    if missing:
        raise OptimizerError(
            f"the {type(optimizer).__name__} leaves out '{missing[0]}' of the parameters that it "
            "was given; put each into one of its groups"
        )
    return optimizer
