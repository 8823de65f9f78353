"""The accelerators of the catalogue, and how to find or describe one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from disagg.catalog import lookup
from disagg.catalog.accelerator import Accelerator
from disagg.catalog.accelerator_file import accelerator_from
from disagg.errors import ConfigError, Problem

_FOLDER = Path(__file__).with_name("data") / "accelerators"
_ADVICE = "`disagg accelerators` lists it; describe any other device in a YAML file and give its path."


@cache
def accelerators() -> Mapping[str, Accelerator]:
    """All accelerators of the catalogue by name, sorted."""
    found = {}
    for file in sorted(_FOLDER.glob("*.json")):
        data = json.loads(file.read_text(encoding="utf-8"))
        found[file.stem] = accelerator_from(data, name=file.stem, where=f"catalogue, {file.stem}")
    return found


@cache
def _index() -> Mapping[str, str]:
    return lookup.index({name: entry.aliases for name, entry in accelerators().items()})


def find_accelerator(name: str) -> Accelerator:
    """An accelerator by name or path.

    Args:
        name: A name or alias of the catalogue in small or capital letters, or the path of a description.

    Raises:
        ConfigError: If there is no such name, with the nearest ones; or if the file is wrong.
    """
    path = Path(name).expanduser()
    if path.suffix in {".yaml", ".yml", ".json"} or path.is_file():
        return read_accelerator(path)
    entry = _index().get(lookup.key(name))
    if entry is None:
        raise lookup.unknown("accelerator", name, _index(), _ADVICE)
    return accelerators()[entry]


def read_accelerator(path: Path) -> Accelerator:
    """Read the description of a device from a YAML or JSON file.

    Raises:
        ConfigError: If the file cannot be read, or is wrong: all problems at once.
    """
    # Reading YAML takes a tenth of a start; most users never give a file.
    import yaml

    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError([Problem(str(path), f"cannot be read: {error.strerror or error}")]) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError([Problem(str(path), f"is not YAML: {error}")]) from error
    if not isinstance(data, dict):
        raise ConfigError([Problem(str(path), "must hold one object, the description of a device")])
    return accelerator_from({str(k): v for k, v in data.items()}, name=path.stem, where=str(path))
