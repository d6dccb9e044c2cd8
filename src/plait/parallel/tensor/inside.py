"""Roles of what lies between a column and its row, and of what every rank computes alike.

Between a column and its row each rank has a part of the sum that a gradient is. A layer there whose
weights are whole on every rank sums its own gradients at the end of the step. One outside sums the
gradient of its output, once.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Protocol

from torch import Tensor, nn

from plait.comm import Axis
from plait.comm.functional import transition
from plait.divided_views import DROPOUT, divide_views, is_word, positions_of
from plait.errors import ModelError
from plait.forwards import computes_by_heads
from plait.mesh.layouts import INVARIANT, PARTIAL, REPLICATED
from plait.parallel.tensor import adapters, layers
from plait.parallel.tensor.divided_dropout import divide_dropout
from plait.parallel.tensor.dropout import Dropout
from plait.parallel.tensor.group import ForwardContext, TensorGroup
from plait.parallel.tensor.mode import Mode
from plait.parallel.tensor.placement import Cut, Placement
from plait.parallel.tensor.roles import divides
from plait.parallel.tensor.split_heads import SplitAttention


class Splitter(Protocol):
    """The maker of local parameters."""

    context: ForwardContext

    def localised(self, module: nn.Module, features: Cut, partial: Cut) -> nn.Module:
        """A copy of a module with local parameters, their last dimension cut."""

    def give(self, module: nn.Module, original: nn.Module, cuts: Mapping[str, Placement]) -> None:
        """Register the local parameters of a module."""

    def alike(self, module: nn.Module, partial: Cut) -> dict[str, Placement]:
        """Placements of parameters that every rank has whole."""

    def place(
        self,
        param: Tensor,
        cuts: list[Cut],
        partial: Cut,
        fused: dict[int, int] | None = None,
    ) -> Placement:
        """The placement of a whole parameter of any shape, whose dimension d `cuts[d]` cuts.

        `fused`: of how many parts a dimension is. `partial`: where gradients are partial sums.
        """

    def norm_in_parts(self, name: str, module: nn.Module, axis: Axis, different: Cut) -> nn.Module:
        """A norm of features that are cut over an axis."""


class InsideRoles:
    """One method a role."""

    def __init__(
        self, group: TensorGroup, mode: Mode, roles: Mapping[str, str], splitter: Splitter
    ) -> None:
        self._group = group
        self._mode = mode
        self._different = mode.residual.different
        self._features = mode.inner.features or group.axis("tp")
        self._roles = roles
        self._splitter = splitter

    def inner_norm(self, name: str, module: nn.Module) -> nn.Module:
        """A norm between column and row, over features that are cut."""
        return self._splitter.norm_in_parts(name, module, self._features, self._different)

    def inside(self, name: str, module: nn.Module) -> nn.Module:
        """A module between column and row that every rank computes alike.

        Its output's gradient is a part of a sum on each rank, and so are those of its parameters.
        """
        return self._splitter.localised(module, (), (self._group.axis("tp"),))

    def heads(self, name: str, module: nn.Module) -> nn.Module:
        """Torch's attention, of which each rank computes some heads; its `out_proj` is a row.

        Raises:
            ModelError: it is no such module, its keys have a width of their own, or it adds some.
                Or the ranks do not divide its heads.
        """
        size = self._features.size
        if not computes_by_heads(module, size):
            raise ModelError(
                f"'{name}' has the role heads and is a {type(module).__name__}; it must be an "
                "nn.MultiheadAttention whose keys and values have the width of its queries, "
                f"without add_bias_kv and add_zero_attn, and {size} ranks must divide its heads"
            )
        width = int(module.embed_dim)  # type: ignore[arg-type]
        fits = divides(self._mode.linear["column"], 3 * width, width, 3)
        mode = self._mode if fits or self._mode.coarse is None else self._mode.coarse
        column = mode.linear["column"]
        local = layers.shallow_copy(module, SplitAttention)
        weight = module._parameters["in_proj_weight"]
        assert isinstance(local, SplitAttention) and weight is not None
        local.bind(column, self._splitter.context)
        cuts = [column.out, column.into]
        placements = {"in_proj_weight": self._splitter.place(weight, cuts, column.partial, {0: 3})}
        if (bias := module._parameters.get("in_proj_bias")) is not None:
            of_bias: list[Cut] = [(self._features,)]
            different = column.target.different
            placements["in_proj_bias"] = self._splitter.place(bias, of_bias, different, {0: 3})
        self._splitter.give(local, module, placements)
        return local

    def spread(self, name: str, module: nn.Module) -> nn.Module:
        """A layer that computes alike, whose output goes between column and row.

        Gradients are summed there once.
        """
        features = self._features
        local = self._splitter.localised(module, (), self._different)
        local.register_forward_hook(
            lambda module, args, y: transition(y, features, INVARIANT, REPLICATED)
        )
        return local

    def share(self, name: str, module: nn.Module) -> nn.Module:
        """A module that counts heads: its numbers are divided, and parameters of heads are cut."""
        local = layers.shallow_copy(module)
        placements = self._splitter.alike(module, self._different)
        every = (self._group.axis("tp"),)
        cut_along: dict[str, int] = {}
        alike: set[str] = set()
        words = self._roles[name].split()[1:]
        for word in (one for one in words if not is_word(one)):
            key, _, where = word.partition(":")
            param = module._parameters.get(key)
            if param is None:
                _divide(local, key, self._features.size)
            elif where == "alike":
                alike.add(key)
                placements[key] = self._splitter.place(param, [()] * param.dim(), every)
            else:
                cuts: list[Cut] = [()] * param.dim()
                cut_along[key] = int(where)
                cuts[int(where)] = (self._features,)
                placements[key] = self._splitter.place(param, cuts, self._different)
        self._splitter.give(local, module, placements)
        for key, part in adapters.parts_of(module):
            matrix = key.rpartition(".")[2]
            if matrix in cut_along:
                matrix_cuts = adapters.expert_cuts(module, key, cut_along[matrix], self._features)
                self._give_matrix(local, key, part, cuts=matrix_cuts)
            else:
                partial = every if matrix in alike else self._different
                self._give_matrix(local, key, part, cuts=[(), ()], partial=partial)
        return local

    def divide_calls(self, model: nn.Module) -> None:
        """Divide the views and the dropout of all modules of a split model whose roles say it."""
        for name, role in self._roles.items():
            module = model.get_submodule(name)
            if views := positions_of(role):
                divide_views(module, views, self._features.size)
            dims = positions_of(role, DROPOUT)
            if dims and not isinstance(module, Dropout):
                divide_dropout(module, dims, self._splitter.context)

    def _give_matrix(
        self,
        local: nn.Module,
        key: str,
        part: nn.Module,
        *,
        cuts: list[Cut],
        partial: Cut | None = None,
        fused: int = 1,
    ) -> None:
        """Give experts their part of a matrix of an adapter.

        One that is whole beside cut weights has a partial sum as gradient on each rank.
        """
        if partial is None:
            partial = () if any(cuts) else (self._group.axis("tp"),)
        holder = adapters.Holder()
        weight = layers.parameters_of(part)["weight"]
        by_row = {0: fused} if cuts[0] else None
        placement = self._splitter.place(weight, cuts, partial, by_row)
        self._splitter.give(holder, part, {"weight": placement})
        adapters.give_part(local, key, holder)

    def whole(self, name: str, module: nn.Module) -> nn.Module:
        """A model whose activations between layers are whole on every rank."""
        if not module._parameters:
            return module
        return self._splitter.localised(module, (), self._different)

    def experts(self, name: str, module: nn.Module) -> nn.Module:
        """Experts that all ranks share, a part of each on every rank.

        `gate` and `up` [experts, out, in] are cut as a column, `down` as a row; `gate_up_proj` is
        gate and up in one.
        """
        tp = self._group.axis("tp")
        local = layers.shallow_copy(module)
        placements = {}
        for key, param in layers.parameters_of(module).items():
            cuts: list[Cut] = [(), (), (tp,)] if key.startswith("down") else [(), (tp,), ()]
            fused = {1: 2} if key == "gate_up_proj" else None
            placements[key] = self._splitter.place(param, cuts, (), fused)
        self._splitter.give(local, module, placements)
        for key, part in adapters.parts_of(module):
            matrix = key.rpartition(".")[2]
            dim = 2 if matrix.startswith("down") else 1
            matrix_cuts = adapters.expert_cuts(module, key, dim, tp)
            fused_rows = 2 if matrix == "gate_up_proj" else 1
            self._give_matrix(local, key, part, cuts=matrix_cuts, fused=fused_rows)
        local.register_forward_pre_hook(
            lambda _, args: (transition(args[0], tp, INVARIANT, REPLICATED), *args[1:])
        )
        local.register_forward_hook(lambda _, args, rows: transition(rows, tp, PARTIAL, INVARIANT))
        return local

    def head_norm(self, name: str, module: nn.Module) -> nn.Module:
        """A norm of each head's features, between column and row.

        Every rank has other heads or other samples.
        """
        return self._splitter.localised(module, (), (self._group.axis("tp"),))


def _divide(module: nn.Module, path: str, size: int) -> None:
    """Divide a number of a module, or of its config, which is copied first."""
    owner, _, name = path.rpartition(".")
    held = module
    if owner:
        held = copy.copy(getattr(module, owner))
        setattr(module, owner, held)
    setattr(held, name, getattr(held, name) // size)
