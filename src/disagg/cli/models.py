"""`disagg models`: what the catalogue knows of models, and what a user's own configuration says."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from disagg.catalog.model import Model
from disagg.catalog.models import find_model, model_entries
from disagg.catalog.params import Parameters, count_parameters
from disagg.catalog.words import count_words, kind_words, layers_words
from disagg.units import printable

EXAMPLES = """\
examples:
  disagg models
  disagg models llama-3.1-70b
  disagg models ~/checkpoints/mine/config.json --json

A name is a short name, a repository of the Hugging Face hub, or the path of a config.json or of its folder.
"""


def main(argv: Sequence[str]) -> int:
    """Run the command; 0 if all went well.

    Raises:
        ConfigError: If there is no such model, or its configuration is wrong.
    """
    args = _parser().parse_args(argv)
    models = [find_model(args.name)] if args.name else [entry.model() for entry in model_entries().values()]
    if args.json:
        rows = [_row(model) for model in models]
        print(json.dumps(rows[0] if args.name else {"models": rows}, indent=2))
    elif args.name:
        _detail(models[0])
    else:
        _list(models)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="disagg models",
        description="List the models that sizing knows, or show one with where its figures are from.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", nargs="?", help="a model: its name, or the path of its config.json")
    parser.add_argument("--json", action="store_true", help="print it for programs")
    return parser


def _row(model: Model) -> dict[str, object]:
    counted = count_parameters(model)
    return asdict(model) | {
        "layers": model.layers,
        "blocks": [
            {
                "count": block.count,
                "attention": block.attention and {"kind": type(block.attention).__name__, **asdict(block.attention)},
                "mlp": block.mlp and {"kind": type(block.mlp).__name__, **asdict(block.mlp)},
            }
            for block in model.blocks
        ],
        "parameters": counted.total,
        "active_parameters": counted.active,
        "parameters_by_part": dict(counted.parts),
    }


def _list(models: Sequence[Model]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("model", no_wrap=True)
    for name in ("params", "active", "context"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("weights", no_wrap=True)
    table.add_column("built of")
    for model in models:
        counted = count_parameters(model)
        sizes = (count_words(counted.total), count_words(counted.active), f"{model.max_context}")
        table.add_row(model.name, *sizes, str(model.dtype), kind_words(model))
    Console(highlight=False).print(table)


def _formats(model: Model) -> str:
    return f"{model.dtype}, {model.dense_dtype} outside experts" if model.dense_dtype else str(model.dtype)


def _detail(model: Model) -> None:
    table = Table.grid(padding=(0, 2))
    for name, text in _facts(model):
        table.add_row(name, printable(text))
    Console(markup=False, highlight=False).print(table)


def _facts(model: Model) -> Iterator[tuple[str, str]]:
    counted = count_parameters(model)
    yield "model", model.name
    yield "source", model.source
    yield "parameters", f"{count_words(counted.total)}, {count_words(counted.active)} per token"
    yield "  by part", _parts(counted)
    entry = model_entries().get(model.name)
    if entry is not None:
        yield "  published", entry.published
        yield "  fields compared with", entry.checked
    yield "layers", "\n".join(layers_words(model))
    yield "width", f"{model.hidden}"
    yield "vocabulary", f"{model.vocabulary}{', head tied to the embedding' if model.tied else ''}"
    yield "longest context", f"{model.max_context}"
    yield "published weights", _formats(model)
    if model.vision is not None:
        vision = model.vision
        picture = f"{vision.tokens_per_image} tokens for {vision.image} x {vision.image} pixels"
        yield "vision encoder", f"{vision.layers} layers x {vision.hidden}, {picture}"
    if model.draft_layers:
        yield "draft layers", f"{model.draft_layers}"
    for note in model.notes:
        yield "note", note


def _parts(counted: Parameters) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {count_words(value)}" for name, value in counted.parts.items())
