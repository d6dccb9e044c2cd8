"""Training steps as people write them with other frameworks, right ones and wrong ones."""
