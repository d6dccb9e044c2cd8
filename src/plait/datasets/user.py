"""Data of the user's own: `python = "module:function"`, a function without parameters that returns
(input, target) pairs.
"""

from __future__ import annotations

from collections.abc import Mapping

from plait.datasets.sample_set import SampleSet
from plait.errors import DataError, PlaitError
from plait.reference import load

_TARGETS = ("label", "targets", "target", "y")


def make(python: str) -> SampleSet:
    """Call the function. It returns a `Dataset` or a sequence, which has a length and a pair
    (input, target) at each index.

    Raises:
        DataError: the first sample is no pair.
    """
    data = _call(python)
    sample = data[0]
    if not (isinstance(sample, tuple | list) and len(sample) == 2):
        cure = _as_pair(sample) if isinstance(sample, Mapping) else ""
        raise DataError(
            f"python = {python!r}: sample 0 is a {type(sample).__name__}, not a pair (input, "
            f"target){cure}"
        )
    return data


def _as_pair(sample: Mapping[object, object]) -> str:
    """The clause on the pair that a sample by names could be."""
    if "labels" in sample:  # a model of `transformers` takes them as well
        return "; return (sample, sample['labels'])"
    keys = [str(key) for key in sample]
    target = next((key for key in _TARGETS if key in sample), None)
    other = ", ".join(f"{key!r}: sample[{key!r}]" for key in keys if key != target)
    if target is None:
        return f"; its keys are {', '.join(keys)}: return what the model takes, and the target"
    return f"; return ({{{other}}}, sample[{target!r}])"


def documents(python: str) -> SampleSet:
    """Call the function. It returns documents for packing, which have a length and a mapping with
    `input_ids` at each index.

    Raises:
        DataError: the first document has no `input_ids`.
    """
    data = _call(python)
    first = data[0]
    if not (isinstance(first, Mapping) and "input_ids" in first):
        raise DataError(
            f"python = {python!r}: document 0 is a {type(first).__name__}, and packing needs a "
            "mapping with input_ids"
        )
    return data


def _call(python: str) -> SampleSet:
    """The function's data, which has a length and samples."""
    function = load(python, DataError)
    try:
        data = function()
    except PlaitError:
        raise
    except Exception as failure:
        raise DataError(
            f"python = {python!r} failed: {type(failure).__name__}: {failure}"
        ) from failure
    if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise DataError(
            f"python = {python!r} returned a {type(data).__name__}; it must have a length and "
            "samples by index"
        )
    if len(data) == 0:
        raise DataError(f"python = {python!r} returned no samples")
    return data
