"""`disagg.serve.dry_run` and `disagg.serve.summary`: what is shown of a plan."""

from __future__ import annotations

import io
import json
import shlex
from dataclasses import replace
from pathlib import Path

from rich.console import Console, RenderableType

from disagg.engines.registry import adapter_for
from disagg.errors import Problem
from disagg.serve import Deployment, describe, plan, render_json, render_table
from disagg.serve.summary import curl_line, ready_summary
from disagg.topology.spec import Platform, Pool, Topology

TOPOLOGY = Topology(
    model="m",
    platform=Platform.EMULATED,
    prefill=Pool(replicas=2, env={"HF_TOKEN": "hf-secret", "PLAIN": "a b"}),
    decode=Pool(replicas=1),
)


def deployment(topology: Topology = TOPOLOGY) -> Deployment:
    return describe(topology, adapter_for(topology.platform), "m")


def printed(renderable: RenderableType) -> str:
    out = io.StringIO()
    Console(file=out, width=80).print(renderable, soft_wrap=True)
    return out.getvalue()


def test_json_has_every_process_in_start_order() -> None:
    """Programs read argv, environment, ports and notes of each process."""
    shown = json.loads(render_json(deployment(), [Problem("--x", "odd")]))
    assert [p["name"] for p in shown["processes"]] == ["prefill-0", "prefill-1", "decode-0"]
    assert shown["shape"] == "2P1D"
    assert shown["endpoint"] == "http://127.0.0.1:8000"
    assert shown["warnings"] == ["--x: odd"]
    first = shown["processes"][0]
    assert shlex.split(first["command"]) == first["argv"]
    assert first["ports"]["http"] == 9900


def test_secrets_are_in_neither_form() -> None:
    """A plan may be pasted into an issue."""
    for text in (render_json(deployment()), printed(render_table(deployment()))):
        assert "HF_TOKEN" in text
        assert "hf-secret" not in text


def test_commands_can_be_pasted_into_a_shell() -> None:
    """Every word is quoted, and nothing is wrapped."""
    processes = deployment().processes
    text = printed(render_table(deployment()))
    for process in processes:
        assert shlex.join(process.argv) in text
    assert "PLAIN='a b'" in text
    assert "nothing was started" in text


def test_square_brackets_are_text() -> None:
    """A JSON list in a command line is not taken for markup."""
    one = deployment()
    odd = replace(one.processes[0], argv=("x", '[bold]["a"]'))
    text = printed(render_table(replace(one, processes=(odd,))))
    assert '[bold]["a"]' in text


def test_plan_lists_the_same_processes() -> None:
    """The short form and the description agree."""
    assert plan(TOPOLOGY, adapter_for(Platform.EMULATED), "m") == list(deployment().processes)


def test_the_summary_says_what_to_type_next() -> None:
    """Endpoint, model, shape, logs, a chat command, a curl line, and the seconds."""
    text = printed(ready_summary(deployment(), Path("/logs/here"), 12.34, "after 0.20 s"))
    for part in ("2P1D ready in 12.3 s", "http://127.0.0.1:8000/v1", "/logs/here", "disagg chat --url", "curl -s"):
        assert part in text


def test_the_curl_line_is_a_request() -> None:
    """Its body is JSON for the served model."""
    words = shlex.split(curl_line(deployment()))
    assert json.loads(words[-1])["model"] == "m"
    assert words[2] == "http://127.0.0.1:8000/v1/chat/completions"


def test_a_plan_cannot_disturb_the_terminal() -> None:
    """Values of variables may hold anything; line ends stay, escapes are shown."""
    plan = deployment()
    process = plan.processes[0]
    odd = replace(process, env={"A": "\x1b[31mx\n"})
    text = printed(render_table(replace(plan, processes=(odd,))))
    assert "\\x1b[31mx" in text
    assert "\x1b" not in text
