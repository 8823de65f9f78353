"""Who serves a request: filter, score, pick, over snapshots.

Everything here is a pure function of its arguments, so the same policy object drives the router and a simulator.
"""
