"""The emulated engine as an engine of the deployment: a topology with `platform: emulated` starts it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from functools import cache

from pydantic import JsonValue

from disagg.engines.base import (
    Dialect,
    FlagSpec,
    FlagTable,
    Peer,
    PlannedProcess,
    ReadinessProbe,
    StartContext,
    python_module,
)
from disagg.engines.emulated.arguments import add_engine_arguments
from disagg.engines.emulated.settings import Role
from disagg.engines.findings import Findings, error, split, warning
from disagg.engines.flags import base_name, flag_problem
from disagg.engines.kv_events import FLAG as EVENTS_FLAG
from disagg.engines.kv_events import events_config
from disagg.engines.settings import flag_path, stage_settings
from disagg.engines.sglang.dialect import BootstrapDialect
from disagg.engines.vllm import dialects
from disagg.engines.vllm.adapter import VllmAdapter
from disagg.errors import Problem
from disagg.topology.effective import stage_path
from disagg.topology.instances import Instance
from disagg.topology.secrets import is_secret
from disagg.topology.spec import Stage, Topology
from disagg.units import format_id_group

_ROLES = {Stage.PREFILL: Role.PRODUCER, Stage.DECODE: Role.CONSUMER}
_RESERVED = {
    "model": "use --model; all stages need the same one",
    "served-model-name": "use --served-model-name for all stages",
    "host": "use --host; engines follow it",
    "port": "use the stage's ports (--prefill-port, --decode-port)",
    "role": "it follows from the stage",
    "engine-id": "each start gets one of its own",
    "side-channel-host": "it follows the host",
    "side-channel-port": "use link.side_channel_port",
    "kv-lease": "use link.lease_s",
    "dialect": "use link.dialect",
    "bootstrap-port": "use link.bootstrap_port",
    "kv-load-failure-policy": "use link.on_failure",
}
# Fields of a stage that have an effect here, with the flag that carries them.
_TYPED = {
    "max_model_len": "max-model-len",
    "max_num_seqs": "max-num-seqs",
    "max_num_batched_tokens": "max-num-batched-tokens",
    "block_size": "block-size",
}
_NO_EFFECT = (
    "max_seq_len_to_capture",
    "kv_cache_dtype",
    "quantization",
    "override_qaic_config",
    "speculative_config",
)


class EmulatedAdapter:
    """Starts `disagg.engines.emulated`, one process per instance."""

    name = "emulated"

    def flag_table(self) -> FlagTable:
        """The flags of the emulated engine's own command line."""
        return FlagTable("the emulated engine", _flags(), _RESERVED)

    def check(self, topology: Topology, instances: Sequence[Instance]) -> tuple[list[Problem], list[Problem]]:
        """Errors, and what a real engine would heed and this one does not."""
        del instances
        return split(_findings(topology, self.flag_table()))

    def services(self, topology: Topology, instances: Sequence[Instance]) -> tuple[PlannedProcess, ...]:
        """None: prefill keeps its KV itself until decode has read it."""
        del topology, instances
        return ()

    def process(self, topology: Topology, instance: Instance, context: StartContext) -> PlannedProcess:
        """One emulated engine with its HTTP server and side channel."""
        settings = stage_settings(topology, instance.stage)
        role = _role(topology, instance.stage)
        flags: dict[str, JsonValue] = {
            "model": context.model,
            "served-model-name": list(context.served_model_names),
            "host": instance.host,
            "port": instance.port,
            "role": role.value,
            "engine-id": context.incarnation,
        }
        ports = {"http": instance.port}
        if role is not Role.NONE:
            flags["side-channel-host"] = dialects.reachable(instance.host)
            flags["side-channel-port"] = ports["side-channel"] = instance.side_channel_port
            if instance.bootstrap_port:
                flags["bootstrap-port"] = ports["bootstrap"] = instance.bootstrap_port
            if topology.link.dialect != "auto":
                flags["dialect"] = topology.link.dialect
            flags["kv-lease"] = topology.link.lease_s
            flags["kv-load-failure-policy"] = topology.link.on_failure
        flags |= {flag: getattr(settings, field) for field, flag in _TYPED.items()}
        events = events_config(topology, instance.stage, context.run_dir)
        flags[EVENTS_FLAG] = None if events is None else json.dumps(events)
        flags |= {flag: value for flag, value in settings.engine_args.items() if flag in _flags()}
        words = [word for flag, value in flags.items() for word in _words(flag, value)]
        devices = f"emulated devices {format_id_group(instance.devices)}" if instance.devices else "no devices"
        return PlannedProcess(
            name=instance.name,
            argv=(*python_module("disagg.engines.emulated"), *words),
            env=settings.env,
            devices=devices,
            ports=ports,
            notes=("emulated: answers are toy text at a set pace, not a model's",),
        )

    def dialect(self, topology: Topology) -> Dialect:
        """The one that the topology names, byte for byte as for the real engine."""
        name = topology.link.dialect
        return BootstrapDialect() if name == "sglang" else dialects.DIALECTS[name]()

    def peer(self, topology: Topology, instance: Instance, incarnation: str) -> Peer:
        """What the emulated protocols need to know, as for the real engine."""
        return dialects.peer(topology, instance, incarnation)

    def probe(self) -> ReadinessProbe:
        """The endpoints and metric names of the engine that is emulated."""
        return VllmAdapter().probe()


def _role(topology: Topology, stage: Stage) -> Role:
    if topology.prefill is None or topology.decode is None:
        return Role.NONE
    return _ROLES.get(stage, Role.NONE)


def _words(flag: str, value: JsonValue) -> Iterable[str]:
    match value:
        case None:
            return ()
        case True:
            return (f"--{flag}",)
        case False:
            return (f"--no-{flag}",)
        case list():
            return (f"--{flag}", *map(str, value))
        case _:
            return (f"--{flag}", str(value))


@cache
def _flags() -> dict[str, FlagSpec]:
    """The command line's flags, read from its own parser."""
    parser = argparse.ArgumentParser(add_help=False)
    add_engine_arguments(parser)
    return {action.option_strings[0].removeprefix("--"): _spec(action) for action in parser._actions}


def _spec(action: argparse.Action) -> FlagSpec:
    text = action.help or ""
    choices = tuple(str(choice) for choice in action.choices or ())
    if isinstance(action, argparse.BooleanOptionalAction):
        return FlagSpec("bool", help=text)
    if action.nargs == "+":
        return FlagSpec("list", help=text)
    if action.type is int:
        return FlagSpec("int", help=text)
    if action.type is float:
        return FlagSpec("float", help=text)
    return FlagSpec("str", choices, text, structured=action.dest == "fault")


def _findings(topology: Topology, table: FlagTable) -> Findings:
    if topology.encode is not None:
        yield error("encode", "there is no emulated encode stage in this release; leave the encode pool out")
    if topology.kv_store is not None:
        yield error("kv_store", "a shared KV store is not emulated in this release; leave it out")
    if topology.link.transport == "shared-memory":
        yield error("link.transport", "emulated engines speak NIXL's protocol; choose nixl or auto")
    real = VllmAdapter().flag_table()
    for stage in topology.stages():
        settings = stage_settings(topology, stage)
        for field in _NO_EFFECT:
            if getattr(settings, field) is not None:
                where = stage_path(topology, stage, field)
                yield warning(where, "has no effect on an emulated engine")
        pool = topology.pool(stage)
        for name in settings.env:
            if is_secret(name):
                where = f"{stage}.env.{name}" if pool is not None and name in pool.env else f"env.{name}"
                yield error(
                    where, "a secret in a topology would be printed and stored; export it, engines inherit it"
                )
        for flag, value in settings.engine_args.items():
            where = flag_path(topology, stage, flag)
            known = base_name(flag) in table.flags or base_name(flag) in table.reserved
            if not known and base_name(flag) in real.flags:
                yield warning(where, f"--{flag} is a flag of {real.engine}, without effect on an emulated engine")
                continue
            problem = flag_problem(table, flag, value, allow_unknown=topology.allow_unknown_engine_args)
            if problem is not None:
                yield error(where, problem)
    yield from _block_sizes(topology)


def _block_sizes(topology: Topology) -> Findings:
    if topology.prefill is None or topology.decode is None:
        return
    prefill, decode = (_block_size(topology, stage) for stage in (Stage.PREFILL, Stage.DECODE))
    if prefill != decode:
        yield error(
            stage_path(topology, Stage.DECODE, "block_size"),
            f"prefill has KV blocks of {prefill} tokens and decode of {decode}; a handoff needs equal ones",
        )


def _block_size(topology: Topology, stage: Stage) -> JsonValue:
    settings = stage_settings(topology, stage)
    return settings.engine_args.get("block-size", settings.block_size) or "the default number of"
