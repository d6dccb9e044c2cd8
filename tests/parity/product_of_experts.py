"""The whole product of plans, routers and mixtures in float64, of which the suite takes a sample;
by hand, in a few minutes.

    python -m tests.parity.product_of_experts [--plans "dp2 ep2" ...] [--families mixtral-drop ...]

Each cell is the largest relative error of loss (auxiliary losses in it), gradient norm, every
gradient and every parameter over three updates, against one device. Exits with 1 if a cell is above
the tolerance.
"""

from __future__ import annotations

import argparse
import functools
import time

from tests.helpers.pool import Pool
from tests.parity.families import EXPERT_FAMILIES, ROUTERS
from tests.parity.harness import TOLERANCE, check

PLANS = (
    "dp2 ep2",
    "dp4 ep4",
    "dp2 ep2 tp2",
    "dp4:zero2 ep2",
    "pp2:1f1b dp2 ep2 mb4",
    "cp2:ring",
    "cp4:ring",
    "cp2:ulysses",
    "cp2:ring tp2 dp2:zero1",
    # beyond what was asked for
    "dp2:zero1 ep2 mb2",
    "dp4:zero3 ep2",
    "dp4:server ep2",
    "cp2:ring dp2 ep4",
)
NUM_SAMPLES = 5
PATIENCE_SECONDS = 300.0  # a busy machine is no failure


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plans", nargs="+", default=list(PLANS))
    parser.add_argument("--families", nargs="+", default=list(EXPERT_FAMILIES))
    args = parser.parse_args()
    pool = Pool()
    worst = 0.0
    began = time.perf_counter()
    run = functools.partial(
        pool.run, timeout_seconds=PATIENCE_SECONDS, group_timeout_seconds=PATIENCE_SECONDS
    )
    kinds = list(args.families)
    print("| plan | " + " | ".join(kinds) + " |")
    print("|---|" + "---|" * len(kinds))
    try:
        for plan in args.plans:
            cells = []
            for family in kinds:
                outcome = check(run, f"{plan} precision:float64", family, NUM_SAMPLES)
                worst = max(worst, outcome.largest)
                cells.append(
                    f"{outcome.largest:.0e}" + ("" if outcome.largest <= TOLERANCE else " !")
                )
            print(f"| {plan} | " + " | ".join(cells) + " |", flush=True)
    finally:
        pool.close()
    num_cells = len(args.plans) * len(kinds)
    print(
        f"\n{num_cells} cells, {len(ROUTERS)} routers; worst {worst:.1e}; "
        f"{time.perf_counter() - began:.0f} s"
    )
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    raise SystemExit(main())
