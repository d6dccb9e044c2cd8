"""The stages of an engine: where a model is cut, the stages of a rank, and their actions."""
