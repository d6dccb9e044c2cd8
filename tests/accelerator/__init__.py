"""The code of every strategy on a GPU, against plain PyTorch on it."""
