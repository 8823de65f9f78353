"""The command line that describes a topology: flags, a file, or both.

`build_topology` reads it, `add_topology_flags` documents it, and `split_command_flags` takes out what belongs to a
command and not to the topology.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from disagg.cli.flags_scan import FlagScan, is_flag, split_word
from disagg.engines.base import FlagTable
from disagg.errors import ConfigError, Problem
from disagg.topology.flags import SHORT_FLAGS, FlagDef, flag_table
from disagg.topology.load import EngineCheck, FlagProblems, LoadedTopology, load_topology
from disagg.topology.spec import Platform, Stage
from disagg.topology.yaml_source import Document, read_yaml_file

EXAMPLES = """\
topology examples:
  one prefill and one decode instance, on CPU cores 0 and 1:
    --model smollm2-135m-instruct --prefill-device-group 0 --decode-device-group 1
  two prefill instances and one decode instance, a group and a port each:
    --model MODEL --prefill-device-group 0,1 2,3 --prefill-port 9900,9901 --decode-device-group 4..7
  an engine flag for one stage, and one for all:
    --decode-enable-prefix-caching --dtype float32
  a file, with one value replaced:
    --config topology.yaml --decode-max-num-seqs 16

Every flag is a key of the file; docs/reference/topology.md lists both. Flags win over the file.
Any flag of the engine is accepted, for all stages or with --encode-, --prefill-, --decode- or --colocated- in front.
"""


@dataclass(frozen=True, slots=True)
class CommandFlag:
    """A flag of a command that says nothing about the topology, such as ``--dry-run``.

    Attributes:
        name: Its spelling with the dashes.
        takes_value: Whether one value follows it.
        short: A second spelling.
    """

    name: str
    takes_value: bool = False
    short: str | None = None


@dataclass(frozen=True, slots=True)
class CommandLine:
    """What a command is, as far as reading a topology for it goes.

    Attributes:
        flags: Its own flags, so that a slip in one of them can be told.
        sizing: Whether it sizes a deployment: it takes the flags of workload and projection, and needs no devices.
    """

    flags: tuple[CommandFlag, ...] = ()
    sizing: bool = False


def split_command_flags(argv: Sequence[str], flags: Sequence[CommandFlag]) -> tuple[dict[str, str | bool], list[str]]:
    """Take a command's own flags out of its words.

    Args:
        argv: The words after the command's name.
        flags: The command's own flags.

    Returns:
        The value of each flag that is there, by its name with the dashes, True for one that takes none; and the
        other words in their order. A repeated flag has its last value.

    Raises:
        ConfigError: If a flag has a value that it does not take, or lacks one that it needs.
    """
    known = {spelling: flag for flag in flags for spelling in (flag.name, flag.short) if spelling is not None}
    given: dict[str, str | bool] = {}
    rest: list[str] = []
    problems: list[Problem] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        spelling, equals, value = word.partition("=")
        flag = known.get(spelling)
        if flag is None:
            rest.append(word)
        elif not flag.takes_value:
            if equals:
                problems.append(Problem(spelling, f"takes no value, got {value!r}"))
            given[flag.name] = True
        else:
            if not equals and words and not is_flag(words[0]):
                value = words.pop(0)
            if not value:
                problems.append(Problem(spelling, "needs a value"))
            else:
                given[flag.name] = value
    if problems:
        raise ConfigError(problems)
    return given, rest


def build_topology(
    argv: Sequence[str],
    *,
    flag_tables: Mapping[Platform, FlagTable],
    config: str | None = None,
    auto: Platform = Platform.CPU,
    check: EngineCheck | None = None,
    command: CommandLine | None = None,
) -> LoadedTopology:
    """Read a topology from flags, a file, or both.

    Args:
        argv: The words that describe the topology, without a command's own flags.
        flag_tables: The flags that the engine of each platform knows.
        config: Path of a topology file; flags win over it.
        auto: The platform that `auto` stands for on this machine.
        check: What the engine adds to the checks; it is given the topology with its platform resolved.
        command: What the command itself is; one without flags that serves, if not given.

    Raises:
        ConfigError: With everything that is wrong with the flags, the file and how they fit together.
    """
    own = command or CommandLine()
    problems: list[Problem] = []
    document: Document | None = None
    if config is not None:
        try:
            document = read_yaml_file(config)
        except ConfigError as error:
            problems.extend(error.problems)
    scan = FlagScan(
        flag_tables.get(_platform(argv, document, auto)),
        allow_unknown=_allows_unknown(argv, document),
        others=tuple(flag.name.lstrip("-") for flag in own.flags),
        sizing=own.sizing,
    )
    scan.run(argv)
    if problems:
        # Without the file nobody can say what is missing, so only the flags' own mistakes are told beside it.
        raise ConfigError([*problems, *scan.errors])
    before = FlagProblems(tuple(scan.errors), tuple(scan.warnings), frozenset(scan.refused))
    return load_topology(document, scan.settings, auto=auto, check=check, before=before, assume_pools=own.sizing)


def _platform(argv: Sequence[str], document: Document | None, auto: Platform) -> Platform:
    """The platform, read ahead of everything else because its engine decides how many words a flag takes."""
    named = _last_value(argv, "platform") or (document.data.get("platform") if document is not None else None)
    known = {p.value: p for p in Platform if p is not Platform.AUTO}
    return known.get(str(named), auto)


def _allows_unknown(argv: Sequence[str], document: Document | None) -> bool:
    name = "allow-unknown-engine-args"
    for word in reversed(argv):
        flag = split_word(word) if is_flag(word) else None
        if flag is not None and flag.name in (name, f"no-{name}"):
            return (flag.name == name) is ((flag.inline or "true").lower() == "true")
    return document is not None and document.data.get("allow_unknown_engine_args") is True


def _last_value(argv: Sequence[str], name: str) -> str | None:
    found = None
    for index, word in enumerate(argv):
        flag = split_word(word) if is_flag(word) else None
        if flag is not None and flag.name == name:
            found = flag.inline if flag.inline is not None else next(iter(argv[index + 1 : index + 2]), None)
    return found


def add_topology_flags(parser: argparse.ArgumentParser, *, sizing: bool = False) -> None:
    """Document all topology flags in a parser's help, grouped, with examples below.

    Those of workload and projection are left out unless the command sizes a deployment.

    The four pools have the same flags; those of prefill are listed, the others are named in the group's heading.
    """
    parser.allow_abbrev = False
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = f"{parser.epilog}\n\n{EXAMPLES}" if parser.epilog else EXAMPLES
    groups: dict[str, argparse._ArgumentGroup] = {}
    shorts = {long: short for short, long in SHORT_FLAGS.items()}
    for flag in flag_table():
        if flag.sizing and not sizing:
            continue
        stage = flag.field.path.partition(".")[0] if not flag.spread else ""
        if stage in {s.value for s in Stage} - {Stage.PREFILL.value}:
            continue
        title = "each pool" if stage == Stage.PREFILL else flag.group
        if title not in groups:
            about = "Also as --encode-..., --decode-... and --colocated-...; defaults are those of `all stages`."
            groups[title] = parser.add_argument_group(title, about if stage == Stage.PREFILL else None)
        spellings = [f"--{name}" for name in flag.names]
        spellings += [shorts[name] for name in flag.names if name in shorts]
        document_flag(groups[title], flag, spellings)
    groups["deployment"].add_argument(
        "-v", dest="verbosity", action="count", help="The same, by repetition: -v -v or -vv."
    )


def document_flag(group: argparse._ArgumentGroup, flag: FlagDef, spellings: Sequence[str]) -> None:
    """Document one flag in a group of a parser's help.

    Args:
        group: Where.
        flag: Which.
        spellings: Its names, with their dashes.
    """
    text = flag.field.doc.replace("%", "%%")
    if flag.field.default not in (None, False, {}) and not flag.spread:
        text += f" Default: {str(flag.field.default).replace('%', '%%')}."
    if flag.field.kind == "bool":
        group.add_argument(*spellings, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text)
        return
    group.add_argument(*spellings, metavar=flag.metavar, nargs="+" if flag.many else None, help=text)
