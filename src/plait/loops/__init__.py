"""The training loops of other libraries, under plans: `transformers`, Accelerate, Fabric.

Each is a file that imports its library, so that nothing is imported that is not installed.
"""
