"""`apply`: a table of roles, a model and a grid of ranks -> the model with parallel modules.

Modules are replaced in place under their names. So units, checkpoints and proofs see the parameters
that they know. It works on meta models. The new parameters have local shapes and no memory; values
are cut from whole ones by `Placement.cut`.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from plait.comm import Axis
from plait.divided_views import DROPOUT, positions_of
from plait.errors import ModelError
from plait.forwards import is_replaced, runs_forward_of
from plait.mesh.layouts import REPLICATED, Sharded
from plait.parallel.tensor import adapters, dropout, layers, whole_samples
from plait.parallel.tensor.group import ForwardContext, TensorGroup
from plait.parallel.tensor.inside import InsideRoles
from plait.parallel.tensor.mode import LinearRule, Mode
from plait.parallel.tensor.modes import mode_of
from plait.parallel.tensor.placement import (
    Cut,
    LocalParameter,
    Placement,
    local_parameter,
    parts,
    place,
)
from plait.parallel.tensor.roles import (
    check_sizes,
    divides,
    equal_parts,
    is_transposed,
    linear_shape,
    match,
    packed_parts,
    word_of,
)
from plait.parallel.tensor.split import TensorSplit
from plait.parallel.tensor.whole_samples import BATCH_NORMS, WholeSamples, open_mixture
from plait.values import PyTree


def apply(model: nn.Module, roles: Mapping[str, str], group: TensorGroup) -> TensorSplit:
    """Split `model` in place. Collective: it makes the axes of the mode.

    Raises:
        ModelError: the table does not fit the model, or the sizes do not divide by the grid.
            Nothing is changed then.
    """
    role_by_name = match(model, roles)
    mode = mode_of(group, role_by_name)
    check_sizes(model, role_by_name, mode, str(group))
    splitter = _Splitter(model, role_by_name, mode, group)
    splitter.run_all()
    whole_samples.watch_buffers(model, mode.residual.samples, str(group))
    has_head = "head" in role_by_name.values()
    outputs = mode.inner if has_head else mode.residual
    return TensorSplit(
        group=group,
        mode=mode,
        context=splitter.context,
        roles=role_by_name,
        placements=splitter.placements_by_name(),
        originals=splitter.originals,
        outputs=outputs,
        sharded_logits=has_head,
    )


class _Splitter:
    """Replaces the modules of one model."""

    def __init__(
        self, model: nn.Module, roles: Mapping[str, str], mode: Mode, group: TensorGroup
    ) -> None:
        self._model = model
        self._roles = roles
        self._mode = mode
        self._group = group
        self.context = ForwardContext(mode.residual, products=group.products)
        # By the id of the whole parameter, so that tied parameters stay tied.
        self._local: dict[int, LocalParameter] = {}
        self.originals = {
            name: module
            for name, module in model.named_modules()
            if next(module.parameters(recurse=False), None) is not None
        }
        self._regions = [name for name, role in roles.items() if role == "region"]
        self._inside = InsideRoles(group, mode, roles, self)
        self._paths: dict[int, list[str]] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            self._paths.setdefault(id(module), []).append(name)

    def run_all(self) -> None:
        """Replace every module that has a role, and every dropout."""
        for name, module in list(self._model.named_modules()):
            role = self._roles.get(name)
            dims = positions_of(role, DROPOUT) if role else {}
            if type(module) is nn.Dropout and module.p > 0 and (dims or not role):
                self._replace(module, dropout.split(module, self.context, dims))
            elif role is not None:
                word = word_of(role)
                kind = "linear" if word in self._mode.linear else word
                split = getattr(self._inside, kind, None) or getattr(self, f"_{kind}")
                self._replace(module, split(name, module))
        self._inside.divide_calls(self._model)

    def placements_by_name(self) -> dict[str, Placement]:
        """The placement of every parameter of the split model, by name."""
        by_id = {id(local.param): local.placement for local in self._local.values()}
        return {name: by_id[id(param)] for name, param in self._model.named_parameters()}

    def _replace(self, old: nn.Module, module: nn.Module) -> None:
        """Put a module in the place of another, wherever it is; the root takes the contents."""
        layers.check_hooks(self._paths[id(old)][0], old, module, self._group)
        if old is self._model:
            vars(old).update(vars(module))
            return
        module.train(old.training)
        for name in self._paths[id(old)]:
            parent, _, child = name.rpartition(".")
            setattr(self._model.get_submodule(parent), child, module)

    def give(self, module: nn.Module, original: nn.Module, cuts: Mapping[str, Placement]) -> None:
        """Register the local parameters of a module, None where the original has none."""
        for key, param in original._parameters.items():
            local = None if param is None else self._localise(key, param, cuts[key])
            module.register_parameter(key, local)

    def _localise(self, key: str, param: nn.Parameter, placement: Placement) -> nn.Parameter:
        known = self._local.get(id(param))
        if known is None:
            layers.check_parameter_hooks(f"{self._owners(param)[0]}.{key}", param, self._group)
            known = self._local[id(param)] = local_parameter(param, placement)
        if known.placement.box != placement.box:
            owners = (f"'{name}' ({self._roles.get(name, 'none')})" for name in self._owners(param))
            raise ModelError(
                f"{' and '.join(owners)} share a {key} of shape {placement.shape}, "
                "and their roles cut it in two ways"
            )
        return known.param

    def _owners(self, param: nn.Parameter) -> list[str]:
        """The modules of the original model that hold a parameter."""

        def holds(module: nn.Module) -> bool:
            return any(other is param for other in module._parameters.values())

        return [name for name, module in self.originals.items() if holds(module)]

    def place(
        self, param: Tensor, cuts: list[Cut], partial: Cut, fused: dict[int, int] | None = None
    ) -> Placement:
        return place(param.shape, cuts, self._group, fused=fused, partial=partial)

    # -- one method a role ------------------------------------------------------------------------

    def _linear(self, name: str, module: nn.Module) -> nn.Module:
        role = self._roles[name]
        transposed = is_transposed(module)
        number = equal_parts(role)
        out, into = linear_shape(module, name)
        is_whole = number is None or not divides(
            self._mode.linear[word_of(role)], out, into, number
        )
        rule = self._rule(name, is_whole=is_whole)
        picked: Tensor | None = None
        if number is None:
            adapters.check_none(name, module, self._group)
            picked = layers.picked_rows(packed_parts(role), rule.target.features)
        label = f"'{name}' ({role})"
        linear = layers.ParallelLinear(
            rule, self.context, into, transposed=transposed, label=label, picked=picked
        )
        if number is None:
            self.give(linear, module, self.alike(module, (self._group.axis("tp"),)))
            return linear
        cuts: list[Cut] = [rule.into, rule.out] if transposed else [rule.out, rule.into]
        weight = layers.weight_of(name, module)
        bias_cut: Cut = () if rule.target.features is None else (rule.target.features,)
        placements = {"weight": self.place(weight, cuts, rule.partial, {int(transposed): number})}
        if (bias := module._parameters.get("bias")) is not None:
            placements["bias"] = self.place(bias, [bias_cut], rule.target.different, {0: number})
        self.give(linear, module, placements)
        self._adapt(name, module, linear, rule)
        if number > 1:
            divisor = 1 if rule.target.features is None else rule.target.features.size
            self._fit_parent(name, out // number // divisor)
        return linear

    def _adapt(self, name: str, module: nn.Module, linear: nn.Module, rule: LinearRule) -> None:
        """Split the adapter of a layer with it."""

        def local(part: nn.Module, cuts: list[Cut], partial: Cut, fused: int) -> nn.Module:
            holder = adapters.Holder()
            weight = layers.parameters_of(part)["weight"]
            place = self.place(weight, cuts, partial, {0: fused})
            self.give(holder, part, {"weight": place})
            return holder

        role = self._roles[name]
        is_inside = word_of(role) == "column_inside" or self._is_inside(name)
        how = adapters.adapter_rule(rule, self._mode, self._group, self.context, is_inside)
        into = linear_shape(module, name)[1]
        delta = adapters.Delta(rule, how, self.context, equal_parts(role) or 1, into)
        adapters.split(module, linear, delta, local)

    def _rule(self, name: str, *, is_whole: bool) -> LinearRule:
        """The rule of a layer; `is_whole` where ranks with other samples keep its whole weight."""
        coarse = self._mode.coarse
        rules = self._mode.linear if coarse is None or not is_whole else coarse.linear
        word = word_of(self._roles[name])
        return rules[f"{word} inside"] if self._is_inside(name) else rules[word]

    def _is_inside(self, name: str) -> bool:
        """Whether a layer's input has been gathered by the door of its region, or by a norm."""
        word = word_of(self._roles[name])
        if f"{word} inside" not in self._mode.linear:
            return False
        after_last_norm = word == "head" and "last_norm" in self._roles.values()
        return after_last_norm or any(name.startswith(f"{region}.") for region in self._regions)

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
                f"'{name}' has the role embedding; it must be an nn.Embedding "
                "without max_norm or scale_grad_by_freq"
            )
        is_scaled = type(module).__name__ == "ScaledEmbedding"
        scale = getattr(module, "scale", None) if is_scaled else None
        if not runs_forward_of(module, nn.Embedding) and (scale is None or is_replaced(module)):
            raise ModelError(
                f"'{name}' is a {type(module).__name__} with a forward of its own, "
                "which cannot be split"
            )
        rule = self._mode.embedding
        if self._mode.coarse is not None and module.num_embeddings % parts(rule.vocabulary):
            rule = self._mode.coarse.embedding
        embedding = layers.ParallelEmbedding(
            rule, self.context, self._mode.residual, module.padding_idx, scale=scale
        )
        weight = self.place(module.weight, [rule.vocabulary, rule.features], rule.partial)
        self.give(embedding, module, {"weight": weight})
        return embedding

    def _position(self, name: str, module: nn.Module) -> nn.Module:
        """A position module, its parameters [..., features] cut as the residual stream is.

        Its code sees the positions of the tokens that this rank computes.
        """
        stream = self._mode.residual
        if not module._parameters:
            return self._told_rows(module)
        features: Cut = () if stream.features is None else (stream.features,)
        local = self.localised(module, features, stream.different)
        if stream.sequence is not None and stream.sequence.size > 1:
            if type(module).forward is nn.Embedding.forward:
                local.register_forward_hook(layers.own_positions(stream.sequence))
            else:
                local.register_forward_pre_hook(
                    layers.with_positions(stream.sequence), with_kwargs=True
                )
        return local

    def _told_rows(self, module: nn.Module) -> nn.Module:
        """A module between two layers, with the documents of the samples that it computes."""
        layers.tell_rows(module, self._mode.residual.samples, self._mode.inner.samples)
        return module

    def localised(self, module: nn.Module, features: Cut, partial: Cut) -> nn.Module:
        """A copy of a module with local parameters, their last dimension cut."""
        local = layers.shallow_copy(module)
        placements = {
            key: self.place(param, [*[()] * (param.dim() - 1), features][: param.dim()], partial)
            for key, param in layers.parameters_of(module).items()
        }
        self.give(local, module, placements)
        for key, part in adapters.parts_of(module):
            adapters.give_part(local, key, self.localised(part, (), partial))
        return local

    def alike(self, module: nn.Module, partial: Cut) -> dict[str, Placement]:
        """Placements of parameters that every rank has whole."""
        return {
            key: self.place(param, [()] * param.dim(), partial)
            for key, param in layers.parameters_of(module).items()
        }

    def _norm(self, name: str, module: nn.Module) -> nn.Module:
        stream = self._mode.residual
        if stream.features is None or stream.features.size == 1:
            return self.localised(module, (), stream.different)
        return self.norm_in_parts(name, module, stream.features, stream.different)

    def norm_in_parts(self, name: str, module: nn.Module, axis: Axis, different: Cut) -> nn.Module:
        """A norm of features that are cut over an axis."""
        centered = runs_forward_of(module, nn.LayerNorm)
        if not centered and not (type(module).__name__ == "RMSNorm" and hasattr(module, "eps")):
            raise ModelError(
                f"'{name}' is a {type(module).__name__}; {self._group} cuts the features of norms, "
                "and knows how to for nn.LayerNorm, nn.RMSNorm and classes named RMSNorm "
                "with weight, eps and (added to the weight) offset"
            )
        offset = float(getattr(module, "offset", 0.0))
        eps: float | None = module.eps  # type: ignore[assignment]
        norm = layers.ParallelNorm(axis, eps, centered=centered, offset=offset)
        placements = {
            key: self.place(param, [(axis,)], different)
            for key, param in layers.parameters_of(module).items()
        }
        self.give(norm, module, placements)
        if "bias" not in module._parameters:
            norm.register_parameter("bias", None)
        return norm

    def _last_norm(self, name: str, module: nn.Module) -> nn.Module:
        """A norm whose output has the whole sequence, which the code after it counts on.

        The head then gathers no more.
        """
        norm = self._norm(name, module)
        axis = self._mode.residual.sequence
        if axis is not None and axis.size > 1:
            norm.register_forward_hook(
                lambda module, args, y: self.context.enter(y, axis, Sharded(1), REPLICATED)
            )
        return norm

    def _replicated(self, name: str, module: nn.Module) -> nn.Module:
        stream = self._mode.residual
        if stream.samples is not None and isinstance(module, BATCH_NORMS):
            local = self.localised(module, (), ())
            WholeSamples(stream.samples, self.context).surround(local)
            return local
        if stream.features is None or stream.features.size == 1:
            local = self.localised(module, (), stream.different)
            if isinstance(local, nn.Linear):
                local.register_forward_pre_hook(layers.whole_features(f"'{name}' (replicated)"))
            return local
        if not isinstance(module, nn.Linear):
            raise ModelError(
                f"'{name}' ({type(module).__name__}) is replicated; under {self._group} features "
                "are cut between layers, and only an nn.Linear says how many it takes; use tpN:1d"
            )
        adapters.check_none(name, module, self._group)
        replicated = layers.ReplicatedLinear(stream.features, self.context, module)
        placements = {
            key: self.place(param, [()] * param.dim(), stream.different)
            for key, param in layers.parameters_of(module).items()
        }
        self.give(replicated, module, placements)
        if "bias" not in replicated._parameters:
            replicated.register_parameter("bias", None)
        return replicated

    def _router(self, name: str, module: nn.Module) -> nn.Module:
        """A router of all tokens, alike on every rank."""
        mixture = self._model.get_submodule(name.rpartition(".")[0])
        open_mixture(name, mixture, self._mode.residual, self._group, self.context)
        return self.localised(module, (), ())

    def _attention(self, name: str, module: nn.Module) -> nn.Module:
        p = float(getattr(module, "dropout", 0.0) or 0.0)
        return self._told_rows(dropout.AttentionWithDropout(p, self.context) if p else module)

    def _region(self, name: str, module: nn.Module) -> nn.Module:
        """A module whose code takes the length of the sequence from its input.

        A hook gathers the sequence before it runs.
        """
        axis = self._mode.residual.sequence
        if axis is not None and axis.size > 1:

            def gather(
                module: nn.Module, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
            ) -> tuple[PyTree, dict[str, PyTree]]:
                x = args[0] if args else kwargs["hidden_states"]
                whole = self.context.enter(x, axis, Sharded(1), REPLICATED)
                layers.check_mask(name, kwargs.get("attention_mask"), whole.shape[1])
                if args:
                    return (whole, *args[1:]), kwargs
                return args, {**kwargs, "hidden_states": whole}

            module.register_forward_pre_hook(gather, with_kwargs=True)
        return module
