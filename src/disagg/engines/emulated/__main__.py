"""`python -m disagg.engines.emulated`: one emulated engine in a process of its own, as the launcher starts it."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from disagg.engines.emulated import host
from disagg.engines.emulated.arguments import add_engine_arguments, engine_faults, engine_pace, engine_settings
from disagg.engines.emulated.instance import Addresses, Instance
from disagg.errors import DisaggError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one engine; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m disagg.engines.emulated", description=__doc__)
    parser.add_argument("--port", type=int, default=8000, help="HTTP port, 0 for a free one (default: %(default)s)")
    parser.add_argument("--side-channel-port", type=int, default=5600, help="KV side channel (default: %(default)s)")
    parser.add_argument(
        "--bootstrap-port",
        type=int,
        default=8998,
        help="server at which Mooncake and SGLang meet (default: %(default)s)",
    )
    parser.add_argument("--engine-id", help="incarnation in handoffs (default: a new one)")
    add_engine_arguments(parser)
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    log = logging.getLogger("disagg.emulated")

    def ready(instances: Sequence[Instance]) -> None:
        for instance in instances:
            where = instance.addresses
            log.info("engine %s serves %s", instance.settings.engine_id, instance.url)
            log.info("KV side channel %s:%d", where.side_channel_host, where.side_channel_port)

    try:
        settings = engine_settings(args, args.engine_id)
        where = Addresses(args.host, args.port, args.side_channel_host, args.side_channel_port, args.bootstrap_port)
        faults, pace = engine_faults(args), engine_pace(args)
        return host.run(
            host.serve(lambda died: [Instance(settings, pace, where, faults=faults, on_death=died)], ready)
        )
    except DisaggError as error:
        log.error("%s", error)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
