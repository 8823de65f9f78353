"""A small engine for tests of the command line."""

from __future__ import annotations

from disagg.cli.flags import build_topology
from disagg.engines.base import FlagSpec, FlagTable
from disagg.errors import ConfigError
from disagg.topology.load import LoadedTopology
from disagg.topology.spec import Platform

TABLE = FlagTable(
    engine="engine 1",
    flags={
        "dtype": FlagSpec("str", choices=("auto", "float32")),
        "enable-prefix-caching": FlagSpec("bool"),
        "gpu-memory-utilization": FlagSpec("float"),
        "lora-modules": FlagSpec("list", structured=True),
        "max-lora-rank": FlagSpec("int"),
        "compilation-config": FlagSpec("json"),
        "prefill-schedule-interval": FlagSpec("int"),
        "tokenizer": FlagSpec("str"),
        "hf-overrides": FlagSpec("str", structured=True),
        "no-code": FlagSpec("bool"),
        "host": FlagSpec("str"),
    },
    reserved={"host": "use --host", "kv-transfer-config": "use link", "api-key": "the router checks keys"},
)
TABLES: dict[Platform, FlagTable] = {platform: TABLE for platform in Platform if platform is not Platform.AUTO}
PAIR = ["--model", "m", "--prefill-replicas", "1", "--decode-replicas", "1"]


def build(*words: str, pair: bool = True, config: str | None = None) -> LoadedTopology:
    """Read a command line, by default behind one that gives a model and two pools."""
    return build_topology([*(PAIR if pair else []), *words], flag_tables=TABLES, config=config)


def problems(*words: str, pair: bool = True, config: str | None = None) -> list[str]:
    """What is wrong with a command line, one line per problem; empty if nothing is."""
    try:
        build(*words, pair=pair, config=config)
    except ConfigError as error:
        return [str(p) for p in error.problems]
    return []
