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
from disagg.http.messages import Header
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

    def peer(self, topology: Topology, instance: Instance, incarnation: str) -> Peer:
        """What other engines have to be told about one start of an instance."""
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
        cache_info: Metric with the labels ``block_size`` and ``enable_prefix_caching``; None if the engine has none.
        kv_events_path: Tells where the engine publishes KV events, by data-parallel rank; None if it does not.
        never_ready: Regular expression for a log line after which a starting engine will never answer, although its
            process goes on; None if no such line is known.
    """

    health_path: str
    metrics_path: str
    external_hits: str | None
    running: str
    waiting: str
    never_ready: str | None = None
    kv_events_path: str | None = None
    cache_info: str | None = None


Body = dict[str, msgspec.Raw]
"""A request body with its top-level keys in order and their values as the client wrote them, byte by byte."""


class Api(StrEnum):
    """The client APIs that can be split over stages, by path."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    RESPONSES = "/v1/responses"
    MESSAGES = "/v1/messages"
    GENERATE = "/inference/v1/generate"


class Order(StrEnum):
    """When the two legs of a request leave."""

    SERIAL = "serial"
    """Decode is sent when prefill has answered."""
    CONCURRENT = "concurrent"
    """Both at once: the engines meet by the transfer's key."""


@dataclass(frozen=True, slots=True)
class Peer:
    """What one engine has to be told about another before the first request between them. Zero and empty: unknown.

    Attributes:
        engine_id: What the engine calls itself in transfers; changes with each start.
        host: Address of its side channel and bootstrap server, as the other engines reach it.
        side_channel_port: First port of its side channel.
        alloc_port: Port on which it hands out receive buffers, where that is another one.
        bootstrap_port: Port of its bootstrap server.
        tensor: Tensor-parallel ranks.
        pipeline: Pipeline stages.
        data: Data-parallel ranks.
        ranks: Engine ids by data-parallel rank, as a query has told them.
    """

    engine_id: str = ""
    host: str = ""
    side_channel_port: int = 0
    alloc_port: int = 0
    bootstrap_port: int = 0
    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    ranks: tuple[str, ...] = ()


class Transfer(msgspec.Struct, frozen=True):
    """One attempt to hand one prompt over. A further attempt is a further transfer.

    Attributes:
        key: 32 hex digits, new for each attempt, never made from an id that a client knows. Both legs carry it as
            their `x-request-id`.
        prefill: Who computes the prompt.
        decode: Who continues it; None while it is not chosen yet, see `Dialect.pairs_first`.
    """

    key: str
    prefill: Peer
    decode: Peer | None = None


class Handle(msgspec.Struct, frozen=True):
    """What prefill's answer says about the KV. Used once, and only well inside its lease.

    Attributes:
        params: The engine's own object for decode, verbatim; neither edited nor shown to a client.
        engine_id: The incarnation of the engine that holds the KV, as the engine names it; empty if it does not.
        prompt_tokens: Prompt length that prefill counted, in tokens.
        cached_tokens: Prompt tokens that prefill itself found in its cache; None if it did not say.
    """

    params: msgspec.Raw
    engine_id: str
    prompt_tokens: int
    cached_tokens: int | None


@dataclass(frozen=True, slots=True)
class Call:
    """A small POST beside the legs.

    Attributes:
        path: Where on the engine.
        body: JSON.
        done: Statuses that mean that it did what it is for.
    """

    path: str
    body: bytes
    done: frozenset[int] = frozenset({200})


class Dialect(Protocol):
    """How the two legs of a request are written, and what ties them together. Pure.

    Six questions about a family of engines are answered here: how prefill's body differs from the client's
    (`prefill_body`), how decode's does (`decode_body`), whether the legs leave one after the other (`order`), what
    must be known about an instance before its first request (`Peer`, `query`), how a leg is cancelled (`abort`), and
    how KV that nobody will fetch is let go (`release`).
    """

    name: str
    internal_keys: frozenset[str]
    """Top-level body keys that are the router's to set; removed from what a client sends."""
    order: Order = Order.SERIAL
    pairs_first: bool = False
    """Decode has to be chosen before the prefill leg is written. Always so if the legs leave together."""
    can_decode_alone: bool = True
    """A decode engine can compute a prompt itself. If not, what cannot be handed over is refused."""
    counts_handed_over: bool = False
    """Decode reports tokens that it was handed as found in its cache, which they were not."""

    primes: bool = False
    """A decode engine that was handed the KV of a prompt keeps it in its prefix cache. A handle can be read once, so
    a request of several choices is handed over by a leg of one token, after which the client's own finds the KV. If
    not, `local_reason` says what becomes of it."""
    takes_prompt_ids: bool = False
    """A chat leg may carry its prompt as `kv_transfer_params.prompt_token_ids`, and answers tell token ids."""

    def local_reason(self, api: Api, body: Body) -> str | None:
        """Why this request cannot be handed off (a short slug such as ``n-greater-1``), or None if it can."""
        ...

    def prefill_body(self, api: Api, body: Body, transfer: Transfer) -> bytes:
        """The prefill leg: same prompt, one token, not streamed, KV kept for a decode instance."""
        ...

    def read_handle(self, answer: bytes) -> Handle:
        """Check prefill's answer and take the handle out of it.

        Raises:
            HandoffError: If the answer says that decode gets no KV, or has a handle that could harm a decode engine.
        """
        ...

    def decode_body(self, api: Api, body: Body, transfer: Transfer | None, handle: Handle | None) -> bytes:
        """The decode leg: the client's own body, tied to the prefill leg.

        Args:
            api: What the client called.
            body: What it sent.
            transfer: The attempt; None for a run on decode alone.
            handle: What prefill answered; None where the legs leave together, and for a run on decode alone.
        """
        ...

    def prefill_headers(self, transfer: Transfer) -> tuple[Header, ...]:
        """Headers of the prefill leg beside `x-request-id`, such as the data-parallel rank that is to keep its KV."""
        del transfer
        return ()

    def cache_headers(self, decode: Peer, key: str) -> tuple[Header, ...]:
        """Headers that lead all decode legs with the same key to the same prefix cache of a decode instance.

        Args:
            decode: The instance, which may have a cache for each of its data-parallel ranks.
            key: 32 hex digits.
        """
        del decode, key
        return ()

    def query(self, prefill: Peer) -> str | None:
        """The URL that is asked once about each start of a prefill instance, before its first request."""
        del prefill
        return None

    def learn(self, prefill: Peer, answer: bytes) -> Peer:
        """What is known after the query.

        Raises:
            HandoffError: If the answer does not tell it.
        """
        del answer
        return prefill

    def abort(self, transfer: Transfer) -> Call | None:
        """What ends a leg besides closing its connection; None if that is enough, as it is for vLLM."""
        del transfer
        return None

    def release(self, api: Api, transfer: Transfer, handle: Handle | None) -> Call | None:
        """What makes a *decode* engine tell prefill that nobody will fetch the KV; None if only the lease ends it.

        Args:
            api: What the client called.
            transfer: The attempt, whose key is the call's `x-request-id`.
            handle: What prefill answered; None if it was given up before.
        """
        del api, transfer, handle
        return None


def url_host(host: str) -> str:
    """An address as it stands in a URL."""
    return f"[{host}]" if ":" in host else host


def engine_arguments(topology: Topology, instance: Instance) -> dict[str, JsonValue]:
    """Pass-through engine flags of one instance: the topology's, overridden by its pool's."""
    pool = topology.pool(instance.stage)
    return {**topology.engine_args, **(pool.engine_args if pool is not None else {})}
