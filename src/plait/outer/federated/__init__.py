"""An outer loop over engines: clients keep their data, and what travels are updates of a model.

A client is a plait engine, so it may itself be parallel. The server's side (`strategies`,
`sampling`, `secure`, `privacy`) works on flat vectors and knows neither models nor data.
`simulation` runs rounds in this process or in a pool of processes. `flower` puts the same client
and strategies behind Flower's server and clients, for real deployments.
"""

from __future__ import annotations
