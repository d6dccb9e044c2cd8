"""Run the tests that failed once more, alone, where a busy machine may be the cause.

    .venv/bin/python .ci/second_try.py

Tests that start processes, open sockets or wait for a page can lose a race on a busy machine. At
most three of them are tried a second time, and each is named. A test outside those folders judges
numbers, laws or units, and gets no second try.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

FAILED = Path(".pytest_cache/v/cache/lastfailed")
MOST = 3
RACING = ("browser", "cli", "docs", "fault", "federated", "loops")


def main() -> int:
    """The exit status of the second try, or 1 where there is none."""
    failed = sorted(json.loads(FAILED.read_text())) if FAILED.exists() else []
    folders = {Path(test.partition("::")[0]).parts[1] for test in failed}
    if not failed or len(failed) > MOST or not folders <= set(RACING):
        print(f"== no second try for {len(failed)} failed tests of {', '.join(sorted(folders))}")
        return 1
    print(f"== a second try of {len(failed)} tests, alone", *failed, sep="\n")
    again = [sys.executable, "-m", "pytest", "-m", "long or not long", *failed]
    status = subprocess.run(again, check=False).returncode
    if status == 0:
        print("== red once and green alone; each of these has a race to mend", *failed, sep="\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
