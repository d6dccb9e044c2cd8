"""What products of axes cost: memory of activations by stage, and where the time goes as ranks are
added.
"""
