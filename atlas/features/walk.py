"""The walk: every feature of a group on ranks that are started once, and its answer."""

from __future__ import annotations

import importlib
import warnings

from atlas.features.feature import Feature
from plait import comm
from plait.comm import World
from plait.errors import PlaitError
from plait.launcher import joined_world, launch
from plait.mesh import Mesh
from plait.verify.outside.trial import TIMEOUT_SECONDS, on_ranks

Row = tuple[str, str]


def features_of(group: str) -> list[Feature]:
    """The features of a group."""
    found: list[Feature] = importlib.import_module(f"atlas.features.{group}").FEATURES
    return found


def judged(world: World, feature: Feature) -> str:
    """The answer in one line. Collective."""
    try:
        report = on_ranks(world, feature.trial)
    except Exception as error:  # every error of a framework is an answer
        lines = str(error).strip().splitlines() or [""]
        return f"{type(error).__name__}: {lines[0]}"
    if report.ok:
        return "equal"
    first = report.findings[0].text if report.findings else report.text().splitlines()[0]
    return f"not equal: {first}"


def _rank_main(group: str, names: list[str], nproc: int) -> list[Row]:
    joined = joined_world()
    assert joined is not None
    warnings.simplefilter("ignore")
    world = comm.init(
        Mesh(dp=joined.world_size), backend="gloo", timeout_seconds=TIMEOUT_SECONDS, device="cpu"
    )
    rows = []
    for feature in features_of(group):
        if feature.name in names:
            answers = world.axis("world").gather_objects(judged(world, feature))
            rows.append((feature.name, next((one for one in answers if one != "equal"), "equal")))
            if world.rank == 0:
                print(f"{group:<10} {rows[-1][0]:<48} {rows[-1][1]}", flush=True)
    world.close(together=True)
    return rows


def walked(group: str, words: str = "") -> list[Row]:
    """Every feature of a group whose name has the words, with its answer.

    A module with `FRESH` is of a package that keeps the world it has met first, so each of its
    features has ranks of its own.
    """
    rows: list[Row] = []
    features = [one for one in features_of(group) if words in one.name]
    if getattr(importlib.import_module(f"atlas.features.{group}"), "FRESH", False):
        for one in features:
            try:
                rows += launch(_rank_main, group, [one.name], one.nproc, nproc=one.nproc)[0]
            except PlaitError as error:
                rows.append((one.name, str(error).strip().splitlines()[0]))
                print(f"{group:<10} {one.name:<48} {rows[-1][1]}", flush=True)
        return rows
    for nproc in sorted({one.nproc for one in features}):
        names = [one.name for one in features if one.nproc == nproc]
        rows += launch(_rank_main, group, names, nproc, nproc=nproc)[0]
    return rows
