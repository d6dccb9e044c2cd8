"""`python -m tests.parity.planted [NAME ...]`: plant every fault, and print what verify answers."""

from __future__ import annotations

import argparse
import sys
import traceback

import torch

from tests.helpers.pool import Pool
from tests.parity.planted.entry import judged
from tests.parity.planted.table import ENTRIES


def main() -> int:
    """0 where each fault is named with its cause and axis."""
    parser = argparse.ArgumentParser(prog="python -m tests.parity.planted", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    wanted = [one for one in ENTRIES if not arguments.names or one.name in arguments.names]
    pool = Pool()
    named = 0
    print("| fault | plan | axis | cause | answer | seconds |\n|---|---|---|---|---|---|")
    for entry in wanted:
        try:
            found = judged(entry, pool.run)
            said = found.wrong or f"{found.cause} ({found.axis})"
            seconds = found.seconds
        except Exception as error:  # a fault that breaks the tool is not named
            said = f"{type(error).__name__}: {error}"
            seconds = 0.0
            if arguments.names:
                traceback.print_exc()
        else:
            named += not found.wrong
        row = (entry.name, entry.plan, entry.axis, entry.cause, said, f"{seconds:.1f}")
        print(f"| {' | '.join(row)} |", flush=True)
    pool.close()
    print(f"{named} of {len(wanted)} planted faults are named with cause and axis")
    return 0 if named == len(wanted) else 1


if __name__ == "__main__":
    sys.exit(main())
