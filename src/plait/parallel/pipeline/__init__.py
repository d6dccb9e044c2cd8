"""Split a model in depth.

The pure parts (actions, schedules, lower, verify, simulate, render, partition, text) describe and
import no torch; the runtime obeys.
"""
