"""One engine from its command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from disagg.engines.emulated.arguments import add_engine_arguments, engine_faults, engine_pace, engine_settings
from disagg.engines.emulated.faults import Faults
from disagg.engines.emulated.instance import Addresses, Instance
from disagg.engines.emulated.settings import EngineSettings, Pace

MODULE = "disagg.engines.emulated"


@dataclass(frozen=True, slots=True)
class Described:
    """An engine that could be started.

    Attributes:
        settings: The engine.
        pace: How long its steps take.
        where: Where it listens.
        faults: What goes wrong from the start.
    """

    settings: EngineSettings
    pace: Pace
    where: Addresses
    faults: tuple[Faults, ...]

    def instance(self, died: Callable[[], None]) -> Instance:
        """The engine, not started yet; `died` is called when it is down."""
        return Instance(self.settings, self.pace, self.where, faults=self.faults, on_death=died)


def read_command(words: Sequence[str] | None, description: str | None = None) -> Described:
    """The engine of a command line; without words that of this process.

    Raises:
        ConfigError: If values do not fit together.
        BadRequestError: If `--fault` is no fault description.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=description)
    add = parser.add_argument
    add("--port", type=int, default=8000, help="HTTP port, 0 for a free one (default: %(default)s)")
    add("--side-channel-port", type=int, default=5600, help="KV side channel (default: %(default)s)")
    add(
        "--bootstrap-port",
        type=int,
        default=8998,
        help="server at which Mooncake and SGLang meet (default: %(default)s)",
    )
    add("--engine-id", help="incarnation in handoffs (default: a new one)")
    add_engine_arguments(parser)
    args = parser.parse_args(words)
    where = Addresses(args.host, args.port, args.side_channel_host, args.side_channel_port, args.bootstrap_port)
    return Described(engine_settings(args, args.engine_id), engine_pace(args), where, engine_faults(args))
