"""Configs of other frameworks: how many of their keys are mapped, named, or lost."""
