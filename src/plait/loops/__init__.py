"""The training loops of other libraries, under plans: `transformers`, TRL, Accelerate, Lightning.

Each is a file that imports its library, so that nothing is imported that is not installed.
"""
