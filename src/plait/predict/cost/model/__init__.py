"""The description of a model: its matrix products, elementwise operations and tensors."""
