"""Unit tests of the rooms of this name."""
