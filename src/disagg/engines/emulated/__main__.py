"""`python -m disagg.engines.emulated`: one emulated engine in a process of its own, as the launcher starts it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from disagg.engines.emulated import host
from disagg.engines.emulated.command import read_command
from disagg.engines.emulated.instance import Instance
from disagg.errors import DisaggError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one engine; returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    log = logging.getLogger("disagg.emulated")

    def ready(instances: Sequence[Instance]) -> None:
        for instance in instances:
            where = instance.addresses
            log.info("engine %s serves %s", instance.settings.engine_id, instance.url)
            log.info("KV side channel %s:%d", where.side_channel_host, where.side_channel_port)

    try:
        described = read_command(argv, __doc__)
        return host.run(host.serve(lambda died: [described.instance(died)], ready))
    except DisaggError as error:
        log.error("%s", error)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
