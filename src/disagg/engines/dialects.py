"""Dialects by name, for engines that somebody else started."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import cast

from disagg.engines.base import Dialect, ReadinessProbe
from disagg.engines.registry import ADAPTERS, load_adapter
from disagg.errors import ConfigError, Problem
from disagg.units import comma_list

_VLLM = "disagg.engines.vllm.dialects"
_SGLANG = "disagg.engines.sglang.dialect"


def probe_named(engine: str) -> ReadinessProbe | None:
    """Where engines of this kind tell how busy they are; None if that is not known."""
    return load_adapter(engine).probe() if engine in ADAPTERS else None


def dialect_named(name: str) -> Dialect:
    """The dialect of this name. It is what the engines speak, whoever started them.

    Raises:
        ConfigError: If there is none of this name.
    """
    if name == "sglang":
        return cast("Dialect", import_module(_SGLANG).BootstrapDialect())
    table: dict[str, Callable[[], Dialect]] = import_module(_VLLM).DIALECTS
    if name not in table:
        known = comma_list([n for n in table if n != "auto"])
        raise ConfigError([Problem("dialect", f"there is no dialect {name!r}; known are {known} and sglang")])
    return table[name]()
