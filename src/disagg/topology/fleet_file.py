"""The file of `disagg route`: a router, and where the engines are that somebody else started.

It is read by the same rules as a topology, and its `router` section is the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, JsonValue, ValidationError

from disagg.errors import ConfigError, Problem
from disagg.topology.draft import Setting, merge
from disagg.topology.messages import translate
from disagg.topology.provenance import Provenance
from disagg.topology.router_spec import Router
from disagg.topology.secrets import without_password
from disagg.topology.spec import Link, Stage
from disagg.topology.values import Count, Host, Name, Names, Port, Seconds, Spec, Tokens
from disagg.topology.yaml_source import Document

_DEFAULT_PORTS = {"http": 80, "https": 443}


def _url(text: str) -> str:
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise ValueError(f"{without_password(text)!r} is no URL: {error}") from error
    plain = not parts.path.strip("/") and not parts.query and not parts.fragment and "@" not in parts.netloc
    if parts.scheme not in _DEFAULT_PORTS or not parts.hostname or not plain or any(c.isspace() for c in text):
        raise ValueError(f"expected a URL such as http://127.0.0.1:9900, got {without_password(text)[:80]!r}")
    host = parts.hostname
    return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{port or _DEFAULT_PORTS[parts.scheme]}"


class Endpoint(Spec):
    """An engine that somebody else started. Only its URL is needed, except where the dialect asks for more."""

    url: Annotated[str, Field(min_length=1, max_length=500), AfterValidator(_url)]
    """Base URL of its HTTP server, such as http://127.0.0.1:9900."""
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] | None = None
    """What metrics, headers and the admin API call it; stage and number if not given."""
    bootstrap_port: Port | None = None
    """Port of its bootstrap server (Mooncake, SGLang), on prefill engines."""
    side_channel_host: Host | None = None
    """Address of its side channel and bootstrap server, if that is not the URL's."""
    side_channel_port: Port | None = None
    """Port of its side channel, where the dialect has the router tell it (NIXL push)."""
    alloc_port: Port | None = None
    """Port on which it hands out receive buffers (LMCache), on decode engines."""
    engine_id: Name | None = None
    """What it calls itself in transfers, if it was given a fixed name (NIXL push)."""
    tensor: Count = 1
    """Its tensor-parallel ranks, where the dialect has the router tell them."""

    @property
    def host(self) -> str:
        """The host of its URL, without brackets."""
        return urlsplit(self.url).hostname or ""


Endpoints = Annotated[tuple[Endpoint, ...], Field(min_length=1)]


class FleetFile(Spec):
    """A router in front of engines that are there already."""

    model: Name | None = None
    """The model that the engines serve; clients use this name unless there are others."""
    served_model_name: Names | None = None
    """Names that clients use for the model."""
    engine: Literal["vllm", "sglang", "emulated"] = "vllm"
    """What the engines are."""
    dialect: Literal["auto", "nixl-pull", "nixl-push", "mooncake", "lmcache", "sglang"] = "auto"
    """The protocol in which prefill and decode are told of each other's KV; auto takes the engine's own."""
    host: Host = "127.0.0.1"
    """Address that the endpoint binds to. Loopback unless set."""
    port: Port = 8000
    """Port of the one endpoint that clients see."""
    encode: Endpoints | None = None
    """Vision encoders."""
    prefill: Endpoints | None = None
    """Engines that process prompts."""
    decode: Endpoints | None = None
    """Engines that generate tokens; without prefill engines they do both."""
    colocated: Endpoints | None = None
    """Engines that prefill and decode together."""
    lease_s: Seconds = Link().lease_s
    """How long prefill engines keep a finished prompt's KV for decode, as they were started."""
    max_model_len: Tokens | None = None
    """Context limit shown to clients; asked of the engines if not given."""
    router: Router = Router()
    """The endpoint in front of the engines."""
    verbosity: Annotated[int, Field(ge=0, le=5)] = 0
    """How much the router says about what it does (-v, -vv)."""

    def endpoints(self, stage: Stage) -> tuple[Endpoint, ...]:
        """The engines of a stage."""
        found: Mapping[Stage, tuple[Endpoint, ...] | None] = {
            Stage.ENCODE: self.encode,
            Stage.PREFILL: self.prefill,
            Stage.DECODE: self.decode,
            Stage.COLOCATED: self.colocated,
        }
        return found[stage] or ()

    def stages(self) -> tuple[Stage, ...]:
        """Stages that have engines, in the order of a request's life."""
        return tuple(stage for stage in Stage if self.endpoints(stage))

    @property
    def names(self) -> tuple[str, ...]:
        """Names that clients use."""
        return self.served_model_name or ((self.model,) if self.model is not None else ())

    @property
    def spoken(self) -> str:
        """The dialect, with `auto` resolved."""
        own = "sglang" if self.engine == "sglang" else "nixl-pull"
        return own if self.dialect == "auto" else self.dialect


@dataclass(frozen=True, slots=True)
class LoadedFleet:
    """A fleet file that passed its checks.

    Attributes:
        file: What it says, flags included.
        provenance: Where each value came from.
    """

    file: FleetFile
    provenance: Provenance


def load_fleet(
    document: Document | None,
    settings: Sequence[Setting] = (),
    before: Sequence[Problem] = (),
    check: Callable[[Router], Sequence[Problem]] | None = None,
) -> LoadedFleet:
    """Put a file and flags together and check the result.

    Args:
        document: The file, if there is one.
        settings: Values from flags; they win over the file.
        before: What was already found wrong with the flags.
        check: What the router itself says of its settings.

    Raises:
        ConfigError: With every problem, each naming the flag or line that caused it.
    """
    draft = merge(document, settings, FleetFile)
    provenance = draft.provenance()
    errors = [*before, *draft.problems]
    for stage in Stage:
        if (value := draft.data.get(stage.value)) is not None:
            draft.data[stage.value] = _listed(value)
    try:
        file = FleetFile.model_validate_json(json.dumps(draft.data), strict=True)
    except ValidationError as error:
        raise ConfigError([*errors, *provenance.explain(translate(error, FleetFile))]) from None
    errors.extend(provenance.explain(check_fleet(file)))
    if check is not None:
        errors.extend(provenance.explain(check(file.router)))
    if errors:
        raise ConfigError(errors)
    return LoadedFleet(file, provenance)


def _listed(value: JsonValue) -> JsonValue:
    """One engine may stand for a list of one, and its URL for the mapping."""
    items = value if isinstance(value, list) else [value]
    return [{"url": item} if isinstance(item, str) else item for item in items]


def check_fleet(file: FleetFile) -> list[Problem]:
    """What does not fit together in a fleet file."""
    problems = []
    if not file.names:
        problems.append(Problem("model", "is required: the name that clients use for the model"))
    if file.decode is None and file.colocated is None:
        problems.append(Problem("decode", "no engine generates tokens; give decode or colocated engines"))
    if file.decode is not None and file.colocated is not None:
        problems.append(Problem("colocated", "colocated engines stand alone; leave out decode, or put them there"))
    if file.colocated is not None and file.prefill is not None:
        problems.append(Problem("prefill", "colocated engines prefill themselves; leave out prefill, or give decode"))
    if (file.engine == "sglang") is not (file.spoken == "sglang") and file.engine != "emulated":
        problems.append(Problem("dialect", f"{file.engine} engines do not speak {file.spoken}"))
    if file.router.admin_port == file.port:
        problems.append(Problem("router.admin_port", f"port {file.port} is the endpoint's; choose another"))
    return problems + _clashes(file) + _unknown_peers(file)


def _clashes(file: FleetFile) -> list[Problem]:
    """One URL or name in two places: its books would be kept twice."""
    problems = []
    urls: dict[str, str] = {}
    names: dict[str, str] = {}
    for stage in file.stages():
        for index, endpoint in enumerate(file.endpoints(stage)):
            where = f"{stage}.{index}"
            for seen, value, what in ((urls, endpoint.url, "URL"), (names, endpoint.name, "name")):
                if value is not None and value in seen:
                    problems.append(Problem(where, f"has the same {what} as {seen[value]}: {value}"))
                elif value is not None:
                    seen[value] = where
    return problems


_NEEDED: Mapping[str, Mapping[Stage, tuple[str, ...]]] = {
    "sglang": {Stage.PREFILL: ("bootstrap_port",)},
    "mooncake": {Stage.PREFILL: ("bootstrap_port",)},
    "nixl-push": {Stage.DECODE: ("engine_id", "side_channel_port")},
}
"""What a dialect has the router tell one engine about another, so it has to be told to the router."""


def _unknown_peers(file: FleetFile) -> list[Problem]:
    if file.prefill is None:
        return []
    return [
        Problem(f"{stage}.{index}", f"{file.spoken} needs its {name}, such as {{url: {endpoint.url}, {name}: ...}}")
        for stage, fields in _NEEDED.get(file.spoken, {}).items()
        for index, endpoint in enumerate(file.endpoints(stage))
        for name in fields
        if getattr(endpoint, name) is None
    ]


def name_endpoints(
    stage: Stage, endpoints: Sequence[Endpoint], known: Mapping[str, str], taken: Sequence[str] = ()
) -> dict[str, str]:
    """Names of engines by URL: their own, the ones that they had before, or stage and a number that is free.

    Args:
        stage: Their stage.
        endpoints: As the file lists them.
        known: Names by URL that were given out before; an engine keeps its name when others come and go.
        taken: Names of other engines.
    """
    names = {e.url: e.name or known.get(e.url, "") for e in endpoints}
    used = {*taken, *names.values()}
    number = 0
    for url, name in names.items():
        if not name:
            while f"{stage}-{number}" in used:
                number += 1
            names[url] = f"{stage}-{number}"
            used.add(names[url])
    return names
