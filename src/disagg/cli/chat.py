"""`disagg chat`: talk to an endpoint from the terminal, streaming."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.text import Text

from disagg.cli.chat_client import AnswerStats, Endpoint, Message, list_models, stream_chat
from disagg.errors import BadRequestError, DisaggError
from disagg.units import printable

_MAX_TIMEOUT_S = 86_400
EXAMPLES = """\
examples:
  disagg chat
  disagg chat --message 'What is the capital of France?'
  disagg chat --url http://127.0.0.1:9000 --system 'Answer in one sentence.' --max-tokens 64

inside a conversation:
  /clear forgets it, /exit (or Ctrl-D) leaves, Ctrl-C stops the answer

environment:
  DISAGG_API_KEY or OPENAI_API_KEY is sent as the bearer token
"""


def main(argv: Sequence[str]) -> int:
    """Run the command; 0 if every answer arrived."""
    args = _parser().parse_args(argv)
    key = os.environ.get("DISAGG_API_KEY") or os.environ.get("OPENAI_API_KEY")
    endpoint = Endpoint(args.url, api_key=key, timeout_s=args.timeout)
    console = Console(stderr=True, highlight=False)
    model = args.model or list_models(endpoint)[0]
    options: dict[str, float | int] = {"max_tokens": args.max_tokens, "temperature": args.temperature}
    talk = Conversation(endpoint, model, options, args.system, console)
    if args.message is not None:
        talk.ask(args.message)
        return 0
    if not sys.stdin.isatty():
        talk.ask(_read_question())
        return 0
    told = f" at {args.url}. /exit or Ctrl-D leaves, /clear starts afresh."
    console.print(Text.assemble((printable(model), "bold"), told))
    return _interactive(talk, console, input)


class Conversation:
    """The messages so far, and how to add an answer to them."""

    def __init__(
        self, endpoint: Endpoint, model: str, options: dict[str, float | int], system: str | None, console: Console
    ) -> None:
        self._endpoint = endpoint
        self._model = model
        self._options = options
        self._console = console
        self._opening: list[Message] = [{"role": "system", "content": system}] if system else []
        self.messages: list[Message] = list(self._opening)

    def clear(self) -> None:
        """Forget everything but the system prompt."""
        self.messages = list(self._opening)

    def ask(self, text: str) -> None:
        """Print the answer to `text` as it arrives, and remember both.

        Raises:
            DisaggError: If the answer does not arrive whole; the question is then forgotten, so that it can be
                asked again.
        """
        question: Message = {"role": "user", "content": text}
        stats = AnswerStats()
        answer: list[str] = []
        stream = stream_chat(self._endpoint, self._model, [*self.messages, question], self._options, stats)
        try:
            for piece in stream:
                answer.append(piece)
                print(_encodable(piece), end="", flush=True)
        except KeyboardInterrupt:
            stream.close()
            self._console.print(" [dim](stopped)[/]")
        else:
            print(flush=True)
            self._console.print(stats.summary(), style="dim", markup=False, soft_wrap=True)
        self.messages += [question, {"role": "assistant", "content": "".join(answer)}]


def _interactive(talk: Conversation, console: Console, read: Callable[[str], str]) -> int:
    while True:
        try:
            text = read("> ").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return 0
        except UnicodeDecodeError as error:
            console.print(f"That was not {error.encoding} text.", style="red")
            continue
        if text in {"/exit", "/quit"}:
            return 0
        if text == "/clear":
            talk.clear()
        elif text.startswith("/"):
            console.print(
                "A line that begins with / is a command: /clear forgets the conversation, /exit leaves.", markup=False
            )
        elif text:
            try:
                talk.ask(text)
            except DisaggError as error:
                console.print(printable(str(error)), style="red", markup=False, soft_wrap=True)


def _read_question() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise BadRequestError(f"The question on standard input is not {error.encoding} text.") from error


def _encodable(text: str) -> str:
    """The text with escapes for what the terminal's encoding, or any encoding, lacks."""
    encoding = sys.stdout.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value <= _MAX_TIMEOUT_S:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most {_MAX_TIMEOUT_S}")
    return value


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError("must be a finite number")
    return value


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="disagg chat",
        description="Talk to an OpenAI-compatible endpoint, such as `disagg serve` starts.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="base URL of the endpoint (%(default)s)")
    parser.add_argument("--model", help="served model name; the endpoint's first one if not given")
    parser.add_argument("--message", "-m", help="ask this one question and leave")
    parser.add_argument("--system", help="system prompt")
    parser.add_argument("--max-tokens", type=_positive, default=512, help="longest answer in tokens (%(default)s)")
    parser.add_argument("--temperature", type=_finite, default=0.0, help="0 is greedy (%(default)s)")
    parser.add_argument("--timeout", type=_seconds, default=300.0, help="longest silence in seconds (%(default)s)")
    return parser
