"""Roles of a model without a table: from the shapes and the dataflow of one forward.

`record` runs the forward once without weights. `demands` follows what a cut input of a linear layer
asks of all before it. `choose` picks the cuts that hold together. `rehearse` runs the forward with
the sizes of one rank. `table` writes the roles.
"""
