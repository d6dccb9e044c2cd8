"""A script of torch alone, run as `__main__`, whose process then leaves at once.

Torch 2.13 with Gloo may abort or wait at the interpreter's end. What the script printed is out by
then, so that its end tells nothing of what the script shows.

    python -m torch.distributed.run --nproc_per_node 2 leave_at_once.py SCRIPT
"""

import os
import runpy
import sys

import torch.distributed as dist

if __name__ == "__main__":
    runpy.run_path(sys.argv[1], run_name="__main__")
    if dist.is_initialized():
        dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
