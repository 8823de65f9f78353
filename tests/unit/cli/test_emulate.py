"""`disagg emulate`: several engines in one process, from the flags to the signal that ends them."""

from __future__ import annotations

import re
import signal
import subprocess
import sys

import pytest

from disagg.cli import emulate
from disagg.errors import ConfigError
from tests.support.wire import request


def test_ports_that_do_not_fit_are_refused_together() -> None:
    """All problems at once, each with its flag."""
    with pytest.raises(ConfigError) as caught:
        emulate.main(["--instances", "4", "--port", "65534", "--side-channel-port", "-1"])
    assert [p.where for p in caught.value.problems] == ["--port", "--side-channel-port"]
    with pytest.raises(ConfigError, match="--instances"):
        emulate.main(["--instances", "0"])
    with pytest.raises(ConfigError, match="from 1 to 1000"):
        emulate.main(["--instances", "100000", "--port", "0", "--side-channel-port", "0"])


def test_help_shows_commands_that_work(capsys: pytest.CaptureFixture[str]) -> None:
    """Every example in the help is one that the parser takes."""
    with pytest.raises(SystemExit):
        emulate.main(["--help"])
    import shlex

    examples = re.findall(r"^  disagg emulate(.*)$", capsys.readouterr().out, re.MULTILINE)
    assert len(examples) >= 4
    for example in examples:
        emulate._parser().parse_args(shlex.split(example))


def test_several_engines_hand_over_within_one_process_and_end_on_a_signal() -> None:
    """Each instance is an engine with ports of its own; Ctrl-C ends all of them with 0."""
    code = "import sys; from disagg.cli.main import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "emulate", "--instances", "3", "--port", "0", "--side-channel-port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "both of emulated" in process.stdout.readline()
        urls = [process.stdout.readline().split()[0] for _ in range(3)]
        body = {"prompt": "the sea " * 30, "max_tokens": 1, "temperature": 0}
        keep = {"do_remote_decode": True, "do_remote_prefill": False}
        handle = request(urls[0], "/v1/completions", {**body, "kv_transfer_params": keep}).json()[
            "kv_transfer_params"
        ]
        assert len({request(url, "/emulated/state").json()["engine_id"] for url in urls}) == 3
        assert request(urls[2], "/v1/completions", {**body, "kv_transfer_params": handle}).status == 200
        assert (
            b'external_prefix_cache_hits_total{engine="0",model_name="emulated"} 0.0'
            not in request(urls[2], "/metrics").body
        )
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 0
