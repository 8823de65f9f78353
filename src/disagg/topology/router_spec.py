"""The router section of a topology: policies, limits, what happens when things break, operations."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from disagg.topology.values import Count, Folder, Host, HttpUrl, Name, Names, Port, Seconds, Spec

PolicyName = Literal[
    "round-robin",
    "random",
    "least-loaded",
    "power-of-two",
    "session-affinity",
    "prefix-affinity",
    "kv-affinity",
]
Fraction = Annotated[float, Field(ge=0, le=1)]
Number = Annotated[int, Field(ge=0, le=1_000_000)]


class Router(Spec):
    """The one endpoint in front of the pools."""

    prefill_policy: PolicyName = "least-loaded"
    """How the prefill instance of a request is chosen."""
    decode_policy: PolicyName = "least-loaded"
    """How the decode instance of a request is chosen."""
    encode_policy: PolicyName = "least-loaded"
    """How the encode instance of a media item is chosen."""
    session_header: Name = "x-session-id"
    """Request header that names a session for session affinity; a body's `user` is taken where it is absent."""
    prefix_index_entries: Count = 100_000
    """Most prompt blocks that prefix affinity remembers, over all instances and for each stage."""
    kv_index_blocks: Count = 1_000_000
    """Most KV blocks that kv-affinity keeps track of, over all instances; further ones are taken as not held."""
    load_interval_s: Annotated[float, Field(ge=0, le=3600)] = 1.0
    """How often the engines' own queue lengths are read for load-aware policies; 0 never reads them."""
    local_prefill_tokens: Number = 0
    """A prompt with fewer uncached tokens than this is prefilled where it is decoded; 0 hands every prompt over."""
    strict: bool = False
    """Refuse what cannot take the disaggregated path, instead of serving it on the decode side alone."""

    request_timeout_s: Seconds = 1800.0
    """The longest that a request may take, from its first byte to its last."""
    connect_timeout_s: Seconds = 5.0
    """Time to connect to an instance."""
    prefill_timeout_s: Seconds = 600.0
    """Time for a prefill leg, queueing included."""
    first_token_timeout_s: Seconds = 60.0
    """Time from sending the decode leg to its first byte."""
    idle_timeout_s: Seconds = 120.0
    """The longest silence inside a stream."""
    retries: Annotated[int, Field(ge=0, le=10)] = 2
    """How often a request is tried again on other instances before the client has seen a byte."""
    retry_budget: Fraction = 0.2
    """Most retries as a part of all requests of the last ten seconds; ten retries are always allowed."""
    recover_streams: bool = False
    """When a decode instance dies in mid-stream, prefill again what was already sent, elsewhere, and go on."""
    breaker_failures: Count = 5
    """Failures in a row after which an instance gets no requests for a while; answers of 4xx are no failures."""
    breaker_open_s: Seconds = 5.0
    """How long that first while is; it doubles with each further failure."""
    breaker_max_open_s: Seconds = 60.0
    """The longest that it gets."""
    health_interval_s: Seconds = 5.0
    """How often `disagg route` asks the health of engines that it did not start."""
    health_timeout_s: Seconds = 5.0
    """How long one such question waits for its answer."""
    health_failures: Count = 3
    """Answers missed in a row before such an engine gets no requests."""
    health_successes: Count = 2
    """Good answers in a row before it gets requests again."""

    max_body_bytes: Annotated[int, Field(ge=1024, le=4 * 1024**3)] = 64 * 1024**2
    """Largest request body."""
    max_in_flight: Count = 32_768
    """Requests that are served at once; further ones wait in the queue."""
    max_queue: Number = 1_000
    """Requests that may wait; one more is refused with 429."""
    queue_timeout_s: Seconds = 60.0
    """How long a request may wait before it is refused with 503."""
    drain_timeout_s: Seconds = 30.0
    """How long a stop waits for requests that are under way, and for KV that decode has not fetched."""

    workers: Annotated[int, Field(ge=1, le=64)] = 1
    """Router processes that share the endpoint's port."""
    ssl_certfile: Folder | None = None
    """PEM file with the endpoint's certificate chain; with it the endpoint speaks TLS."""
    ssl_keyfile: Folder | None = None
    """PEM file with the certificate's key, if that is not in the same file."""
    api_key: Names | None = None
    """Keys that clients have to send as `Authorization: Bearer`; better kept in `DISAGG_API_KEY` or a file."""
    api_key_file: Folder | None = None
    """File with hashed client keys and their limits; `disagg keys` makes its lines."""
    engine_api_key_file: Folder | None = None
    """File whose first line is the key that the engines want, on requests, health checks and metrics alike."""
    admin_host: Host = "127.0.0.1"
    """Address of the admin API."""
    admin_port: Port | None = None
    """Port of the admin API; without one there is none."""
    admin_key_file: Folder | None = None
    """File whose first line is the admin API's own key."""
    access_log: bool = False
    """Write one JSON line per request."""
    otlp_traces_endpoint: HttpUrl | None = None
    """Where OpenTelemetry spans are sent, such as http://127.0.0.1:4318/v1/traces; without it none are made."""
