"""Reading a command line into settings: every flag, every mistake, in one pass.

argparse stops at the first mistake and knows nothing of stage prefixes, so it is used for the help text only.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import JsonValue

from disagg.cli.flags_engine import engine_flag, engine_value, guess_value, suggest
from disagg.engines.base import FlagTable
from disagg.errors import Problem
from disagg.topology.draft import Setting
from disagg.topology.fields import Kind
from disagg.topology.flags import REFUSED_FLAGS, SHORT_FLAGS, FlagDef, flags_by_name
from disagg.topology.forms import parse_json
from disagg.topology.messages import show
from disagg.topology.provenance import Origin, OriginKind, dotted

# A word with a space in it is a value even if it begins with a dash, except where the space is behind `--name=`.
_FLAG = re.compile(r"--?[A-Za-z][A-Za-z0-9_.+-]*(=.*)?", re.DOTALL)
_VERBOSE = re.compile(r"-v+")
_WHOLE = re.compile(r"[-+]?\d{1,19}")


@dataclass(frozen=True, slots=True)
class Word:
    """One flag as it was written.

    Attributes:
        written: With its dashes, without a value.
        name: Without dashes in front, and with dashes for underscores.
        inline: The value behind ``=``, if there is one.
    """

    written: str
    name: str
    inline: str | None


@dataclass(slots=True)
class FlagScan:
    """A pass over a command line.

    Attributes:
        table: Flags of the engine that will run; None if no engine is known.
        allow_unknown: Whether flags that neither side knows are passed to the engine.
        others: Flags of the command itself, without dashes, which may have been meant.
        sizing: Whether the command sizes a deployment, so that flags of workload and projection mean something.
        own: The flags of the file's fields, by name.
        settings: What the flags set.
        errors: What is wrong with them.
        warnings: What is odd.
        refused: Places that a wrong flag would have set.
    """

    table: FlagTable | None
    allow_unknown: bool = False
    others: tuple[str, ...] = ()
    sizing: bool = False
    own: Mapping[str, FlagDef] = field(default_factory=flags_by_name)
    settings: list[Setting] = field(default_factory=list)
    errors: list[Problem] = field(default_factory=list)
    warnings: list[Problem] = field(default_factory=list)
    refused: set[str] = field(default_factory=set)
    _rest: list[str] = field(default_factory=list)
    _verbose: int = 0

    def run(self, argv: Sequence[str]) -> None:
        """Read all words; a first word that is no flag is the model, as in vLLM."""
        self._rest = [self._text(word) for word in argv]
        if self._rest and not is_flag(self._rest[0]):
            self._model(self._rest.pop(0))
        last = ""
        while self._rest:
            word = self._rest.pop(0)
            if not is_flag(word):
                self._stray(word, last)
                continue
            if _VERBOSE.fullmatch(word):
                self._verbose += len(word) - 1
                continue
            last = word.partition("=")[0]
            self._flag(split_word(word))
        if self._verbose:
            self._set(("verbosity",), self._verbose, "-" + "v" * self._verbose)

    def _model(self, word: str) -> None:
        if word.startswith("-"):
            self.errors.append(Problem(word[:60], "is neither a flag nor a model; flags are written --name=value"))
        else:
            self._set(("model",), word, "MODEL")

    def _flag(self, word: Word) -> None:
        own = self.own.get(word.name)
        negated = self.own.get(word.name.removeprefix("no-"))
        head, _, part = word.name.partition(".")
        whole = self.own.get(head) if part else None
        if own is not None:
            self._own(word, own)
        elif word.name.startswith("no-") and negated is not None and negated.field.kind is Kind.BOOL:
            self._bool(word, negated.path, positive=False)
        elif whole is not None and whole.field.kind is Kind.MAP:
            self._part(word, whole, part)
        elif word.name in REFUSED_FLAGS:
            self._values(word, many=False)
            self._error(word, REFUSED_FLAGS[word.name])
        else:
            self._engine(word)

    def _own(self, word: Word, flag: FlagDef) -> None:
        if flag.sizing and not self.sizing:
            self._values(word, many=flag.many)
            self._error(word, "is for `disagg project`; a file may hold it for every command")
            return
        if flag.field.kind is Kind.BOOL:
            self._bool(word, flag.path, positive=True)
            return
        values = self._values(word, many=flag.many)
        if not values:
            self._error(word, f"needs a value: {flag.field.expects}", flag.path)
        elif flag.field.name == "env":
            name, equals, text = values[0].partition("=")
            if equals:
                self._set((*flag.path, name), text, word.written)
            else:
                self._error(word, f"expected NAME=VALUE, got {show(values[0])}", flag.path)
        else:
            try:
                value = read_value(flag, values)
            except ValueError as error:
                self._error(word, str(error), flag.path)
                return
            self._set(flag.path, value, word.written, flag)

    def _bool(self, word: Word, path: tuple[str, ...], *, positive: bool) -> None:
        words = {None: True, "true": True, "false": False}
        given = word.inline.lower() if word.inline is not None else None
        if given in words:
            self._set(path, words[given] is positive, word.written)
        else:
            self._error(word, f"takes no value; write {word.written} or --no-{word.name.removeprefix('no-')}")

    def _part(self, word: Word, flag: FlagDef, part: str) -> None:
        values = self._values(word, many=False)
        if not values:
            self._error(word, "needs a value")
        elif flag.spread:
            self._error(word, f"give the stage, as in --{flag.spread[0]}-{word.name}")
        else:
            self._set((*flag.path, *part.split(".")), guess_value(values[0]), word.written)

    def _engine(self, word: Word) -> None:
        found = engine_flag(word.name, self.table)
        if found is None or found.spec is None:
            reserved = found.reserved if found is not None else None
            values = self._values(word, many=True)
            place, _ = _unknown_place(word.name)
            if reserved is not None:
                self._error(word, f"is set by disagg; {reserved}", place)
            elif self.allow_unknown and self.table is not None:
                self._unknown(word, values)
            else:
                self._error(word, self._unknown_message(word), place)
            return
        values = [] if found.takes_none else self._values(word, many=found.spec.kind == "list" and not found.part)
        if found.reserved is not None:
            self._error(word, f"is set by disagg; {found.reserved}", found.place)
            return
        try:
            value = engine_value(found, values if not found.takes_none else [word.inline or "true"])
        except ValueError as error:
            self._error(word, str(error), found.place)
            return
        self._set((*found.place, found.key), value, word.written)

    def _unknown(self, word: Word, values: list[str]) -> None:
        place, key = _unknown_place(word.name)
        value: JsonValue = True if not values else values[0] if len(values) == 1 else list[JsonValue](values)
        guess = suggest(word.name, self.table, self.others, self.own)
        near = f"; {guess} is close" if guess else ""
        self.warnings.append(Problem(word.written, f"unknown, and passed to the engine as it is{near}"))
        self._set((*place, key), value, word.written)

    def _unknown_message(self, word: Word) -> str:
        guess = suggest(word.name, self.table, self.others, self.own)
        if len(word.written) - len(word.name) < 2 and not word.written.startswith("--"):
            return "unknown short flag; write the long form, with two dashes"
        if guess:
            return f"unknown flag; did you mean {guess}?"
        if self.table is None:
            return "unknown flag; --help lists all"
        return f"neither disagg nor {self.table.engine} has this flag; --allow-unknown-engine-args passes it through"

    def _values(self, word: Word, *, many: bool) -> list[str]:
        """The words that belong to a flag: one behind ``=``, or the next one, or all up to the next flag."""
        if word.inline is not None:
            return [word.inline]
        taken: list[str] = []
        while self._rest and not is_flag(self._rest[0]) and (many or not taken):
            taken.append(self._rest.pop(0))
        return taken

    def _set(self, path: tuple[str, ...], value: JsonValue, written: str, flag: FlagDef | None = None) -> None:
        spread = flag.spread if flag is not None else ()
        if flag is not None and flag.field.kind is Kind.ENGINES and isinstance(value, list):
            # Routers elsewhere take one URL per flag, so a repeated one adds to the list.
            before = next((s.value for s in self.settings if s.path == path), [])
            self.settings = [s for s in self.settings if s.path != path]
            value = [*(before if isinstance(before, list) else []), *value]
        for index, earlier in enumerate(self.settings):
            if earlier.path == path and earlier.spread == spread:
                if earlier.value != value:
                    names = " and ".join(dict.fromkeys((earlier.origin.text, written)))
                    told = f"given more than once for {dotted(path)}; the last value, {_brief(value)}, holds"
                    self.warnings.append(Problem(names, told))
                del self.settings[index]
                break
        self.settings.append(Setting(path, value, Origin(OriginKind.FLAG, written), spread))

    def _stray(self, word: str, last: str) -> None:
        hint = "quote a value that holds spaces" if last else "flags begin with --"
        self.errors.append(Problem(last, f"does not take the further value {show(word)}; {hint}"))

    def _text(self, word: str) -> str:
        if word.isascii() or not any("\ud800" <= c <= "\udfff" for c in word):
            return word
        shown = word.encode("utf-8", "backslashreplace").decode()
        self.errors.append(Problem(shown.partition("=")[0][:60], "is not UTF-8 text"))
        return shown

    def _error(self, word: Word, message: str, place: tuple[str, ...] = ()) -> None:
        self.errors.append(Problem(word.written, message))
        if place:
            self.refused.add(dotted(place))


def is_flag(word: str) -> bool:
    """Whether a word on the command line is a flag and not a value; ``-1`` and ``"-a b"`` are values."""
    return _FLAG.fullmatch(word) is not None or word == "--"


def split_word(word: str) -> Word:
    """Take a flag apart. Underscores count as dashes, as in vLLM, except in the part behind a dot."""
    written, equals, value = word.partition("=")
    head, dot, tail = SHORT_FLAGS.get(written, written.lstrip("-")).partition(".")
    return Word(written, head.replace("_", "-") + dot + tail, value if equals else None)


def read_value(flag: FlagDef, words: Sequence[str]) -> JsonValue:
    """Bring the words behind a flag into a form that the file format accepts.

    A word that does not fit is left as text, so that the field's own check says what it expected.

    Raises:
        ValueError: If a JSON value is no JSON object.
    """
    text = " ".join(words)
    match flag.field.kind:
        case Kind.INT if _WHOLE.fullmatch(text.strip()):
            return int(text)
        case Kind.FLOAT:
            return _number(text)
        case Kind.ENGINES:
            return _engines(words)
        case Kind.LIST:
            return list[JsonValue](words)
        case Kind.MAP if flag.field.name != "override_qaic_config":
            value = parse_json(text)
            if not isinstance(value, dict):
                raise ValueError(f'expected a JSON object such as {{"method": "ngram"}}, got {show(value)}')
            return value
    return text


def _engines(words: Sequence[str]) -> JsonValue:
    """URLs, separated by commas or blanks; a number behind one is its bootstrap port."""
    engines: list[JsonValue] = []
    for word in (w for words_ in words for w in words_.split(",") if w):
        last = engines[-1] if engines else None
        if word.isdigit() and isinstance(last, str):
            engines[-1] = {"url": last, "bootstrap_port": int(word)}
        else:
            engines.append(word)
    return engines


def _number(text: str) -> JsonValue:
    try:
        number = float(text)
    except ValueError:
        return text
    return number if math.isfinite(number) else text


def _brief(value: JsonValue) -> str:
    return value if isinstance(value, str) and len(value) < 60 else show(value)


def _unknown_place(name: str) -> tuple[tuple[str, ...], str]:
    for stage in ("encode", "prefill", "decode", "colocated"):
        if name.startswith(f"{stage}-"):
            return (stage, "engine_args"), name.removeprefix(f"{stage}-")
    return ("engine_args",), name
