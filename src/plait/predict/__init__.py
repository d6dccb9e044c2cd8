"""Time, memory and traffic of a plan before it runs: the cost model, the planner, the probe."""
