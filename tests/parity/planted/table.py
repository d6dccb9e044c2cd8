"""All planted faults by name: those of the first table too, and of the precision of training."""

from __future__ import annotations

from tests.parity import update_faults
from tests.parity.mutations import MUTATIONS, Mutation
from tests.parity.planted import layers, resume, routers, samples, shared, stages, updates
from tests.parity.planted.entry import ONE_DEVICE, Entry

NAMED = {
    "same data on all ranks": ("samples", "dp"),
    "same dropout everywhere": ("dropout", "dp"),
    "streamed panels": ("role", "tp"),
    "rings one by one": ("module", "cp"),
    "large all-reduce": ("replicas", "dp"),
    "last segment": ("replicas", "dp"),
    "shared gradients": ("missing-reduction", "tp"),
    "chunks of experts": ("module", ONE_DEVICE),
    "placed anew": ("module", "ep"),
}
"""Cause and axis of faults that the first table leaves to the smaller plans."""


def of_mutation(one: Mutation) -> Entry:
    """An entry of the first table."""
    cause, axis = NAMED.get(one.name, (one.cause, one.axis))
    return Entry(
        one.name,
        one.plan,
        cause,
        axis,
        one.patches,
        probe=one.probe,
        model=one.model,
        steps=3,
    )


TRAINING = [
    Entry(
        "the fused update decays less",
        "dp2",
        "training-update",
        "precision",
        update_faults.fused_update_decays_less,
        model="even",
        how="training",
    ),
    Entry(
        "masters in bf16",
        "dp2 precision:bf16",
        "training-update",
        "precision",
        update_faults.masters_in_bf16,
        model="even",
        how="training",
    ),
]
NEW = [
    *updates.ENTRIES,
    *samples.ENTRIES,
    *layers.ENTRIES,
    *stages.ENTRIES,
    *resume.ENTRIES,
    *shared.ENTRIES,
    *routers.ENTRIES,
]
ENTRIES: list[Entry] = [*map(of_mutation, MUTATIONS), *NEW, *TRAINING]
BY_NAME = {one.name: one for one in ENTRIES}
