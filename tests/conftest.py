"""Settings that hold for all tests."""

import os
from pathlib import Path

from hypothesis import HealthCheck, settings

# Machines are shared and noisy: how long one example takes says nothing about the code.
settings.register_profile("disagg", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("disagg")

# Processes that tests start run the code that is tested, whichever checkout is installed.
_ROOT = Path(__file__).parents[1]
_PATHS = [str(_ROOT / "src"), str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
os.environ["PYTHONPATH"] = os.pathsep.join(_PATHS)
