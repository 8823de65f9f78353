"""Proof that KV really moves: one prompt that nobody has sent before, through prefill and then decode.

An engine that answers its health check may still be unable to take KV over: a connector that is not configured,
another block size, a data path that a firewall eats. Most of that ends in a right answer that decode computed by
itself, so the answer proves nothing. The decode engine's own counter of prompt tokens that came from elsewhere does.
"""

from __future__ import annotations

import asyncio
import random
import re
from dataclasses import dataclass
from urllib.parse import urlsplit

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from disagg.engines.base import Api, Body, Dialect, Handle, Order, Peer, ReadinessProbe, Transfer
from disagg.errors import HandoffError, UpstreamError, UpstreamProtocolError
from disagg.http.client import Client
from disagg.http.limits import LegTimes
from disagg.http.messages import JSON_TYPE, Header
from disagg.http.origin import Origin, Outgoing

_MAX_ANSWER_BYTES = 8 * 1024**2
_DECODED_TOKENS = 2
# A random word of four letters is rarely more than five tokens with its blank, whatever the tokenizer, and rarely
# less than one.
_MAX_TOKENS_PER_WORD = 5
_DEFAULT_BLOCK_TOKENS = 128
_PROBED_BLOCKS = 3
_COUNTER_PAUSE_S = 0.1

_LABEL = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True, slots=True)
class ProbePlan:
    """What every probe of a deployment has in common.

    Attributes:
        model: Name under which the engines answer.
        dialect: How the two legs are written.
        readiness: Where an engine tells about itself.
        block_tokens: Tokens per KV block, if it is known.
        max_model_len: Context limit in tokens, if it is known.
        timeout_s: For each leg. Long, because a first request may compile.
        counter_lag_s: How long after an answer decode's counter may still rise, in seconds: engines publish counters
            at the end of a step or of a log interval.
    """

    model: str
    dialect: Dialect
    readiness: ReadinessProbe
    block_tokens: int | None = None
    max_model_len: int | None = None
    timeout_s: float = 120.0
    counter_lag_s: float = 5.0


@dataclass(frozen=True, slots=True)
class Proof:
    """What a probe that worked has shown.

    Attributes:
        prompt_tokens: Length of the probe's prompt.
        moved_tokens: By how much decode's counter rose; None if the engine has no such counter.
        seconds: Duration of both legs.
    """

    prompt_tokens: int
    moved_tokens: int | None
    seconds: float


@dataclass(frozen=True, slots=True)
class Side:
    """One instance of a probed pair.

    Attributes:
        origin: Its HTTP server.
        peer: What other engines have to be told about its present start.
    """

    origin: Origin
    peer: Peer


async def probe_handoff(client: Client, plan: ProbePlan, prefill: Side, decode: Side) -> Proof:
    """Send one prompt through both legs and check that decode took its KV over.

    Raises:
        UpstreamError: If a leg fails, or decode computed the prompt itself.
    """
    loop = asyncio.get_running_loop()
    before = await read_counter(client, decode.origin, plan)
    began = loop.time()
    peer = await _introduce(client, plan, prefill.peer)
    transfer = Transfer(f"{random.SystemRandom().getrandbits(128):032x}", peer, decode.peer)
    handle = await _hand_over(client, plan, transfer, prefill.origin, decode.origin)
    seconds = loop.time() - began
    if before is None:
        return Proof(handle.prompt_tokens, None, seconds)
    needed = handle.prompt_tokens - _tolerance(plan, handle.prompt_tokens)
    rise = 0.0
    give_up_at = loop.time() + plan.counter_lag_s
    while loop.time() < give_up_at:
        rise = (await read_counter(client, decode.origin, plan) or 0.0) - before
        if rise >= needed:
            return Proof(handle.prompt_tokens, int(rise), seconds)
        await asyncio.sleep(_COUNTER_PAUSE_S)
    raise HandoffError(
        f"decode answered, but computed the prompt itself: {plan.readiness.external_hits} rose by {rise:g} "
        f"for a prompt of {handle.prompt_tokens} tokens.",
        hint="Compare the two instances' KV settings (connector, role, block size, dtype) and their logs.",
    )


async def _introduce(client: Client, plan: ProbePlan, prefill: Peer) -> Peer:
    """Ask what has to be known of a prefill instance before its first request."""
    url = plan.dialect.query(prefill)
    if url is None:
        return prefill
    parts = urlsplit(url)
    origin = Origin.parse(f"{parts.scheme}://{parts.netloc}")
    status, answer = await _exchange(client, origin, Outgoing("GET", parts.path), plan.timeout_s)
    if status != 200:
        raise UpstreamProtocolError(f"{url} answered with status {status}.")
    return plan.dialect.learn(prefill, answer)


async def _hand_over(client: Client, plan: ProbePlan, transfer: Transfer, prefill: Origin, decode: Origin) -> Handle:
    dialect, body = plan.dialect, probe_body(plan)
    headers = (JSON_TYPE, (b"x-request-id", transfer.key.encode()))
    prefill_leg = _post(
        client,
        prefill,
        dialect.prefill_body(Api.COMPLETIONS, body, transfer),
        plan.timeout_s,
        (*headers, *dialect.prefill_headers(transfer)),
    )
    if dialect.order is Order.SERIAL:
        handle = dialect.read_handle(await prefill_leg)
        leg = dialect.decode_body(Api.COMPLETIONS, body, transfer, handle)
        await _post(client, decode, leg, plan.timeout_s, headers)
        return handle
    leg = dialect.decode_body(Api.COMPLETIONS, body, transfer, None)
    try:
        async with asyncio.TaskGroup() as legs:
            prefilled = legs.create_task(prefill_leg)
            legs.create_task(_post(client, decode, leg, plan.timeout_s, headers))
    except* UpstreamError as failed:
        # One leg ends the other; the first failure is the cause.
        raise failed.exceptions[0] from None
    return dialect.read_handle(prefilled.result())


async def probe_local(client: Client, plan: ProbePlan, instance: Origin) -> None:
    """Let an instance that needs no partner answer one prompt by itself.

    Raises:
        UpstreamError: If it does not.
    """
    leg = plan.dialect.decode_body(Api.COMPLETIONS, probe_body(plan), None, None)
    await _post(client, instance, leg, plan.timeout_s)


def probe_body(plan: ProbePlan) -> Body:
    """A completion over several KV blocks of random words, well inside the context limit."""
    words = _PROBED_BLOCKS * (plan.block_tokens or _DEFAULT_BLOCK_TOKENS) // 2
    if plan.max_model_len is not None:
        words = min(words, max(1, (plan.max_model_len - _DECODED_TOKENS) // _MAX_TOKENS_PER_WORD))
    source = random.SystemRandom()
    prompt = " ".join("".join(source.choices("abcdefghijklmnopqrstuvwxyz", k=4)) for _ in range(words))
    fields = {"model": plan.model, "prompt": prompt, "max_tokens": _DECODED_TOKENS, "temperature": 0, "stream": False}
    return {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in fields.items()}


async def is_healthy(client: Client, origin: Origin, path: str, timeout_s: float) -> None:
    """Ask an instance whether it serves.

    Raises:
        UpstreamError: If it does not answer, or with another status than 200.
    """
    status, _ = await _exchange(client, origin, Outgoing("GET", path), timeout_s)
    if status != 200:
        raise UpstreamProtocolError(f"{path} answered with status {status}.")


async def read_counter(client: Client, origin: Origin, plan: ProbePlan) -> float | None:
    """The decode engine's count of prompt tokens whose KV came from elsewhere; None if it has no such counter.

    Raises:
        UpstreamError: If the metrics cannot be read.
    """
    if plan.readiness.external_hits is None:
        return None
    status, text = await _exchange(client, origin, Outgoing("GET", plan.readiness.metrics_path), plan.timeout_s)
    if status != 200:
        raise UpstreamProtocolError(f"{plan.readiness.metrics_path} answered with status {status}.")
    return sum_metric(text.decode("utf-8", errors="replace"), plan.readiness.external_hits)


def sum_metric(text: str, selector: str) -> float:
    """A counter's or gauge's value, summed over all labels that the selector leaves open; 0 if it is not there yet.

    Args:
        text: Prometheus text.
        selector: A metric's name, with or without ``_total``, and labels that it must have, as in
            ``name{source="peer"}``.

    Raises:
        UpstreamProtocolError: If the text is not in Prometheus' format.
    """
    name, _, rest = selector.partition("{")
    wanted = {name, f"{name}_total"}
    labels = dict(_LABEL.findall(rest)).items()
    try:
        families = list(text_string_to_metric_families(text))
    except ValueError as error:
        raise UpstreamProtocolError(f"The engine's metrics cannot be read: {error}.") from error
    samples = (sample for family in families for sample in family.samples if sample.name in wanted)
    return sum(sample.value for sample in samples if labels <= sample.labels.items())


def _tolerance(plan: ProbePlan, prompt_tokens: int) -> int:
    """Tokens that decode computes itself although the handoff worked: the last one, or a partial block."""
    return min((plan.block_tokens or _DEFAULT_BLOCK_TOKENS) + 1, max(1, prompt_tokens // 2))


async def _post(
    client: Client, origin: Origin, body: bytes, timeout_s: float, headers: tuple[Header, ...] = (JSON_TYPE,)
) -> bytes:
    outgoing = Outgoing("POST", Api.COMPLETIONS.value, headers, body, resend=False)
    status, answer = await _exchange(client, origin, outgoing, timeout_s)
    if status != 200:
        said = answer.decode("utf-8", errors="replace").strip()[:300]
        raise UpstreamProtocolError(f"{origin.authority} answered with status {status}: {said}")
    return answer


async def _exchange(client: Client, origin: Origin, outgoing: Outgoing, timeout_s: float) -> tuple[int, bytes]:
    response = await client.request(origin, outgoing, LegTimes(timeout_s, timeout_s, timeout_s))
    try:
        return response.status, await response.read(_MAX_ANSWER_BYTES)
    finally:
        response.close()
