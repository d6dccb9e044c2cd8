"""A walk over the frameworks' own features: each is judged by verify with the installed version.

A feature is used as its documentation says. What verify says no to is then looked at without
plait. An error that a script of its own shows is in `atlas/new`.
"""
