"""Which engine runs on which platform. Adapters load on demand, so a broken one cannot break the others."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import cast

from disagg.engines.base import EngineAdapter
from disagg.errors import ConfigError, Problem
from disagg.topology.spec import Platform
from disagg.units import comma_list

ADAPTERS: Mapping[str, str] = MappingProxyType(
    {
        "vllm": "disagg.engines.vllm.adapter:VllmAdapter",
        "qaic": "disagg.engines.qaic.adapter:QaicAdapter",
        "emulated": "disagg.engines.emulated.adapter:EmulatedAdapter",
    }
)
"""Class of each adapter by name, as ``module:class``."""

ENGINE_OF: Mapping[Platform, str] = MappingProxyType(
    {
        Platform.CPU: "vllm",
        Platform.CUDA: "vllm",
        Platform.ROCM: "vllm",
        Platform.QAIC: "qaic",
        Platform.EMULATED: "emulated",
    }
)
"""Adapter of each platform. `auto` is not here: it is resolved against the machine before an adapter is chosen."""


def adapter_for(platform: Platform) -> EngineAdapter:
    """The adapter of a platform.

    Raises:
        ConfigError: If no engine runs on it, which for `auto` means that it was not resolved.
    """
    name = ENGINE_OF.get(platform)
    if name is None:
        known = comma_list(ENGINE_OF)
        raise ConfigError([Problem("platform", f"{platform} names no engine; choose one of {known}")])
    return load_adapter(name)


def load_adapter(name: str) -> EngineAdapter:
    """The adapter of this name.

    Raises:
        ConfigError: If there is none of this name.
    """
    target = ADAPTERS.get(name)
    if target is None:
        raise ConfigError([Problem("platform", f"no engine adapter {name!r}; there are {comma_list(ADAPTERS)}")])
    module, _, attribute = target.partition(":")
    return cast("EngineAdapter", getattr(import_module(module), attribute)())
