"""`plait roles`: the table of roles by which a model's layers are split, ready to paste."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from plait.cli import common
from plait.cli.answer import Answer, Json
from plait.launcher.patience import telling
from plait.values import JsonValue

if TYPE_CHECKING:
    from torch import nn


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `plait roles`."""
    parser.add_argument("config", metavar="CONFIG", help="a TOML file with [model]")
    parser.add_argument(
        "--ranks", type=int, default=2, metavar="N", help="ranks of the tensor axis (default: 2)"
    )
    common.add_overrides(parser, "model.task=masked")


def run(arguments: argparse.Namespace) -> Answer:
    """The table, and how many parameters each rank has of it. Nothing is trained.

    Raises:
        UsageError: fewer ranks than two.
    """
    from plait import models
    from plait.cli.parser import UsageError
    from plait.engine.splitting import followed_roles
    from plait.run import assemble

    if arguments.ranks < 2:
        raise UsageError(f"--ranks is {arguments.ranks}; a tensor axis has 2 or more")
    config = common.read_config(arguments, with_steps=False)
    with telling("roles", "making the model") as now:
        model = assemble.make_model(assemble.model_keys(config), config.train.seed)
        given = assemble.roles_of(config)
        now("following what each layer of the model computes")
        if given is None and not models.has_roles(model):
            table = followed_roles(model, assemble.make_cutting(config), arguments.ranks)
            roles, notes = table.roles, table.notes
        else:
            roles, notes = _table(model, arguments.ranks, given)
        now(f"counting the parameters of one of {arguments.ranks} ranks")
        numbers = _cost(model, roles, arguments.ranks)
    data: Json = {"roles": roles, "notes": notes, "ranks": arguments.ranks, **numbers}
    return Answer(data, _text(data))


def _table(model: nn.Module, size: int, given: JsonValue) -> tuple[dict[str, str], list[str]]:
    """The user's own table, the model's, or the one that is derived; notes of the last."""
    from plait import models
    from plait.models.hf import HuggingFace
    from plait.models.hf_roles import table_of

    if given is not None:
        return dict(given), []
    if isinstance(model, HuggingFace):
        table = table_of(model, size)
        return table.roles, table.notes
    return models.roles_for(model, size), []


def _cost(model: nn.Module, roles: dict[str, str], size: int) -> dict[str, float]:
    """Parameters in all, and those of one rank."""
    from plait.comm.simulated import simulate
    from plait.mesh import Mesh
    from plait.parallel import tensor
    from plait.plan import Plan
    from plait.verify.reference.copied import copied

    whole = sum(param.numel() for param in model.parameters())

    def rank(world: Any) -> int:
        own = copied(model)
        tensor.apply(own, roles, tensor.TensorGroup(world))
        return sum(param.numel() for param in own.parameters())

    local = simulate(Mesh.of(Plan.parse(f"tp{size}").check()), rank)[0]
    return {"parameters": whole, "parameters_per_rank": local}


def _text(data: Json) -> str:
    """The table as TOML, with its cost and its notes as comments."""
    share = data["parameters_per_rank"] / max(data["parameters"], 1)
    lines = [
        f"# under tp{data['ranks']} each rank has {data['parameters_per_rank']:,} of "
        f"{data['parameters']:,} parameters ({share:.0%})",
        *(f"# {note}" for note in data["notes"]),
        "[model.roles]",
        *(f'"{pattern}" = "{role}"' for pattern, role in data["roles"].items()),
    ]
    return "\n".join(lines)
