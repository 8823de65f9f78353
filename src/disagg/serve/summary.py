"""What `disagg serve` says when everything is ready."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from disagg.serve.deployment import Deployment


def ready_summary(deployment: Deployment, folder: Path, seconds: float, first: str) -> RenderableType:
    """Where the endpoint is, and what to type next.

    Args:
        deployment: What runs.
        folder: Of the logs.
        seconds: From the command's start until everything was ready.
        first: What came of the first request, in words.
    """
    names = ", ".join(deployment.served_model_names)
    title = f"{deployment.shape} ready in {seconds:.1f} s"
    facts = {
        "1st token": first,
        "endpoint": f"{deployment.url}/v1",
        "model": names,
        "logs": str(folder),
        "chat": f"disagg chat --url {deployment.url}",
        "curl": curl_line(deployment),
    }
    lines = [Text.assemble((f"  {name:<9} ", "dim"), value) for name, value in facts.items()]
    return Group(Text(title, "bold green"), *lines, Text("Ctrl-C stops it; a second one does not wait.", "dim"))


def curl_line(deployment: Deployment) -> str:
    """A command to paste."""
    body = {
        "model": deployment.served_model_names[0],
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 32,
        "temperature": 0,
    }
    words = ["curl", "-s", f"{deployment.url}/v1/chat/completions"]
    return shlex.join([*words, "-H", "Content-Type: application/json", "-d", json.dumps(body)])
