"""One GPU against a loop by hand, and every strategy's CUDA code against one rank."""
