"""All that a rank of a run loads, so that one process can load it before it makes the ranks."""

import plait.config
import plait.engine.build
import plait.engine.state.saving
import plait.engine.state.snapshots
import plait.run.assemble
import plait.run.checkpoints
import plait.run.evaluation
import plait.run.kept
import plait.run.loop
import plait.run.metrics
import plait.run.observing
import plait.run.replicas
import plait.run.restarts
import plait.run.sources  # noqa: F401 - loading is what it is for
