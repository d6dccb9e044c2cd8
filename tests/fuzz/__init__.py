"""Hostile input: seeded random damage to everything that the command line reads.

`python -m tests.fuzz --inputs 20000 --seed 7` prints the table of any number of inputs.
"""
