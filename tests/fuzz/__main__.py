"""`python -m tests.fuzz`: the table of so many hostile inputs. Exit code 1 when one had no answer.

python -m tests.fuzz --inputs 20000 --seed 7 [--kinds schedule config] [--json]
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import tempfile
from pathlib import Path

from tests.fuzz.harness import as_json, fuzz
from tests.fuzz.inputs import KINDS

MEMORY_BYTES = 16 << 30
"""Address space that the process may take: an absurd size must not take the machine's."""


def main() -> int:
    """Run, print, and answer whether every input had a sentence in time."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--inputs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", default=[], choices=list(KINDS))
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HOME"] = folder  # where measurements of the machine are kept
        os.chdir(folder)  # where runs go that do not say
        result = fuzz(arguments.inputs, arguments.seed, Path(folder), tuple(arguments.kinds))
    if arguments.json:
        print(as_json(result))
    else:
        print(result.table())
        print(f"slowest: {result.slowest[0]:.1f} s, {result.slowest[1]}")
        for fault in result.faults:
            print(f"\n{fault['kind']} {fault['input']}: {fault['words']}\n{fault['report']}")
    return 1 if result.faults else 0


if __name__ == "__main__":
    sys.exit(main())
