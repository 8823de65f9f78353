"""Settings that hold for all tests."""

from hypothesis import HealthCheck, settings

# Machines are shared and noisy: how long one example takes says nothing about the code.
settings.register_profile("disagg", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("disagg")
