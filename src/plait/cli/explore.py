"""`plait explore`: a page on which plans are compared. Its data are the answers of other verbs."""

from __future__ import annotations

import argparse
import gc
import threading
import traceback
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.cli import common, estimate, export, plan, schedule
from plait.cli.answer import Answer, to_json
from plait.cli.parser import Parser, UsageError
from plait.errors import ConfigError, PlaitError, nearest
from plait.values import JsonMapping

if TYPE_CHECKING:
    from plait.explore.question import Choices, Opening
    from plait.explore.server import Site, WebReply

FIRST_MODEL = "llama3-8b"
FIRST = {"top": ["200"], "explain": ["1"]}
"""The choices of the page's first question, beside those of the command line."""
PLAN_OPTIONS = ("cluster", "devices", "framework", "objective", "risk", "top")
ESTIMATE_OPTIONS = ("cluster", "framework", "plan")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `plait explore`."""
    parser.add_argument(
        "config",
        metavar="CONFIG",
        nargs="?",
        help="a TOML file, a Hugging Face config.json, or a known model such as llama3-8b "
        f"(default: {FIRST_MODEL})",
    )
    common.add_cluster(parser)
    parser.add_argument(
        "--port", type=int, default=0, metavar="N", help="the port (default: a free one)"
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="the address to listen on (default: 127.0.0.1, this machine alone)",
    )


def run(arguments: argparse.Namespace) -> Answer:
    """The address of the page, which is served until Ctrl-C."""
    from plait.explore.server import PageServer

    opening = opening_of(arguments.config, arguments.cluster)
    site = site_of(opening)
    server = PageServer(site, arguments.host, arguments.port)

    def serve() -> None:
        gc.freeze()  # what is imported stays; a search makes many records that live as long
        gc.set_threshold(100_000)
        if not opening.is_local:  # a machine is measured when it is asked for
            threading.Thread(target=site.answer, args=("/plan.json", FIRST), daemon=True).start()
        server.run()

    return Answer({"url": server.url}, server.url, serve=serve)


def opening_of(config: str | None, cluster: str | None) -> Opening:
    """The question that the command line asks. Errors: those of a config and of a cluster."""
    from plait.cluster import Cluster
    from plait.explore.question import FIRST_CLUSTER, Opening
    from plait.predict.cost.model.known import KNOWN
    from plait.predict.cost.model.tables import read_config

    if cluster is not None and cluster.strip() != "local":
        Cluster.parse(cluster)
    name = FIRST_MODEL if config is None else config
    if name in KNOWN and not Path(name).is_file():
        return Opening(KNOWN[name].tables, cluster or FIRST_CLUSTER, name)
    return Opening(read_config(name), cluster, name)


def site_of(opening: Opening) -> Site:
    """The page and its data, whose answers are those of the verbs."""
    from plait.explore.html import page
    from plait.explore.server import Site

    html, policy = page(beginning(opening))
    answers = replies_of(opening)
    answers["/explain.json"] = partial(_reply, _explain)
    return Site(html, answers, policy=policy)


def replies_of(opening: Opening) -> dict[str, Callable[[Choices], WebReply]]:
    """The data of the page by path."""
    answers: dict[str, Callable[[Choices], Answer]] = {
        "/plan.json": partial(_plan, opening),
        "/estimate.json": partial(_estimate, opening),
        "/schedule.json": _schedule,
        "/export.json": _export,
    }
    return {path: partial(_reply, answer) for path, answer in answers.items()}


def in_a_tab() -> Callable[[str, str], str]:
    """The answers of a page without a server: a function of a path and the query of its choices.

    A browser's tab calls it, in which no compiled package is.
    """
    from urllib.parse import parse_qs

    replies = replies_of(opening_of(None, None))

    def answered(path: str, query: str) -> str:
        return replies[path](parse_qs(query, keep_blank_values=True)).text

    return answered


def beginning(opening: Opening) -> JsonMapping:
    """The choices that there are, which the page shows before it asks."""
    from plait.cluster.presets import PRESETS
    from plait.explore.html import rows_behind_bars
    from plait.plan.facts import DEFAULT_SCHEDULE, SCHEDULES
    from plait.predict.cost.frameworks import FRAMEWORKS
    from plait.predict.cost.model.known import KNOWN
    from plait.predict.planner.export import EXPORTERS
    from plait.predict.planner.search import OBJECTIVES

    return {
        "name": opening.name,
        "first": {name: values[-1] for name, values in FIRST.items()},
        "cluster": opening.cluster_name,
        "models": {
            name: {"source": one.source, "seq_len": one.seq_len, "config": one.model}
            for name, one in KNOWN.items()
        },
        "clusters": {
            name: {
                "devices": preset.devices,
                "price": preset.price,
                "memory_gb": preset.memory_gb,
                "tflops": preset.bf16,
            }
            for name, preset in PRESETS.items()
        },
        "frameworks": list(FRAMEWORKS),
        "objectives": OBJECTIVES,
        "schedules": {name: {"virtual": facts.needs_virtual} for name, facts in SCHEDULES.items()},
        "schedule": DEFAULT_SCHEDULE,
        "rows": rows_behind_bars(),
        "seq_len": opening.tables.get("data", {}).get("seq_len"),
        "exports": list(EXPORTERS),
    }


def _reply(answer: Callable[[Choices], Answer], choices: Choices) -> WebReply:
    """The object of `--json`, that of a failure included."""
    from plait.explore.server import WebReply

    try:
        return WebReply(to_json(answer(choices).data or {}))
    except PlaitError as error:
        data = {"error": str(error), "kind": type(error).__name__}
        return WebReply(to_json(data), HTTPStatus.BAD_REQUEST)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        message = f"{type(error).__name__}: {error} (at {last.filename}:{last.lineno})"
        data = {"error": message, "kind": type(error).__name__}
        return WebReply(to_json(data), HTTPStatus.INTERNAL_SERVER_ERROR)


def _parsed(verb: Any, words: list[str]) -> argparse.Namespace:
    """The options of a verb. Errors: `UsageError` with the names that the page has for them."""
    from plait.explore.question import OPTIONS

    parser = Parser("plait explore", "")
    verb.add_arguments(parser)
    try:
        return parser.parse(words)
    except UsageError as error:
        message = str(error).removesuffix("; see plait explore --help")
        names = {option: name for name, option in OPTIONS.items()}
        option, _, rest = message.partition(" ")
        raise UsageError(f"{names.get(option, option)} {rest}") from None


def _plan(opening: Opening, given: Choices) -> Answer:
    from plait.explore.question import known_name

    choices = known_name(given)
    words = opening.words_for(choices, PLAN_OPTIONS)
    return plan.answer(opening.tables_for(choices), _parsed(plan, [opening.name, *words]))


def _estimate(opening: Opening, given: Choices) -> Answer:
    from plait.explore.question import known_name

    choices = known_name(given)
    tables = opening.tables_for(choices)
    words = opening.words_for(choices, ESTIMATE_OPTIONS)
    return estimate.answer(tables, _parsed(estimate, [opening.name, *words]))


def _schedule(given: Choices) -> Answer:
    from plait.explore.question import one
    from plait.plan.facts import SCHEDULES

    name = one(given, "name") or ""
    if name.partition(",v")[0] not in SCHEDULES:
        raise ConfigError(f"no schedule is called '{name}'; {nearest(name, SCHEDULES)}")
    options = ("stages", "microbatches", "virtual")
    words = [f"--{key}={value}" for key in options if (value := one(given, key)) is not None]
    return schedule.run(_parsed(schedule, [name, *words]))


def _explain(given: Choices) -> Answer:
    """The record of a small case, each step with its sentence. It runs, so a tab cannot."""
    from plait.cli.explain import explained
    from plait.cli.explain_page import steps_of
    from plait.explore.question import one

    explanation = explained(one(given, "term") or "")
    record = explanation.as_dict()
    return Answer({**record, **steps_of(explanation, record)})


def _export(given: Choices) -> Answer:
    from plait.explore.question import one

    named = {"--plan": "plan", "--to": "to", "--global-batch": "batch"}
    words = [
        f"{option}={value}"
        for option, key in named.items()
        if (value := one(given, key)) is not None
    ]
    return export.run(_parsed(export, ["plan", *words]))
