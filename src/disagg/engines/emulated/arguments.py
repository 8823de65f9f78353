"""The command line of an emulated engine, shared by the module and by `disagg emulate`."""

from __future__ import annotations

import argparse
from uuid import uuid4

from disagg.engines.emulated.cache_events import EventsConfig, read_events_config
from disagg.engines.emulated.faults import Faults, read_faults
from disagg.engines.emulated.settings import EngineSettings, Role, SimplePace
from disagg.errors import ConfigError, Problem


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags that describe the engine, named as vLLM's where it has the same."""
    add = parser.add_argument
    add(
        "--model",
        default="emulated",
        help="model string; both sides of a handoff need the same (default: %(default)s)",
    )
    add("--served-model-name", nargs="+", metavar="NAME", help="names that clients use (default: the model string)")
    add(
        "--role", choices=[role.value for role in Role], default="both", help="side of the KV handoff (default: both)"
    )
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--side-channel-host", default="127.0.0.1", help="address of the KV side channel (default: %(default)s)")
    add("--max-model-len", type=int, default=8192, metavar="TOKENS", help="context limit (default: %(default)s)")
    add("--max-num-seqs", type=int, default=256, metavar="N", help="sequences at once (default: %(default)s)")
    add(
        "--max-num-batched-tokens",
        type=int,
        default=8192,
        metavar="TOKENS",
        help="tokens per step (default: %(default)s)",
    )
    add("--block-size", type=int, default=16, metavar="TOKENS", help="tokens per KV block (default: %(default)s)")
    add("--num-blocks", type=int, metavar="N", help="KV blocks (default: room for 8 full contexts)")
    add(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep KV for prompts with the same beginning (default: on)",
    )
    add(
        "--enable-prompt-tokens-details",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="report cached tokens in usage (default: off)",
    )
    add(
        "--mean-output-tokens",
        type=int,
        default=64,
        metavar="N",
        help="mean answer length, 0: no end (default: %(default)s)",
    )
    add(
        "--prefill-tokens-per-s",
        type=float,
        default=0.0,
        metavar="RATE",
        help="prompt speed; 0: no time (default: 0)",
    )
    add("--decode-step", type=float, default=0.0, metavar="SECONDS", help="time of a decode step (default: 0)")
    add(
        "--kv-lease",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="how long prefill keeps KV (default: %(default)s)",
    )
    add(
        "--dialect",
        choices=["nixl-pull", "nixl-push", "mooncake", "lmcache", "sglang"],
        default="nixl-pull",
        help="how KV is handed over, and by whose API (default: %(default)s)",
    )
    add(
        "--meeting-timeout",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="wait of one leg for the other; 0: as the real engine, 300 or 480 s (default: 0)",
    )
    add("--kv-load-failure-policy", choices=["fail", "recompute"], default="fail", help="(default: %(default)s)")
    add(
        "--handshake-timeout",
        type=float,
        default=5.0,
        metavar="SECONDS",
        help="wait for a peer (default: %(default)s)",
    )
    add("--transfer-time", type=float, default=0.0, metavar="SECONDS", help="added to each KV load (default: 0)")
    _add_api_arguments(parser)
    add("--fault", metavar="JSON", help='faults from the start, such as \'{"delay_s": 2, "requests": 1}\'')


def _add_api_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags that switch parts of the API on, all named as vLLM's."""
    add = parser.add_argument
    add("--lora-modules", nargs="+", metavar="NAME=PATH", help="adapters, each with weights of its own")
    add("--api-key", nargs="+", metavar="KEY", help="keys of which a request to the API has to bring one")
    add(
        "--enable-auto-tool-choice",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="let the model call tools without being told to (default: off)",
    )
    add("--tool-call-parser", metavar="NAME", help="parse tool calls; without it requests that need one are refused")
    add("--reasoning-parser", metavar="NAME", help="begin chat answers with reasoning, and report it apart")
    add(
        "--enable-scale-out",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="serve /inference/v1/generate and the render endpoints (default: off)",
    )
    add("--kv-events-config", metavar="JSON", help="publish KV events by ZeroMQ, with vLLM's keys")
    add("--runner", choices=["generate", "pooling"], default="generate", help="(default: %(default)s)")
    add(
        "--scheduling-policy",
        choices=["fcfs", "priority"],
        default="fcfs",
        help="whether priority in requests counts (default: %(default)s)",
    )
    add(
        "--enable-request-id-headers",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="answer with the request's X-Request-Id (default: off)",
    )
    add(
        "--enable-server-load-tracking",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="count requests under way for /load (default: off)",
    )


def _lora_modules(given: list[str] | None) -> tuple[tuple[str, str], ...]:
    problems = [
        Problem("--lora-modules", f"{item!r} is not NAME=PATH") for item in given or () if not item.partition("=")[2]
    ]
    if problems:
        raise ConfigError(problems)
    pairs = [item.partition("=") for item in given or ()]
    return tuple((name, path) for name, _, path in pairs)


def engine_settings(args: argparse.Namespace, engine_id: str | None = None) -> EngineSettings:
    """The engine that parsed arguments describe; without an id it gets one of its own.

    Raises:
        ConfigError: If values do not fit together.
    """
    num_blocks = args.num_blocks
    if num_blocks is None:
        num_blocks = max(1, 8 * -(-args.max_model_len // max(1, args.block_size)))
    return EngineSettings(
        model=args.model,
        served_model_names=tuple(args.served_model_name or (args.model,)),
        engine_id=engine_id or str(uuid4()),
        role=Role(args.role),
        block_size=args.block_size,
        num_blocks=num_blocks,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        prefix_caching=args.enable_prefix_caching,
        prompt_tokens_details=args.enable_prompt_tokens_details,
        mean_output_tokens=args.mean_output_tokens,
        lease_s=args.kv_lease,
        recompute=args.kv_load_failure_policy == "recompute",
        handshake_timeout_s=args.handshake_timeout,
        transfer_s=args.transfer_time,
        dialect=args.dialect,
        meeting_s=args.meeting_timeout,
        lora_modules=_lora_modules(args.lora_modules),
        api_keys=tuple(args.api_key or ()),
        auto_tool_choice=args.enable_auto_tool_choice,
        tool_call_parser=args.tool_call_parser,
        reasoning_parser=args.reasoning_parser,
        scale_out=args.enable_scale_out,
        runner=args.runner,
        priorities=args.scheduling_policy == "priority",
        request_id_headers=args.enable_request_id_headers,
        kv_events=read_events_config(args.kv_events_config) if args.kv_events_config else EventsConfig(),
        load_tracking=args.enable_server_load_tracking,
    ).checked()


def engine_pace(args: argparse.Namespace) -> SimplePace:
    """How long steps take, as given.

    Raises:
        ConfigError: If a time or rate is none.
    """
    return SimplePace(args.prefill_tokens_per_s, args.decode_step).checked()


def engine_faults(args: argparse.Namespace) -> tuple[Faults, ...]:
    """Faults from the start.

    Raises:
        BadRequestError: If they are no fault description.
    """
    return read_faults(args.fault.encode()) if args.fault else ()
