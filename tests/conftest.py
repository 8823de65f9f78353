"""Settings that hold for all tests."""

import os
from pathlib import Path

from hypothesis import HealthCheck, settings

# Machines are shared and noisy: how long one example takes says nothing about the code.
_BASE = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
# The same examples in each run, so that a change is judged by itself; `DISAGG_EXPLORE=1` looks for new ones.
settings.register_profile("disagg", _BASE, derandomize=True)
settings.register_profile("explore", _BASE)
settings.load_profile("explore" if os.environ.get("DISAGG_EXPLORE") else "disagg")

# Processes that tests start run the code that is tested, whichever checkout is installed.
_ROOT = Path(__file__).parents[1]
_PATHS = [str(_ROOT / "src"), str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
os.environ["PYTHONPATH"] = os.pathsep.join(_PATHS)
