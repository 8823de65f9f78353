"""How long a step takes and how much memory it needs. The one cost model of projection, simulation and emulation."""
