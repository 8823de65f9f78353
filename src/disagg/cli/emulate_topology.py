"""`disagg emulate --config`: every instance of a topology in one process, and the file that routes to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import yaml

from disagg.engines.base import EngineAdapter
from disagg.engines.emulated.command import MODULE, Described, read_command
from disagg.engines.emulated.instance import Instance
from disagg.engines.registry import adapter_for
from disagg.errors import ConfigError, PreparationError, Problem
from disagg.serve.deployment import Deployment, settle
from disagg.topology.load import load_file
from disagg.topology.spec import Platform, Topology


@dataclass(frozen=True, slots=True)
class EmulatedTopology:
    """A topology, laid out as emulated engines.

    Attributes:
        deployment: The layout.
        engines: One for each instance, in the same order.
        warnings: What a real engine would heed and these do not.
    """

    deployment: Deployment
    engines: tuple[Described, ...]
    warnings: tuple[Problem, ...]

    def names(self) -> list[str]:
        """Names of the instances."""
        return [instance.name for instance in self.deployment.instances]


def lay_out(config: str, words: Sequence[str]) -> EmulatedTopology:
    """Read a topology file and lay it out, whatever platform it names.

    Args:
        config: Path of the file.
        words: Further engine flags for every instance; they win over the file.

    Raises:
        ConfigError: With everything that is wrong with the file, the flags, or the machine's ports.
    """
    loaded = load_file(config, auto=Platform.EMULATED)
    topology = loaded.topology.model_copy(update={"platform": Platform.EMULATED})
    adapter = adapter_for(Platform.EMULATED)
    _check_words(adapter, words)
    deployment = settle(topology, adapter, topology.model)
    errors, warnings = adapter.check(topology, deployment.instances)
    if errors:
        raise ConfigError(errors)
    engines = []
    for number, instance in enumerate(deployment.instances):
        argv = adapter.process(topology, instance, deployment.context(str(uuid4()), "")).argv
        engine = read_command([*argv[argv.index(MODULE) + 1 :], *words])
        events = engine.settings.kv_events.numbered(number)
        engines.append(replace(engine, settings=replace(engine.settings, kv_events=events)))
    return EmulatedTopology(deployment, tuple(engines), (*loaded.warnings, *warnings))


def _check_words(adapter: EngineAdapter, words: Sequence[str]) -> None:
    reserved = adapter.flag_table().reserved
    given = [word.partition("=")[0].removeprefix("--") for word in words if word.startswith("--")]
    problems = [Problem(f"--{name}", f"the topology sets it: {reserved[name]}") for name in given if name in reserved]
    if problems:
        raise ConfigError(problems)


def write_route_file(path: str, layout: EmulatedTopology, instances: Sequence[Instance]) -> None:
    """Write what `disagg route --config` needs to route to these engines.

    Raises:
        PreparationError: If the file cannot be written.
    """
    try:
        Path(path).write_text(yaml.safe_dump(_route_file(layout, instances), sort_keys=False), encoding="utf-8")
    except OSError as error:
        raise PreparationError(
            f"The route file {path} cannot be written: {error}.", hint="Name another with --route-file."
        ) from error


def _route_file(layout: EmulatedTopology, instances: Sequence[Instance]) -> dict[str, Any]:
    topology = layout.deployment.topology
    out: dict[str, Any] = {"model": topology.model}
    if topology.served_model_name:
        out["served_model_name"] = list(topology.served_model_name)
    out |= {"engine": "emulated", "dialect": topology.link.dialect, "host": topology.host, "port": topology.port}
    for planned, running in zip(layout.deployment.instances, instances, strict=True):
        entry = _endpoint(planned.name, topology, running)
        out.setdefault(planned.stage.value, []).append(entry)
    out["lease_s"] = topology.link.lease_s
    router = topology.router.model_dump(mode="json", exclude_defaults=True)
    if router:
        out["router"] = router
    return out


def _endpoint(name: str, topology: Topology, running: Instance) -> dict[str, Any]:
    where, dialect = running.addresses, topology.link.dialect
    entry: dict[str, Any] = {"url": running.url, "name": name}
    if where.bootstrap_port and dialect in {"mooncake", "sglang"} and name.startswith("prefill"):
        entry["bootstrap_port"] = where.bootstrap_port
    if dialect in {"nixl-push", "lmcache"}:
        entry |= {"side_channel_host": where.side_channel_host, "side_channel_port": where.side_channel_port}
    if dialect == "lmcache":
        entry["alloc_port"] = where.side_channel_port
    if dialect == "nixl-push":
        entry["engine_id"] = running.settings.engine_id
    return entry
