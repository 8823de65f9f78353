"""The contract between an engine and the rest: how to start it, when it is ready, how it hands KV over.

An adapter only describes. It starts nothing and opens no connection: the launcher runs the processes that
`EngineAdapter.process` describes and asks the URLs that it names; the router sends the bodies that a `Dialect`
builds. Implementations are pure, so one contract suite (`tests/contract`) covers them all.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, Protocol

import msgspec
from pydantic import JsonValue

from disagg.errors import Problem
from disagg.topology.instances import Instance
from disagg.topology.spec import Topology


@dataclass(frozen=True, slots=True)
class FlagSpec:
    """One command-line flag of an engine.

    Attributes:
        kind: What follows the flag: nothing (``bool``), one value, or several.
        choices: Allowed words, if the engine limits them.
        help: One sentence.
        items: What each of several values is.
        twin: Whether a ``bool`` has a ``--no-`` twin; without one it can only be switched on.
        pattern: What a ``str`` has to match in full, such as a number that may end in k or M; empty if anything goes.
        structured: Whether a ``str``, or an item of a ``list`` of them, may also be a JSON object.
    """

    kind: Literal["bool", "int", "float", "str", "json", "list"]
    choices: tuple[str, ...] = ()
    help: str = ""
    items: Literal["int", "float", "str", "json"] = "str"
    twin: bool = True
    pattern: str = ""
    structured: bool = False


@dataclass(frozen=True, slots=True)
class FlagTable:
    """The flags that an engine knows, by name without leading dashes, and those that users may not set.

    Attributes:
        engine: Engine and version that the table was read from.
        flags: Known flags.
        reserved: Flags that `disagg` sets itself, with what to use instead.
    """

    engine: str
    flags: Mapping[str, FlagSpec]
    reserved: Mapping[str, str]


def python_module(name: str) -> tuple[str, ...]:
    """The words that run a module with this Python, out of installed packages alone.

    Without ``-P`` Python looks in the current folder first, and a user's ``http.py``, or a checkout of the engine's
    sources, takes the place of the real thing.
    """
    return (sys.executable, "-P", "-m", name)


@dataclass(frozen=True, slots=True)
class PlannedProcess:
    """One process that a deployment starts.

    Attributes:
        name: The instance's name, or the service's.
        argv: Command line; the first word is looked up on PATH.
        env: Variables set on top of the launcher's own environment.
        unset_env: Variables removed from the launcher's environment.
        cores: CPU cores that the process and its children are confined to; None leaves them alone.
        devices: Human-readable devices, such as ``CPU cores 0..3`` or ``QID 16..23``.
        ports: Every TCP port that it will bind, by purpose; the launcher reserves them.
        depends_on: Names of processes that have to be up before this one starts.
        notes: What a user should know about this process, shown by ``--dry-run``.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    unset_env: tuple[str, ...] = ()
    cores: tuple[int, ...] | None = None
    devices: str = ""
    ports: Mapping[str, int] = field(default_factory=dict)
    depends_on: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StartContext:
    """What changes from start to start of one instance.

    Attributes:
        model: The model string that every stage gets, an absolute path or a hub name; equal for all of them.
        served_model_names: Names under which the engine answers.
        incarnation: Unique to this start; becomes the engine's identity in handoffs.
        run_dir: Private directory for sockets and other files of this run.
    """

    model: str
    served_model_names: tuple[str, ...]
    incarnation: str
    run_dir: str


class EngineAdapter(Protocol):
    """How to start one kind of engine. Pure: describes, never acts."""

    name: str

    def flag_table(self) -> FlagTable:
        """The engine's own flags, for pass-through and for naming the nearest when one is unknown."""
        ...

    def check(self, topology: Topology, instances: Sequence[Instance]) -> tuple[list[Problem], list[Problem]]:
        """Errors and warnings of this topology on this engine, all at once."""
        ...

    def services(self, topology: Topology, instances: Sequence[Instance]) -> tuple[PlannedProcess, ...]:
        """Processes that the instances need beside them, in start order."""
        ...

    def process(self, topology: Topology, instance: Instance, context: StartContext) -> PlannedProcess:
        """The process of one instance."""
        ...

    def dialect(self, topology: Topology) -> Dialect:
        """How this engine hands KV from prefill to decode under this topology."""
        ...

    def probe(self) -> ReadinessProbe:
        """What the launcher asks to know that an instance is alive, and that a handoff really moved KV."""
        ...


@dataclass(frozen=True, slots=True)
class ReadinessProbe:
    """Where an engine tells about itself.

    Attributes:
        health_path: Answers 200 when the engine serves.
        metrics_path: Prometheus text.
        external_hits: Counter of prompt tokens whose KV came from another engine, as a metric's name with the labels
            that select it (``name{label="value"}``); None if the engine has none.
        running: Gauge of requests that are being run.
        waiting: Gauge of requests that wait inside the engine.
        never_ready: Regular expression for a log line after which a starting engine will never answer, although its
            process goes on; None if no such line is known.
    """

    health_path: str
    metrics_path: str
    external_hits: str | None
    running: str
    waiting: str
    never_ready: str | None = None


Body = dict[str, msgspec.Raw]
"""A request body with its top-level keys in order and their values as the client wrote them, byte by byte."""


class Api(StrEnum):
    """The client APIs that can be split over stages, by path."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"


@dataclass(frozen=True, slots=True)
class Handle:
    """What prefill returned so that decode can fetch the KV. Used once, and only well inside its lease.

    Attributes:
        params: The engine's own object, verbatim; neither edited nor shown to a client.
        engine_id: The incarnation of the engine that holds the KV, as the engine names it.
        prompt_tokens: Prompt length that prefill counted, in tokens.
        cached_tokens: Prompt tokens that prefill itself found in its cache; None if it did not say.
    """

    params: msgspec.Raw
    engine_id: str
    prompt_tokens: int
    cached_tokens: int | None


class Dialect(Protocol):
    """How the two legs of a request are written, and what ties them together. Pure."""

    name: str
    internal_keys: frozenset[str]
    """Top-level body keys that are the router's to set; removed from what a client sends."""

    def local_reason(self, api: Api, body: Body) -> str | None:
        """Why this request cannot be handed off (a short slug such as ``n-greater-1``), or None if it can."""
        ...

    def prefill_body(self, api: Api, body: Body) -> bytes:
        """The prefill leg: same prompt, one token, not streamed, KV kept for a decode instance."""
        ...

    def read_handle(self, answer: bytes) -> Handle:
        """Check prefill's answer and take the handle out of it.

        Raises:
            HandoffError: If the answer has no handle, or one that could harm a decode engine.
        """
        ...

    def decode_body(self, api: Api, body: Body, handle: Handle | None) -> bytes:
        """The decode leg: the client's own body, with the handle, or without one for a local run."""
        ...


def engine_arguments(topology: Topology, instance: Instance) -> dict[str, JsonValue]:
    """Pass-through engine flags of one instance: the topology's, overridden by its pool's."""
    pool = topology.pool(instance.stage)
    return {**topology.engine_args, **(pool.engine_args if pool is not None else {})}
