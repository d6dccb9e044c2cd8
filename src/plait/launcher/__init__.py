"""Start local ranks, or join the world that torchrun started.

The ranks are processes of torch's own elastic agent; what is added here is what a user meets:
results come back as a list, the first error comes back as itself, and nothing is left running.
Nothing of the engine is known here.
"""

from __future__ import annotations

from plait.launcher.door import JoinedWorld, joined_world, launch

__all__ = ["JoinedWorld", "joined_world", "launch"]
