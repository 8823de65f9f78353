"""From a file and flags to a checked topology, with every problem found on the way reported at once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from disagg.errors import ConfigError, Problem
from disagg.topology.checks import check_topology
from disagg.topology.draft import Draft, Setting, merge
from disagg.topology.fields import Kind, field_of, spec_fields
from disagg.topology.instances import Instance, plan_instances
from disagg.topology.messages import empty_message, translate
from disagg.topology.provenance import Provenance, ancestors
from disagg.topology.spec import Platform, Topology
from disagg.topology.yaml_source import Document, read_yaml_file

_PLACEHOLDER = "model"


EngineCheck = Callable[[Topology, Sequence[Instance]], tuple[Sequence[Problem], Sequence[Problem]]]
"""What an engine says about a topology whose platform is resolved: errors and warnings, as `EngineAdapter.check`."""


@dataclass(frozen=True, slots=True)
class LoadedTopology:
    """A topology that passed its checks.

    Attributes:
        topology: As it was given; its platform may be `auto`.
        platform: The platform that it is checked for and will run on.
        provenance: Where each value came from.
        warnings: What is odd but may be meant.
    """

    topology: Topology
    platform: Platform
    provenance: Provenance
    warnings: tuple[Problem, ...]

    def resolved(self) -> Topology:
        """The same topology, with the platform that `auto` stands for."""
        return self.topology.model_copy(update={"platform": self.platform})


@dataclass(frozen=True, slots=True)
class FlagProblems:
    """What was wrong or odd with flags before a topology could be tried.

    Attributes:
        errors: Mistakes, each naming its flag.
        warnings: Oddities, each naming its flag.
        refused: Places of the topology that a wrong flag would have set, and that are now empty.
    """

    errors: tuple[Problem, ...] = ()
    warnings: tuple[Problem, ...] = ()
    refused: frozenset[str] = frozenset()


def load_topology(
    document: Document | None,
    settings: Sequence[Setting] = (),
    *,
    auto: Platform,
    check: EngineCheck | None = None,
    before: FlagProblems | None = None,
    assume_pools: bool = False,
) -> LoadedTopology:
    """Put a file and flags together and check the result.

    Args:
        document: The file, if there is one.
        settings: Values from flags; they win over the file.
        auto: What the platform `auto` stands for on this machine.
        check: What the engine of the platform adds to the checks.
        before: What was already found in the flags.
        assume_pools: Give a topology without pools those that it means.

    Raises:
        ConfigError: With every problem, each naming the flag or line that caused it.
    """
    found = before or FlagProblems()
    draft = merge(document, settings, assume_pools=assume_pools)
    provenance = draft.provenance()
    topology, refused, dropped = _validate(draft)
    errors = [*found.errors, *draft.problems, *provenance.explain(refused)]
    warnings: list[Problem] = []
    platform = auto
    if topology is not None:
        platform = topology.platform if topology.platform is not Platform.AUTO else auto
        more, warnings = _cross_checks(topology, platform, check, dropped | found.refused)
        errors.extend(provenance.explain(more))
    if topology is None or errors:
        raise ConfigError(list(dict.fromkeys(errors)))
    return LoadedTopology(topology, platform, provenance, (*found.warnings, *provenance.explain(warnings)))


def load_file(path: str, *, auto: Platform, check: EngineCheck | None = None) -> LoadedTopology:
    """Read and check a topology file.

    Raises:
        ConfigError: With every problem, each naming the line that caused it.
    """
    return load_topology(read_yaml_file(path), auto=auto, check=check)


def _validate(draft: Draft) -> tuple[Topology | None, list[Problem], set[str]]:
    """Build the topology; if values are refused, build it without them, so that the others can be checked too.

    Returns:
        The topology, or None if not even that works; what was refused; and the paths that were left out.
    """
    refused = _empty_sections(draft)
    try:
        topology = _build(draft)
    except ValidationError as error:
        refused += translate(error)
    else:
        if not refused:
            return topology, [], set()
    dropped: set[str] = set()
    for problem in refused:
        field = field_of(problem.where)
        # One bad item makes a list useless; a bad entry of a mapping, or a wrong key of a section, only itself.
        path = problem.where if field is None or field.kind in (Kind.MAP, Kind.SECTION) else field.path
        if not _drop(draft, path):
            # A section that lacks a key it must have is left out as a whole.
            path = path.rpartition(".")[0]
            _drop(draft, path)
        dropped.add(path)
    draft.data.setdefault("model", _PLACEHOLDER)
    try:
        return _build(draft), refused, dropped
    except ValidationError:
        return None, refused, dropped


def _empty_sections(draft: Draft) -> list[Problem]:
    """A pool without a value could mean one with defaults, or none; neither is guessed."""
    return [
        Problem(field.path, empty_message(field.path))
        for field in spec_fields().values()
        if field.kind is Kind.SECTION and field.optional and draft.data.get(field.path, field) is None
    ]


def _build(draft: Draft) -> Topology:
    # Through JSON and strictly: there true is no number and "8" no port, while lists still become tuples.
    return Topology.model_validate_json(json.dumps(draft.data), strict=True)


def _drop(draft: Draft, path: str) -> bool:
    """Remove a value, if it is there; a key may itself hold dots, so the longest one that exists is taken."""
    here = draft.data
    rest = path
    while rest:
        key = next((k for k in ancestors(rest) if k in here), None)
        if key is None:
            return False
        below = here[key]
        if key == rest or not isinstance(below, dict):
            del here[key]
            return True
        here, rest = below, rest[len(key) + 1 :]
    return False


def _cross_checks(
    topology: Topology, platform: Platform, check: EngineCheck | None, dropped: frozenset[str] | set[str]
) -> tuple[list[Problem], list[Problem]]:
    """Errors and warnings about how values fit together, except where a value was refused already."""
    findings = check_topology(topology, platform)
    errors, warnings = list(findings.errors), list(findings.warnings)
    if check is not None and findings.whole:
        try:
            instances = plan_instances(topology)
        except ConfigError:
            instances = ()  # the counts disagree, which is already among the errors
        resolved = topology.model_copy(update={"platform": platform})
        engine_errors, engine_warnings = check(resolved, instances)
        errors.extend(_new(engine_errors, findings.errors))
        warnings.extend(_new(engine_warnings, (*findings.errors, *findings.warnings)))
    return _new(errors, [Problem(path, "") for path in dropped]), warnings


def _new(problems: Iterable[Problem], known: Sequence[Problem]) -> list[Problem]:
    """Problems at places of which nothing is known yet: one explanation per place is enough."""
    return [p for p in problems if not any(_same_place(p, k) for k in known)]


def _same_place(first: Problem, second: Problem) -> bool:
    """Whether two problems are about the same value, or about one inside the other."""
    return any(
        a == b or a.startswith(f"{b}.") or b.startswith(f"{a}.")
        for a in _places(first.where)
        for b in _places(second.where)
    )


def _places(where: str) -> Iterable[str]:
    return [place for place in where.split(", ") if place]
