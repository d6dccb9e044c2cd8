"""An asynchronous parameter server with bounded staleness.

`staleness` says which gradients may be applied when, `key_server` is the server's side, `weights`
holds a worker's parameters, and `driver` is the worker's side.
"""
