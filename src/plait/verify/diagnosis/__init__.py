"""Diagnosis: sentences about the cause of a difference, and the smallest plan that still fails."""
