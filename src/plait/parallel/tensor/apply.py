"""`apply`: a table of roles, a model and a grid of ranks -> the model's modules replaced by their
parallel forms.

In place and under the same names, so that units, checkpoints and proofs see the parameters they
know. Works on meta models: what is made here has local shapes and no memory; values are cut from
whole ones by `Placement.cut`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from plait.comm.functional import transition
from plait.errors import ModelError, NotAvailable
from plait.mesh.layouts import INVARIANT, PARTIAL, REPLICATED, Sharded
from plait.parallel.tensor import layers
from plait.parallel.tensor.group import Run, Stream, TensorGroup
from plait.parallel.tensor.mode import LinearRule, Mode
from plait.parallel.tensor.one_d import one_d
from plait.parallel.tensor.placement import Cut, Placement, place
from plait.parallel.tensor.roles import FUSED, check_sizes, is_transposed, linear_shape, match
from plait.parallel.tensor.split import TensorSplit
from plait.parallel.tensor.three_d import three_d
from plait.parallel.tensor.two_and_half_d import two_and_half_d
from plait.parallel.tensor.two_d import two_d

MODES: dict[str, Callable[[TensorGroup], Mode]] = {
    "2d": two_d,
    "2.5d": two_and_half_d,
    "3d": three_d,
}


def apply(model: nn.Module, roles: Mapping[str, str], group: TensorGroup) -> TensorSplit:
    """Split `model` in place. Collective: it makes the axes of the mode.

    Raises:
        ModelError: the table does not fit the model, or the sizes do not divide by the grid;
        nothing is changed then.
    """
    found = match(model, roles)
    has_sequence = "embedding" in found.values()
    mode = (
        one_d(group, has_sequence=has_sequence) if group.mode == "1d" else MODES[group.mode](group)
    )
    check_sizes(model, found, mode, str(group))
    splitter = _Splitter(model, found, mode, group)
    splitter.run_all()
    has_head = "head" in found.values()
    return TensorSplit(
        group=group,
        mode=mode,
        run=splitter.run,
        roles=found,
        placements=splitter.placements_by_name(),
        originals=splitter.originals,
        outputs=mode.inner if has_head else mode.residual,
        sharded_logits=has_head,
    )


@dataclass(frozen=True)
class _Local:
    """A parameter of this rank, and where it lies in the whole."""

    param: nn.Parameter
    placement: Placement


class _Splitter:
    """Replaces the modules of one model."""

    def __init__(
        self, model: nn.Module, found: Mapping[str, str], mode: Mode, group: TensorGroup
    ) -> None:
        self._model = model
        self._found = found
        self._mode = mode
        self._group = group
        self.run = Run(mode.residual, products=group.products)
        self._local: dict[
            int, _Local
        ] = {}  # by the whole parameter, so that tied parameters stay tied
        self.originals = {
            name: module
            for name, module in model.named_modules()
            if next(module.parameters(recurse=False), None) is not None
        }
        self._regions = [name for name, role in found.items() if role == "region"]

    def run_all(self) -> None:
        """Replace every module that has a role, and every dropout."""
        for name, module in list(self._model.named_modules()):
            role = self._found.get(name)
            if role is not None:
                self._replace(
                    name,
                    getattr(self, f"_{'linear' if role in self._mode.linear else role}")(
                        name, module
                    ),
                )
            elif type(module) is nn.Dropout and module.p > 0:
                self._replace(name, layers.Dropout(module.p, self.run))

    def placements_by_name(self) -> dict[str, Placement]:
        """Of every parameter of the split model."""
        by_id = {id(local.param): local.placement for local in self._local.values()}
        return {name: by_id[id(param)] for name, param in self._model.named_parameters()}

    def _replace(self, name: str, module: nn.Module) -> None:
        parent, _, child = name.rpartition(".")
        module.train(self._model.get_submodule(name).training)
        setattr(self._model.get_submodule(parent), child, module)

    def _give(self, module: nn.Module, original: nn.Module, cuts: Mapping[str, Placement]) -> None:
        """Register the local parameters of a module, None where the original has none."""
        for key, param in original._parameters.items():
            module.register_parameter(
                key, None if param is None else self._localise(key, param, cuts[key])
            )

    def _localise(self, key: str, param: nn.Parameter, placement: Placement) -> nn.Parameter:
        known = self._local.get(id(param))
        if known is None:
            data = torch.zeros((), dtype=param.dtype, device=param.device).expand(
                placement.local_shape
            )
            known = _Local(nn.Parameter(data, requires_grad=param.requires_grad), placement)
            self._local[id(param)] = known
        if known.placement.box != placement.box:
            owners = [
                name
                for name, module in self.originals.items()
                if any(one is param for one in module._parameters.values())
            ]
            roles = " and ".join(f"'{name}' ({self._found.get(name, 'none')})" for name in owners)
            raise ModelError(
                f"{roles} share a {key} of shape {placement.shape}, and their roles cut it in two ways"
            )
        return known.param

    def _place(
        self, param: Tensor, cuts: list[Cut], partial: Cut, fused: dict[int, int] | None = None
    ) -> Placement:
        return place(param.shape, cuts, self._group, fused=fused, partial=partial)

    # -- one method a role
    # ----------------------------------------------------------------------------------------

    def _linear(self, name: str, module: nn.Module) -> nn.Module:
        role = self._found[name]
        rule = self._rule(name, role)
        transposed = is_transposed(module)
        number = FUSED.get(role, 1)
        out, into = linear_shape(module, name)
        made = layers.ParallelLinear(
            rule, self.run, into, transposed=transposed, label=f"'{name}' ({role})"
        )
        cuts: list[Cut] = [rule.into, rule.out] if transposed else [rule.out, rule.into]
        weight = module._parameters["weight"]
        assert weight is not None
        bias_cut: Cut = () if rule.target.features is None else (rule.target.features,)
        placements = {"weight": self._place(weight, cuts, rule.partial, {int(transposed): number})}
        if (bias := module._parameters.get("bias")) is not None:
            placements["bias"] = self._place(bias, [bias_cut], rule.target.different, {0: number})
        self._give(made, module, placements)
        if number > 1:
            self._fit_parent(
                name,
                out // number // (1 if rule.target.features is None else rule.target.features.size),
            )
        return made

    def _rule(self, name: str, role: str) -> LinearRule:
        after_last_norm = role == "head" and "last_norm" in self._found.values()
        if after_last_norm or any(name.startswith(f"{region}.") for region in self._regions):
            return self._mode.linear.get(f"{role} inside", self._mode.linear[role])
        return self._mode.linear[role]

    def _fit_parent(self, name: str, size: int) -> None:
        """The attention of GPT-2 keeps the width of each of its three parts as `split_size`."""
        parent = self._model.get_submodule(name.rpartition(".")[0])
        if hasattr(parent, "split_size"):
            parent.split_size = size  # type: ignore[assignment]

    def _embedding(self, name: str, module: nn.Module) -> nn.Module:
        if (
            not isinstance(module, nn.Embedding)
            or module.max_norm is not None
            or module.scale_grad_by_freq
        ):
            raise ModelError(
                f"'{name}' has the role embedding; it must be an nn.Embedding without max_norm or scale_grad_by_freq"
            )
        scale = (
            getattr(module, "scale", None) if type(module).__name__ == "ScaledEmbedding" else None
        )
        if type(module).forward is not nn.Embedding.forward and scale is None:
            raise ModelError(
                f"'{name}' is a {type(module).__name__} with a forward of its own, which cannot be split"
            )
        rule = self._mode.embedding
        made = layers.ParallelEmbedding(
            rule, self.run, self._mode.residual, module.padding_idx, scale=scale
        )
        self._give(
            made,
            module,
            {"weight": self._place(module.weight, [rule.vocabulary, rule.features], rule.partial)},
        )
        return made

    def _position(self, name: str, module: nn.Module) -> nn.Module:
        """Its parameters [..., features] are cut as the residual stream is; its code sees the part
        it computes.
        """
        stream = self._mode.residual
        if not module._parameters:
            return module
        made = self._alike(
            module, () if stream.features is None else (stream.features,), stream.different
        )
        if stream.sequence is not None and stream.sequence.size > 1:
            if type(module).forward is nn.Embedding.forward:
                made.register_forward_hook(layers.own_positions(stream.sequence))
            else:
                made.register_forward_pre_hook(
                    layers.with_positions(stream.sequence), with_kwargs=True
                )
        return made

    def _alike(self, module: nn.Module, features: Cut, partial: Cut) -> nn.Module:
        """The same module over local parameters, their last dimension cut."""
        made = copy.copy(module)
        for table in (
            "_parameters",
            "_forward_hooks",
            "_forward_pre_hooks",
            "_forward_pre_hooks_with_kwargs",
        ):
            setattr(made, table, type(getattr(module, table))(getattr(module, table)))
        given = {key: param for key, param in module._parameters.items() if param is not None}
        self._give(
            made,
            module,
            {
                k: self._place(p, [()] * (p.dim() - 1) + [features], partial)
                for k, p in given.items()
            },
        )
        return made

    def _norm(self, name: str, module: nn.Module) -> nn.Module:
        stream = self._mode.residual
        if stream.features is None or stream.features.size == 1:
            return self._alike(module, (), stream.different)
        centered = isinstance(module, nn.LayerNorm)
        if not centered and not (type(module).__name__ == "RMSNorm" and hasattr(module, "eps")):
            raise ModelError(
                f"'{name}' is a {type(module).__name__}; {self._group} cuts the features of norms, and knows how to for "
                "nn.LayerNorm, nn.RMSNorm and classes named RMSNorm with weight, eps and (added to the weight) offset"
            )
        offset = float(getattr(module, "offset", 0.0))
        made = layers.ParallelNorm(stream.features, module.eps, centered=centered, offset=offset)  # type: ignore[arg-type]
        params = {key: param for key, param in module._parameters.items() if param is not None}
        self._give(
            made,
            module,
            {k: self._place(p, [(stream.features,)], stream.different) for k, p in params.items()},
        )
        if "bias" not in module._parameters:
            made.register_parameter("bias", None)
        return made

    def _last_norm(self, name: str, module: nn.Module) -> nn.Module:
        """A norm after which the code counts on the whole sequence: gather it there, and not in the
        head.
        """
        made = self._norm(name, module)
        axis = self._mode.residual.sequence
        run = self.run
        if axis is not None and axis.size > 1:
            made.register_forward_hook(
                lambda module, args, y: run.enter(y, axis, Sharded(1), REPLICATED)
            )
        return made

    def _head_norm(self, name: str, module: nn.Module) -> nn.Module:
        """Between column and row, on each head's features: every rank has other heads or other
        samples.
        """
        return self._alike(module, (), (self._group.axis("tp"),))

    def _replicated(self, name: str, module: nn.Module) -> nn.Module:
        stream = self._mode.residual
        if stream.features is None or stream.features.size == 1:
            made = self._alike(module, (), stream.different)
            if isinstance(made, nn.Linear):
                made.register_forward_pre_hook(layers.whole_features(f"'{name}' (replicated)"))
            return made
        if not isinstance(module, nn.Linear):
            raise ModelError(
                f"'{name}' ({type(module).__name__}) is replicated; under {self._group} features are cut between layers, and "
                "only an nn.Linear says how many it takes; use tpN:1d"
            )
        whole = layers.Whole(stream.features, self.run, module)
        params = {key: param for key, param in module._parameters.items() if param is not None}
        self._give(
            whole,
            module,
            {k: self._place(p, [()] * p.dim(), stream.different) for k, p in params.items()},
        )
        if "bias" not in whole._parameters:
            whole.register_parameter("bias", None)
        return whole

    def _router(self, name: str, module: nn.Module) -> nn.Module:
        """Every rank routes all tokens, alike; where they are in parts between layers, they are
        gathered at the door.
        """
        mixture = self._model.get_submodule(name.rpartition(".")[0])
        axis = self._mode.residual.sequence
        if (
            axis is not None
            and self._mode.residual == Stream(sequence=axis)
            and hasattr(mixture, "enter")
        ):
            mixture.enter = lambda x: transition(x, axis, Sharded(1), INVARIANT)  # type: ignore[assignment]
            mixture.leave = lambda y: transition(y, axis, INVARIANT, Sharded(1))  # type: ignore[assignment]
        elif self._mode.residual != Stream():
            raise NotAvailable(
                f"{self._group} cuts the tokens or features that '{name}' routes; experts run under tpN:1d"
            )
        return self._alike(module, (), ())

    def _experts(self, name: str, module: nn.Module) -> nn.Module:
        """`gate` and `up` [experts, out, in] are cut as a column, `down` as a row: each expert on
        all ranks, a part on each.

        `gate_up_proj` is gate and up in one.
        """
        tp = self._group.axis("tp")
        made = copy.copy(module)
        for table in ("_parameters", "_forward_hooks", "_forward_pre_hooks"):
            setattr(made, table, type(getattr(module, table))(getattr(module, table)))
        given = {key: param for key, param in module._parameters.items() if param is not None}
        rows = [key for key in given if key.startswith("down")]
        cuts: dict[str, list[Cut]] = {
            key: [(), (), (tp,)] if key in rows else [(), (tp,), ()] for key in given
        }
        fused = {key: {1: 2} if key == "gate_up_proj" else None for key in given}
        self._give(
            made,
            module,
            {key: self._place(param, cuts[key], (), fused[key]) for key, param in given.items()},
        )
        made.register_forward_pre_hook(
            lambda _, args: (transition(args[0], tp, INVARIANT, REPLICATED), *args[1:])
        )
        made.register_forward_hook(lambda _, args, rows: transition(rows, tp, PARTIAL, INVARIANT))
        return made

    def _attention(self, name: str, module: nn.Module) -> nn.Module:
        p = float(getattr(module, "dropout", 0.0) or 0.0)
        return layers.AttentionWithDropout(p, self.run) if p > 0 else module

    def _region(self, name: str, module: nn.Module) -> nn.Module:
        """Its code takes the length of the sequence from its input: gather the sequence at its
        door.
        """
        axis = self._mode.residual.sequence
        run = self.run
        if axis is not None and axis.size > 1:

            def gather(
                module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
            ) -> tuple[Any, dict[str, Any]]:
                key = None if args else "hidden_states"
                whole = run.enter(
                    args[0] if key is None else kwargs[key], axis, Sharded(1), REPLICATED
                )
                layers.check_mask(name, kwargs.get("attention_mask"), whole.shape[1])
                return (
                    ((whole, *args[1:]), kwargs) if key is None else (args, {**kwargs, key: whole})
                )

            module.register_forward_pre_hook(gather, with_kwargs=True)
        return module
