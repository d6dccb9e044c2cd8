"""Shares of samples for ranks that are not equally fast."""
