"""The whole product of the parity table of pipelines, which is too long for every run of the tests;
they take a sample.

    python -m tests.parity.pipeline_product [--only WORD ...]

Every synchronous schedule x p in {2, 4} x m in {1, p, 2p, 7} x {mlp, gpt, llama, resnet}, and x p
in {2, 3} x the tiny Hugging Face models; each cell trains some updates in float64 and is compared
with one device. Exit code 1 when one is off.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator

from plait.errors import ModelError
from plait.parallel.pipeline.schedules import SCHEDULES
from tests.helpers.pool import Pool
from tests.parity.families import DEEP
from tests.parity.harness import TOLERANCE, check

SYNCHRONOUS = [name for name, family in SCHEDULES.items() if not family.facts.asynchronous]
FEWEST = {"interleaved": 1, "dualpipev": 2}  # micro-batches a rank


def cells() -> Iterator[tuple[str, str]]:
    """(plan, family) of every cell that a schedule allows."""
    from tests.parity.hugging_face import HUGGING_FACE

    for schedule in SYNCHRONOUS:
        for family in DEEP:
            for p in (2, 4):
                for m in sorted({1, p, 2 * p, 7}):
                    if m >= FEWEST.get(schedule, 0) * p:
                        yield f"pp{p}:{schedule} mb{m} precision:float64", family
        for family in HUGGING_FACE:
            for p in (2, 3):
                m = max(4, FEWEST.get(schedule, 0) * p)
                yield f"pp{p}:{schedule} mb{m} precision:float64", family


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="*", default=[], help="cells whose plan or family holds one of these words"
    )
    only = parser.parse_args().only
    pool = Pool()
    began = time.monotonic()
    worst = 0.0
    num = 0
    refused = 0
    wrong = []
    for plan, family in cells():
        if only and not any(word in f"{plan} {family}" for word in only):
            continue
        try:
            error = check(pool.run, plan, family, 8).largest
        except (AssertionError, ModelError) as failure:
            text = str(failure)
            if "stages need as many layers" in text:
                refused += 1
                continue
            wrong.append(f"{plan}, {family}: {text.strip().splitlines()[-1]}")
            continue
        num = num + 1
        worst = max(worst, error)
        if error > TOLERANCE:
            wrong.append(f"{plan}, {family}: {error:.1e}")
    pool.close()
    print("\n".join(wrong))
    print(
        f"{num} cells, worst error {worst:.1e}, {len(wrong)} wrong, {refused} refused (more "
        "stages than layers), "
        f"{time.monotonic() - began:.0f} s"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
