"""The CPU cures, against stand-ins for the modules of vLLM and NIXL that they change."""

import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from disagg.engines.vllm import plugin


class FakeConfig:
    """Stands for NIXL's native configuration object, whose Python wrapper always writes a delay of 0."""

    pthrDelay = 0  # noqa: N815 - NIXL's name


def fake_nixl(monkeypatch: pytest.MonkeyPatch, config_class: type = FakeConfig) -> tuple[type, list[Any]]:
    """Install a module with a NIXL agent class; return the class and the list of configurations that it used."""
    used: list[Any] = []
    module = ModuleType("fake_nixl_api")
    bindings = SimpleNamespace(nixlAgentConfig=config_class, nixlAgent=lambda name, config: used.append(config))

    class Agent:
        def __init__(self, name: str) -> None:
            config = bindings.nixlAgentConfig()
            config.pthrDelay = 0
            bindings.nixlAgent(name, config)

    Agent.__module__ = module.__name__
    module.nixlBind = bindings  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return Agent, used


def fake_nixl_utils(agent: type | None) -> Any:
    """Stand for `vllm.distributed.nixl_utils`, which loads NIXL when its attribute is first asked for."""
    module = ModuleType("fake_nixl_utils")
    module.loads = []  # type: ignore[attr-defined]

    def load(name: str) -> Any:
        if name != "NixlWrapper":
            raise AttributeError(name)
        module.loads.append(name)
        return agent

    module.__getattr__ = load  # type: ignore[method-assign]
    return module


def install_vllm(monkeypatch: pytest.MonkeyPatch, *, is_cpu: bool, agent: type | None = None) -> tuple[Any, Any]:
    """Install just enough of vLLM for `register`; return its modules shm_broadcast and nixl_utils."""
    shm_broadcast: Any = ModuleType("shm_broadcast")
    shm_broadcast.sched_yield = print
    shm_broadcast.SHM_READER_RECHECK_INTERVAL_MS = 5000
    nixl_utils = fake_nixl_utils(agent)
    platforms: Any = ModuleType("vllm.platforms")
    platforms.current_platform = SimpleNamespace(is_cpu=lambda: is_cpu)
    distributed: Any = ModuleType("vllm.distributed")
    distributed.nixl_utils = nixl_utils
    communicators: Any = ModuleType("vllm.distributed.device_communicators")
    communicators.shm_broadcast = shm_broadcast
    for module in (ModuleType("vllm"), platforms, distributed, communicators):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return shm_broadcast, nixl_utils


def test_on_another_platform_nothing_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU server that has this package installed runs unchanged."""
    shm_broadcast, nixl_utils = install_vllm(monkeypatch, is_cpu=False)
    before = nixl_utils.__getattr__
    plugin.register()
    assert shm_broadcast.sched_yield is print
    assert shm_broadcast.SHM_READER_RECHECK_INTERVAL_MS == 5000
    assert nixl_utils.__getattr__ is before


def test_on_cpu_a_waiting_reader_gives_its_core_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop that starved other engines sleeps instead, and looks again after 20 ms at most."""
    slept: list[float] = []
    shm_broadcast, _ = install_vllm(monkeypatch, is_cpu=True)
    plugin.register()
    monkeypatch.setattr("time.sleep", slept.append)
    shm_broadcast.sched_yield()
    assert slept == [100e-6]
    assert shm_broadcast.SHM_READER_RECHECK_INTERVAL_MS == 20


def test_nixl_is_loaded_only_when_a_connector_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes without a connector do not pay for the import, and vLLM sets UCX's environment before it."""
    agent, _ = fake_nixl(monkeypatch)
    _, nixl_utils = install_vllm(monkeypatch, is_cpu=True, agent=agent)
    plugin.register()
    assert nixl_utils.loads == []
    assert nixl_utils.NixlWrapper is agent


def test_a_nixl_agent_polls_with_a_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The progress thread of an agent made after the cure does not spin, although NIXL writes a delay of 0."""
    agent, used = fake_nixl(monkeypatch)
    _, nixl_utils = install_vllm(monkeypatch, is_cpu=True, agent=agent)
    plugin.register()
    nixl_utils.NixlWrapper("engine")
    assert [config.pthrDelay for config in used] == [1000]


def test_an_agent_class_that_was_loaded_before_is_cured_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order in which vLLM loads plug-ins and NIXL does not matter."""
    agent, used = fake_nixl(monkeypatch)
    _, nixl_utils = install_vllm(monkeypatch, is_cpu=True)
    nixl_utils.NixlWrapper = agent
    plugin.register()
    agent("engine")
    assert used[0].pthrDelay == 1000


def test_registering_again_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM may load its plug-ins several times in one process; cures do not pile up."""
    agent, used = fake_nixl(monkeypatch)
    shm_broadcast, nixl_utils = install_vllm(monkeypatch, is_cpu=True, agent=agent)
    plugin.register()
    once = shm_broadcast.sched_yield, nixl_utils.__getattr__
    plugin.register()
    assert (shm_broadcast.sched_yield, nixl_utils.__getattr__) == once
    plugin.delay_progress_thread(agent)
    plugin.delay_progress_thread(agent)
    agent("engine")
    assert len(used) == 1


def test_nixl_that_is_not_installed_is_left_to_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM represents a missing NIXL by None and reports it itself."""
    _, nixl_utils = install_vllm(monkeypatch, is_cpu=True, agent=None)
    plugin.register()
    assert nixl_utils.NixlWrapper is None


@pytest.mark.parametrize(
    ("attribute", "consequence"),
    [
        ("sched_yield", "stall for seconds"),
        ("SHM_READER_RECHECK_INTERVAL_MS", "lost wake-up"),
    ],
)
def test_a_version_without_the_attribute_is_named_and_survives(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, attribute: str, consequence: str
) -> None:
    """On an unknown vLLM the cure is left out with a warning that tells the version; the others still apply."""
    shm_broadcast, _ = install_vllm(monkeypatch, is_cpu=True)
    delattr(shm_broadcast, attribute)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "9.9")
    with caplog.at_level(logging.WARNING):
        plugin.register()
    assert len(caplog.records) == 1
    assert "vllm 9.9" in caplog.text
    assert consequence in caplog.text
    assert not hasattr(shm_broadcast, attribute)


def test_a_nixl_without_the_delay_is_named_and_survives(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A NIXL whose configuration has no such field works as it would without the cure, and a warning says so."""

    class OtherConfig:
        pass

    agent, used = fake_nixl(monkeypatch, OtherConfig)
    with caplog.at_level(logging.WARNING):
        plugin.delay_progress_thread(agent)
    assert "pthrDelay" in caplog.text
    agent("engine")
    assert len(used) == 1
