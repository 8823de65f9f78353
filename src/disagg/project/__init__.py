"""Steady-state projection of a topology: what a request waits for, what limits the pools, what it costs.

Times are in seconds, rates per second. Functions take and return NumPy arrays that broadcast, so that a sweep over
many operating points is one call.
"""
