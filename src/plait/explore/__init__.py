"""The page of plans: a small server on loopback, the questions that it takes, the known models.

The room knows neither the planner's search nor the command line. `plait.cli.explore` hands it the
verbs that answer.
"""
