"""How the source reads, in numbers: what a reader meets on the way, and what the text is made
of.
"""
