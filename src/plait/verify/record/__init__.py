"""Records of a run: what each step leaves behind on every rank, and how far two records are
apart.
"""
