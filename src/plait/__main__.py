"""`python -m plait`: the command line, for where its script is not on the path."""

from __future__ import annotations

from plait.cli import command

if __name__ == "__main__":
    command()
