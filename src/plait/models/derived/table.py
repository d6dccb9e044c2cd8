"""The table of roles that a model is given, and what it leaves whole."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import nn

from plait.divided_views import DROPOUT, is_word
from plait.divided_views import word as word_of
from plait.models.adapters import without_adapters
from plait.models.derived.choose import RowChoice, choose, layer_pattern, pattern_of
from plait.models.derived.cuts import Cut, Misfit, parts_in_words
from plait.models.derived.demands import Demand
from plait.models.derived.kinds import LINEAR, is_linear, out_features, owns_parameters
from plait.models.derived.record import Draw, Graph, Value, run, taken_layers
from plait.models.derived.region import with_dropout_of_samples
from plait.models.derived.rehearse import TrialStage, number_of, rehearse
from plait.values import PyTree

MOST_ATTEMPTS = 12
UNLIKE = "it runs otherwise in training than in evaluation"
Recording = tuple[Graph, Callable[..., Graph]]


@dataclass(frozen=True)
class Table:
    """Roles by pattern, and a note for each kind of layer that every rank computes alike."""

    roles: dict[str, str]
    notes: list[str] = field(default_factory=list)
    draws: list[Draw] = field(default_factory=list)


@dataclass(frozen=True)
class Ends:
    """The model's own embedding and head, and the classes of embeddings that can be cut."""

    embedding: nn.Module | None = None
    head: nn.Module | None = None
    plain: Sequence[type] = (nn.Embedding,)


@dataclass(frozen=True)
class Tables:
    """The layers that know the vocabulary: embeddings of tokens, and the layer of logits."""

    embeddings: frozenset[str]
    heads: frozenset[str]


def derive(
    model: nn.Module,
    call: Callable[[], PyTree],
    size: int,
    ends: Ends | None = None,
    opaque: Sequence[type] = (),
    *,
    is_grid: bool = False,
) -> Table:
    """The table for `size` ranks; `call()` runs the model on an example on the host.

    Ranks of a grid have other samples too: all that functions drop gets a word. An adapter has no
    role of its own: it is cut with its layer.
    """
    with without_adapters(model):
        return _derive(model, call, size, ends or Ends(), opaque, is_grid=is_grid)


def _derive(
    model: nn.Module,
    call: Callable[[], PyTree],
    size: int,
    ends: Ends,
    opaque: Sequence[type],
    *,
    is_grid: bool,
) -> Table:
    (graph, run_again), *others = _recorded(model, partial(run, model, call, opaque=opaque))
    tables = _tables(model, graph, size, ends)
    tied = _tied_layers(model)
    refused: dict[str, str] = {}
    choice = RowChoice()
    stage = TrialStage()
    for _ in range(MOST_ATTEMPTS):
        choice = choose(model, graph, size, refused, tables.heads | tied)
        stage = rehearse(model, run_again, (graph, choice), size)
        for other, run_other in others:
            if not stage.place:
                stage = _in_other_mode(model, run_other, (other, choice), size, stage)
        if not stage.place:
            break
        nearest = _rows_behind(graph, _rows_near(choice, stage.place), stage.reached)
        refused |= dict.fromkeys(nearest, stage.reason)
    else:
        choice = RowChoice(left_out=refused)
    if is_grid:
        region = with_dropout_of_samples(graph, choice.region, choice.rows)
        choice = replace(choice, region=region)
    divided = stage.divided if choice.rows else {}
    table = _write(model, choice, divided, tables, _layers_called(graph))
    met = choice.region.dropped
    draws = [one._replace(is_met=len(one.shape) in met.get(one.owner, {})) for one in graph.draws]
    return replace(table, draws=draws)


def _recorded(model: nn.Module, run_again: Callable[..., Graph]) -> list[Recording]:
    """The graph to derive from, and what records it again with other sizes.

    Evaluation comes first, then training where it is another. Training comes first for a model that
    calls other layers there, or draws random numbers. No rank can draw those of one device for its
    part of a value.
    """
    graph = run_again()
    in_training = partial(run_again, in_training=True)
    try:
        trained = in_training()
    except Exception:  # of code that draws or counts in training, on numbers that are all zero
        return [(graph, run_again)]
    if _layers_called(trained) != _layers_called(graph):
        return [(trained, in_training)]
    if trained.draws:
        return [(trained, in_training), (graph, run_again)]
    if _steps(trained) == _steps(graph) and trained.recomputed == graph.recomputed:
        return [(graph, run_again)]
    return [(graph, run_again), (trained, in_training)]


def _layers_called(graph: Graph) -> set[str]:
    return {node.name for node in graph.nodes if node.kind == LINEAR}


def _steps(graph: Graph) -> list[PyTree]:
    """The operations and layers of a graph in their order, with the shapes that they make."""
    steps: list[PyTree] = []
    for node in graph.nodes:
        shapes = [out and out.shape for out in node.outputs]
        steps.append((node.kind, node.name, node.func, shapes))
    return steps


def _in_other_mode(
    model: nn.Module,
    run_again: Callable[..., Graph],
    whole: tuple[Graph, RowChoice],
    size: int,
    before: TrialStage,
) -> TrialStage:
    """The trial of the other forward, of training or of evaluation, with the rows of the first.

    It holds where the same is cut, and the same numbers are divided.
    """
    graph, choice = whole
    try:
        region = Demand(graph, choice.rows, size).run()
    except Misfit as misfit:
        return replace(before, place=UNLIKE, reason=f"{UNLIKE}: {misfit}")
    kept = ("columns", "spread", "inside", "norms", "tables", "parameters")
    unlike = any(getattr(region, key) != getattr(choice.region, key) for key in kept)
    stage = rehearse(
        model, run_again, (graph, replace(choice, region=region)), size, before.divided
    )
    if stage.place or (not unlike and stage.divided == before.divided):
        return stage
    return replace(before, place=UNLIKE, reason=UNLIKE)


def derive_or_leave(
    model: nn.Module,
    call: Callable[[], PyTree],
    size: int,
    ends: Ends | None = None,
    opaque: Sequence[type] = (),
    *,
    is_grid: bool = False,
) -> Table:
    """`derive`; where the forward cannot be followed, all of the model stays whole."""
    try:
        return derive(model, call, size, ends=ends, opaque=opaque, is_grid=is_grid)
    except Exception as failure:  # code of others, on numbers that are all zero
        return left_whole(model, f"its forward cannot be followed on an example: {failure}")


def left_whole(model: nn.Module, why: str) -> Table:
    """The table of a model that every rank computes alike."""
    owners = [name for name, module in model.named_modules() if name and owns_parameters(module)]
    roles = dict.fromkeys(owners, "replicated")
    return Table(_by_pattern(roles | {_trunk(model): "whole"}), [f"every rank computes all: {why}"])


def _rows_near(choice: RowChoice, place: str) -> list[str]:
    """The rows that share the longest path with a module; all where none shares any."""

    def shared(name: str) -> int:
        pairs = zip(name.split("."), place.split("."), strict=False)
        length = 0
        for mine, theirs in pairs:
            if mine != theirs:
                return length
            length += 1
        return length

    most = max((shared(name) for name in choice.rows), default=0)
    return [layer_pattern(name) for name in choice.rows if shared(name) == most]


def _rows_behind(graph: Graph, patterns: Sequence[str], index: int) -> list[str]:
    """The rows that come next behind a node, among some: what failed lies before them."""
    for node in graph.nodes[index:]:
        if node.kind == LINEAR and layer_pattern(node.name) in patterns:
            return [layer_pattern(node.name)]
    return list(patterns)


def _write(
    model: nn.Module,
    choice: RowChoice,
    divided: Mapping[str, Sequence[str]],
    tables: Tables,
    called: Collection[str],
) -> Table:
    region = choice.region
    shares: dict[str, list[str]] = {}
    named = dict(model.named_modules())
    for name, module in named.items():
        for number in divided.get(pattern_of(name), ()):
            if is_word(number) or number_of(module, number) is not None:
                shares.setdefault(name, []).append(number)
    for path, want in region.parameters.items():
        owner, _, key = path.rpartition(".")
        where = str(want.dim) if isinstance(want, Cut) else want
        shares.setdefault(owner, []).append(f"{key}:{where}")
    for name, dims in region.dropped.items():
        shares.setdefault(name, []).extend(word_of(*pair, DROPOUT) for pair in dims.items())
    for name in region.tables:
        shares.setdefault(name, []).append("weight:1")
    roles = {name: f"share {' '.join(words)}" for name, words in shares.items()}
    for name, cut in region.columns.items():
        word = "column_inside" if name in choice.entered else "column"
        parts = parts_in_words(cut.parts)
        roles[name] = f"{word} {parts}" if parts else word
    roles |= dict.fromkeys(choice.rows, "row")
    roles |= dict.fromkeys(region.spread, "spread")
    roles |= dict.fromkeys(region.inside, "inside")
    roles |= dict.fromkeys(region.norms, "inner_norm")
    roles |= dict.fromkeys(tables.embeddings, "embedding")
    roles |= dict.fromkeys(tables.heads, "head")
    roles |= dict.fromkeys(choice.attentions, "heads")
    roles |= {f"{name}.out_proj": "row" for name in choice.attentions}
    same_layers = _same_layers(named, roles)
    for name, module in named.items():
        if name and name not in roles and owns_parameters(module):
            is_unmet = is_linear(module) and name not in called
            known = same_layers.get(pattern_of(name)) if is_unmet else None
            roles[name] = known or "replicated"
    left = [name for name, role in roles.items() if _is_left_whole(named[name], role)]
    notes: dict[str, str] = {}
    for name in left:
        notes.setdefault(pattern_of(name), _note(name, choice.left_out))
    return Table(_by_pattern({_trunk(model): "whole"} | roles, named), [*notes.values()])


def _note(name: str, left_out: Mapping[str, str]) -> str:
    why = left_out.get(layer_pattern(name))
    return f"{pattern_of(name)} is computed alike on every rank{'' if why is None else f': {why}'}"


def _trunk(model: nn.Module) -> str:
    """The module that stands for all code between layers: a wrapper's `model`, else the root."""
    inner = model._modules.get("model")
    is_wrapper = inner is not None and len(model._modules) == 1 and not model._parameters
    return "model" if is_wrapper else ""


def _same_layers(named: dict[str, nn.Module], roles: dict[str, str]) -> dict[str, str]:
    """Roles of layers that the example did not reach, such as experts without tokens."""
    found: dict[str, set[str]] = {}
    for name, role in roles.items():
        if is_linear(named[name]):
            found.setdefault(pattern_of(name), set()).add(role)
    return {pattern: next(iter(same)) for pattern, same in found.items() if len(same) == 1}


def _is_left_whole(module: nn.Module, role: str) -> bool:
    """Whether a module has matrices of which its role cuts none."""
    if role not in ("replicated", "inside", "spread"):
        return False
    return any(param is not None and param.dim() > 1 for param in module._parameters.values())


def _by_pattern(roles: dict[str, str], names: Collection[str] = ()) -> dict[str, str]:
    """One entry for each pattern whose modules agree: first with `*` for all numbers of layers.

    Next the last number stays, as in a sequence of unlike layers. Else there is an entry a module.
    """
    by_kind = _roles_met(pattern_of, roles, names)
    by_layer = _roles_met(layer_pattern, roles, names)
    table = {}
    for name, role in roles.items():
        key = name
        if len(by_layer[layer_pattern(name)]) == 1:
            key = layer_pattern(name)
        if len(by_kind[pattern_of(name)]) == 1:
            key = pattern_of(name)
        table[key] = role
    return table


def _roles_met(
    pattern: Callable[[str], str], roles: dict[str, str], names: Collection[str]
) -> dict[str, set[str]]:
    """The roles of the modules that a pattern matches; empty for those that have none."""
    found: dict[str, set[str]] = {}
    for name in {*roles, *names}:
        found.setdefault(pattern(name), set()).add(roles.get(name, ""))
    return found


def _tables(model: nn.Module, graph: Graph, size: int, ends: Ends) -> Tables:
    """The embeddings and the head that can be cut by the vocabulary; tied ones together or not."""
    weight = None if ends.embedding is None else ends.embedding._parameters.get("weight")
    alike = {
        name: module
        for name, module in model.named_modules()
        if weight is not None and module._parameters.get("weight") is weight
    }
    looked = frozenset(name for name, module in alike.items() if type(module) in ends.plain)
    tied = alike.keys() - looked
    heads = frozenset(name for name, module in model.named_modules() if module is ends.head)
    heads_fit = bool(heads) and all(_gives_logits(model, graph, name, size) for name in heads)
    used = taken_layers(graph)
    embeds = weight is not None and weight.dim() == 2 and weight.shape[0] % size == 0
    embeds = embeds and not (alike.keys() & used) and tied <= heads
    heads_fit = heads_fit and not (heads & used) and not _shares_bias(model, heads)
    if tied and not (embeds and heads_fit):
        return Tables(frozenset(), frozenset())
    return Tables(looked if embeds else frozenset(), heads if heads_fit else frozenset())


def _tied_layers(model: nn.Module) -> frozenset[str]:
    """The linear layers, and torch's attention, that have a parameter of another module too.

    Both keep it whole, or are tables.
    """
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for param in module._parameters.values():
            if param is not None:
                owners.setdefault(id(param), []).append(name)
    shared = {name for names in owners.values() if len(names) > 1 for name in names}
    return frozenset(
        name
        for name in shared
        if is_linear(one := model.get_submodule(name)) or isinstance(one, nn.MultiheadAttention)
    )


def _shares_bias(model: nn.Module, heads: frozenset[str]) -> bool:
    """Whether another module holds the bias of a head too, and would have it whole."""
    biases = [model.get_submodule(name)._parameters.get("bias") for name in heads]
    known = {id(bias) for bias in biases if bias is not None}
    others = [module for name, module in model.named_modules() if name not in heads]
    return any(id(param) in known for module in others for param in module._parameters.values())


def _gives_logits(model: nn.Module, graph: Graph, name: str, size: int) -> bool:
    """Whether a layer's output becomes the model's by operations on each number alone."""
    module = model.get_submodule(name)
    if not is_linear(module) or out_features(module) % size:
        return False
    values = [
        value
        for node in graph.nodes
        if node.kind == LINEAR and node.name == name
        for value in node.outputs
        if value is not None
    ]
    return bool(values) and any(_reaches(graph, value) for value in values)


def _reaches(graph: Graph, value: Value) -> bool:
    if value in graph.results:
        return True
    for node in value.users:
        others = [one for one in node.inputs if one is not value]
        alone = node.kind == "op" and torch.Tag.pointwise in node.func.tags
        same = [out for out in node.outputs if out is not None and out.shape == value.shape]
        if alone and all(len(one.shape) == 0 for one in others) and same:
            return any(_reaches(graph, out) for out in same)
    return False
