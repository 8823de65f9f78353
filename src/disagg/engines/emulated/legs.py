"""What a request's handoff parameters mean in each dialect: KV to fetch, and what happens to the KV at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from disagg.engines.emulated.fields import rejected
from disagg.engines.emulated.handoff import RemoteKv, read_remote, read_transfer, read_writer
from disagg.engines.emulated.settings import EngineSettings, Role


@dataclass(frozen=True, slots=True)
class Legs:
    """What prefill does with the KV of a request.

    Attributes:
        concurrent: Both legs left together; the KV waits for the other one.
        keys: What they meet by, for each sequence; None is the sequence's own id.
        forward: Where the KV is sent before the answer.
        first_token: The answer tells the token that was sampled.
    """

    concurrent: bool = False
    keys: Sequence[str] | None = None
    forward: tuple[str, int] | None = None
    first_token: bool = False

    def key(self, request_id: str, number: int) -> str | None:
        """What one sequence is offered under, None if it is not."""
        if not self.concurrent:
            return None
        return request_id if self.keys is None else self.keys[number % len(self.keys)]


NO_LEGS = Legs()


def legs_of(params: Mapping[str, object], settings: EngineSettings, *, keep: bool) -> Legs:
    """What prefill does at the end of a request with these parameters.

    Raises:
        BadRequestError: If they do not name what the dialect needs.
    """
    match settings.dialect:
        case "nixl-push" if keep:
            return Legs(concurrent=True)
        case "mooncake" if keep:
            return Legs(concurrent=True, keys=[str(params.get("transfer_id"))])
        case "sglang" if params and settings.role is Role.PRODUCER:
            return Legs(concurrent=True, keys=_rooms(params))
        case "lmcache":
            spec = params.get("disagg_spec")
            return (
                Legs(forward=_receiver(spec), first_token=params.get("ret_first_tok") is True)
                if isinstance(spec, Mapping)
                else NO_LEGS
            )
        case _:
            return NO_LEGS


def _receiver(spec: Mapping[str, object]) -> tuple[str, int]:
    port = spec.get("receiver_init_port")
    if isinstance(port, list) and port:
        port = port[0]
    host = spec.get("receiver_host")
    if not isinstance(host, str) or not isinstance(port, int):
        raise rejected("disagg_spec needs receiver_host and receiver_init_port.", "kv_transfer_params.disagg_spec")
    return host, port


def remotes_of(params: Mapping[str, object], settings: EngineSettings) -> list[RemoteKv]:
    """KV that another engine holds, or will send: one for all sequences, or one for each.

    Raises:
        FatalHandoffError: If the parameters would bring a real engine down.
    """
    match settings.dialect:
        case "nixl-push":
            found = read_writer(params)
        case "mooncake":
            found = read_transfer(params)
        case "sglang":
            return _from_rooms(params, settings) if settings.role is Role.CONSUMER else []
        case "lmcache":
            return []
        case _:
            found = read_remote(params)
    return [] if found is None else [found]


def _rooms(params: Mapping[str, object]) -> list[str]:
    rooms = params.get("bootstrap_room")
    return [str(room) for room in (rooms if isinstance(rooms, list) else [rooms])]


def _from_rooms(params: Mapping[str, object], settings: EngineSettings) -> list[RemoteKv]:
    rooms = _rooms(params)
    hosts, ports = params.get("bootstrap_host"), params.get("bootstrap_port")
    out = []
    for number, room in enumerate(rooms):
        host = hosts[number] if isinstance(hosts, list) else hosts
        port = ports[number] if isinstance(ports, list) else ports
        shown = f"[{host}]" if ":" in str(host) else host
        server = f"http://{shown}:{port or settings.default_bootstrap_port}"
        out.append(RemoteKv("", room, "", 0, (), key=room, bootstrap=server))
    return out
