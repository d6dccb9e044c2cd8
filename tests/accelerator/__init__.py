"""The code of every strategy on a GPU, against one device in plain PyTorch on the CPU."""
