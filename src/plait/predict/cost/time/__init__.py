"""Seconds of a step: computing, communication, and the replay of a schedule."""
