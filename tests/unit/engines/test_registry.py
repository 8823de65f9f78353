"""Platform → adapter."""

from __future__ import annotations

import pytest

from disagg.engines import registry
from disagg.engines.qaic.adapter import QaicAdapter
from disagg.engines.vllm.adapter import VllmAdapter
from disagg.errors import ConfigError
from disagg.topology.spec import Platform


@pytest.mark.parametrize("platform", [Platform.CPU, Platform.CUDA, Platform.ROCM])
def test_vllm_runs_on_cpu_cuda_and_rocm(platform: Platform) -> None:
    """The three platforms share one adapter."""
    assert isinstance(registry.adapter_for(platform), VllmAdapter)


def test_qaic_has_its_own_adapter() -> None:
    """Cloud AI is started and spoken to in another way."""
    assert isinstance(registry.adapter_for(Platform.QAIC), QaicAdapter)


def test_every_platform_but_auto_has_an_adapter_that_exists() -> None:
    """A platform that a topology may name must not end in a missing module name."""
    assert set(registry.ENGINE_OF) == set(Platform) - {Platform.AUTO}
    assert set(registry.ENGINE_OF.values()) == set(registry.ADAPTERS)


def test_an_unresolved_platform_is_refused_with_the_choices() -> None:
    """`auto` is resolved against the machine before; reaching this far it names no engine."""
    with pytest.raises(ConfigError, match="cpu, cuda, rocm, qaic, emulated"):
        registry.adapter_for(Platform.AUTO)


def test_an_unknown_adapter_is_refused_with_the_list() -> None:
    """The message has the valid names."""
    with pytest.raises(ConfigError, match="vllm, qaic, emulated"):
        registry.load_adapter("sglang")
