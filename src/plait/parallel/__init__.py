"""Every way of splitting one training step over ranks, a room each: data, tensor, pipeline, expert,
context. The rooms never import each other; the engine composes them.
"""
