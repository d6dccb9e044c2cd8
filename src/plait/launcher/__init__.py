"""Start local ranks, or join the world that torchrun started.

The ranks are processes of torch's own elastic agent. This room adds what a user meets: results as a
list, the first error as itself, and nothing left running. Nothing of the engine is known here.
"""

from __future__ import annotations

from plait.launcher.api import JoinedWorld, is_restart, joined_world, launch, run_id

__all__ = ["JoinedWorld", "is_restart", "joined_world", "launch", "run_id"]
