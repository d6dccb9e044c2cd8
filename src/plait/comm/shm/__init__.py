"""The shared-memory transport: collectives of ranks that read each other's memory.

`fabric` is the contract, `processes` and `threads` implement it, `collectives` and `mailbox` run on
it, `progress` orders the operations under way.
"""
