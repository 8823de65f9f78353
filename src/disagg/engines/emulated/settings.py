"""Settings of one emulated engine, and how long its steps take."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, Protocol

from disagg.engines.emulated.cache_events import NO_EVENTS, EventsConfig
from disagg.errors import ConfigError, Problem

MAX_BLOCKS = 4_000_000
"""Blocks of one engine's KV pool: each costs some hundred bytes."""


DialectName = Literal["nixl-pull", "nixl-push", "mooncake", "lmcache", "sglang"]
_MEETING_S: dict[DialectName, float] = {"nixl-push": 480.0, "mooncake": 480.0, "sglang": 300.0}


class Role(StrEnum):
    """Which side of a handoff an instance is on, as in vLLM's ``kv_role``; ``none`` means no KV connector."""

    PRODUCER = "producer"
    CONSUMER = "consumer"
    BOTH = "both"
    NONE = "none"


class Pace(Protocol):
    """How long an engine step takes. The cost model takes this place for a calibrated emulation."""

    def step_s(self, prefill_tokens: int, decode_seqs: int, context_tokens: int) -> float:
        """Seconds of one step that computes so many prompt tokens and one token each of so many sequences."""
        ...


@dataclass(frozen=True, slots=True)
class SimplePace:
    """A rate for prompts and a constant time per decode step.

    Attributes:
        prefill_tokens_per_s: Prompt tokens per second; 0 means that prompts take no time.
        decode_step_s: Seconds of a step that decodes, whatever the batch.
    """

    prefill_tokens_per_s: float = 0.0
    decode_step_s: float = 0.0

    def step_s(self, prefill_tokens: int, decode_seqs: int, context_tokens: int) -> float:
        """Both parts added; the context length has no effect."""
        seconds = self.decode_step_s if decode_seqs else 0.0
        if prefill_tokens and self.prefill_tokens_per_s:
            seconds += prefill_tokens / self.prefill_tokens_per_s
        return seconds

    def checked(self) -> SimplePace:
        """This, if time could pass at it.

        Raises:
            ConfigError: With every value that does not fit, by flag.
        """
        values = {"--prefill-tokens-per-s": self.prefill_tokens_per_s, "--decode-step": self.decode_step_s}
        problems = [p for flag, value in values.items() for p in _not_finite(flag, value)]
        if problems:
            raise ConfigError(problems)
        return self


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """One engine, as its command line describes it.

    Attributes:
        model: Model string; both sides of a handoff need the same one.
        served_model_names: Names that requests may use; the first is the one in answers.
        engine_id: Incarnation: names this start of the engine in handoffs.
        role: Side of the handoff.
        block_size: Tokens per KV block.
        num_blocks: Size of the KV pool in blocks.
        max_model_len: Context limit in tokens, prompt and completion.
        max_num_seqs: Sequences that run at once.
        max_num_batched_tokens: Tokens of one step.
        prefix_caching: Keep finished blocks for prompts with the same beginning.
        prompt_tokens_details: Report cached tokens in ``usage``, off by default as in vLLM.
        mean_output_tokens: Average length of an answer that nothing else limits; 0 means no end of its own.
        lease_s: How long a finished prompt's KV waits for a decode engine.
        recompute: On a failed load compute the prompt here, instead of failing the request.
        handshake_timeout_s: Wait for a peer's side channel.
        transfer_s: Extra time of every KV load, to emulate a slow link.
        dialect: How KV is handed over.
        meeting_s: How long a leg waits for the other one, where both leave together; 0 is the real engine's time.
        default_bootstrap_port: Where a bootstrap server is if a request does not say.
        received_blocks: Buffer for KV that is sent ahead (LMCache), in blocks.
        lora_modules: Adapters by name and path; each has weights of its own.
        api_keys: Keys of which a request to the API has to bring one; none means that it is open.
        auto_tool_choice: Tools may be called without being asked for.
        tool_call_parser: Name of the parser of tool calls; None refuses requests that need one.
        reasoning_parser: Name of the parser of reasoning; with one, chat answers begin with reasoning.
        scale_out: Serve token-in, token-out generation and rendering.
        runner: `generate`, or `pooling` for embeddings and scores.
        priorities: Requests with a lower `priority` are served first.
        request_id_headers: Answer with the request's `X-Request-Id`.
        load_tracking: Count requests under way for `/load`.
        kv_events: Where events of the prefix cache are published.
    """

    model: str
    served_model_names: tuple[str, ...]
    engine_id: str
    role: Role = Role.BOTH
    block_size: int = 16
    num_blocks: int = 4096
    max_model_len: int = 8192
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    prefix_caching: bool = True
    prompt_tokens_details: bool = False
    mean_output_tokens: int = 64
    lease_s: float = 30.0
    recompute: bool = False
    handshake_timeout_s: float = 5.0
    transfer_s: float = 0.0
    dialect: DialectName = "nixl-pull"
    meeting_s: float = 0.0
    default_bootstrap_port: int = 8998
    received_blocks: int = 4096
    lora_modules: tuple[tuple[str, str], ...] = ()
    api_keys: tuple[str, ...] = ()
    auto_tool_choice: bool = False
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    scale_out: bool = False
    runner: Literal["generate", "pooling"] = "generate"
    priorities: bool = False
    request_id_headers: bool = False
    load_tracking: bool = False
    kv_events: EventsConfig = NO_EVENTS

    @property
    def wait_s(self) -> float:
        """How long one leg waits for the other."""
        return self.meeting_s or _MEETING_S.get(self.dialect, 0.0)

    def checked(self) -> EngineSettings:
        """This, if an engine could start with it.

        Raises:
            ConfigError: With every value that does not fit, by flag.
        """
        problems = [
            Problem(f"--{name.replace('_', '-')}", f"{getattr(self, name)} is too small; give at least 1")
            for name in ("block_size", "num_blocks", "max_model_len", "max_num_seqs", "max_num_batched_tokens")
            if getattr(self, name) < 1
        ]
        if not problems and self.num_blocks * self.block_size < self.max_model_len:
            problems.append(
                Problem(
                    "--num-blocks",
                    f"{self.num_blocks} blocks of {self.block_size} tokens hold {self.num_blocks * self.block_size} "
                    f"tokens, less than --max-model-len {self.max_model_len}; give at least "
                    f"{-(-self.max_model_len // self.block_size)} blocks, or a smaller --max-model-len",
                )
            )
        if self.num_blocks > MAX_BLOCKS:
            problems.append(
                Problem("--num-blocks", f"{self.num_blocks} blocks do not fit into memory; at most {MAX_BLOCKS} do")
            )
        problems += _not_finite("--mean-output-tokens", self.mean_output_tokens)
        problems += _not_finite("--kv-lease", self.lease_s, above_zero=True)
        problems += _not_finite("--handshake-timeout", self.handshake_timeout_s, above_zero=True)
        problems += _not_finite("--transfer-time", self.transfer_s)
        problems += _not_finite("--meeting-timeout", self.meeting_s)
        if problems:
            raise ConfigError(problems)
        return self


def _not_finite(flag: str, value: float, *, above_zero: bool = False) -> list[Problem]:
    """The problem of a number that has to be finite, and 0 or more, or above 0."""
    if math.isfinite(value) and (value > 0 or (value == 0 and not above_zero)):
        return []
    return [Problem(flag, f"{value} does not fit; give a number {'above 0' if above_zero else 'from 0 up'}")]
