"""A unit: the part of a model whose parameters are used together and travel together.

Each repeated block is a unit; what stands before the blocks is one, and what stands after them
another. So the head's gradients are reduced while the blocks still run backward. Under ZeRO-3 only
a block or two are ever whole.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from torch import nn

from plait.patterns import expression


@dataclass
class Unit:
    """Parameters by name, and the modules that use them (a block, or single modules around the
    blocks).
    """

    name: str
    is_block: bool = False
    params: list[tuple[str, nn.Parameter]] = field(default_factory=list)
    modules: list[nn.Module] = field(default_factory=list)
    keep: bool = False
    """Whether ZeRO-3 keeps it whole until the step ends, once it is gathered."""
    holders: list[nn.Module] = field(default_factory=list)
    """Modules that hold its parameters and are not called here: other code takes them by hand."""

    @property
    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters that want a gradient."""
        return [(name, param) for name, param in self.params if param.requires_grad]

    @property
    def frozen(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters that do not."""
        return [(name, param) for name, param in self.params if not param.requires_grad]


def match_blocks(model: nn.Module, pattern: str) -> list[str]:
    """Names of the modules that match `pattern` (`*` is one name between dots), in the model's
    order.

    >>> match_blocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "*")
    ['0', '1']
    """
    regex = expression(pattern)
    return [name for name, _ in model.named_modules() if regex.fullmatch(name)]


def find_blocks(model: nn.Module) -> list[str]:
    """Names of the repeated blocks of a model that does not name them: the entries of its outermost
    module lists.

    Falls back to the children of a `Sequential`, and to nothing where there is no list at all.
    """
    blocks: list[str] = []
    for name, module in model.named_modules():
        if any(f"{name}.".startswith(f"{block}.") for block in blocks):
            continue
        if isinstance(module, nn.ModuleList) or (
            isinstance(module, nn.Sequential) and len(module) > 1
        ):
            prefix = f"{name}." if name else ""
            for child, entry in module.named_children():
                blocks.extend(_called(f"{prefix}{child}", entry))
    return [block for block in blocks if any(True for _ in model.get_submodule(block).parameters())]


def _called(name: str, module: nn.Module) -> list[str]:
    """A module, or those in it that are called where it is only a table of them."""
    if type(module).forward is not nn.Module.forward:
        return [name]
    found: list[str] = []
    for key, child in module.named_children():
        found += _called(f"{name}.{key}", child)
    return found


def split_units(model: nn.Module, blocks: Sequence[str], kept: Collection[str] = ()) -> list[Unit]:
    """The units of a model in the order of its parameters; `kept` are names of blocks.

    A parameter that several modules share belongs to the unit that comes first.
    """
    module_of_block = {model.get_submodule(name): name for name in blocks}
    inside = {child for block in module_of_block for child in block.modules()}
    units: list[Unit] = []
    seen: set[int] = set()
    for name, module in model.named_modules():
        if module in module_of_block:
            block = module_of_block[module]
            unit = Unit(block, is_block=True, modules=[module], keep=block in kept)
            units.append(unit)
            named = module.named_parameters(prefix=name)
        elif module in inside or not any(True for _ in module.parameters(recurse=False)):
            continue
        else:
            if not units or units[-1].is_block:
                units.append(Unit(f"around {name or 'the model'}"))
            unit = units[-1]
            unit.modules.append(module)
            named = module.named_parameters(prefix=name, recurse=False)
        for param_name, param in named:
            if id(param) not in seen:
                seen.add(id(param))
                unit.params.append((param_name, param))
    return units
