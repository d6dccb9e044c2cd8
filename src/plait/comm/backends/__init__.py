"""How bytes move: one file a way. Differences between NCCL, Gloo and shared memory live here and
in `comm.shm`, and nowhere else.
"""
