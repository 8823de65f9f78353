"""Writes the reference page and the JSON Schema from the specs: ``python -m disagg.topology.reference [--check]``.

It runs in a checkout: the page goes to ``docs/reference/topology.md``, the schema beside the specs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import BaseModel

from disagg.topology import spec
from disagg.topology.device_checks import QAIC_CORES
from disagg.topology.fields import Kind, SpecField, spec_fields
from disagg.topology.flags import REFUSED_FLAGS, SHORT_FLAGS, flag_table, flags_of
from disagg.topology.schema import FILE_NAME, make_schema
from disagg.topology.yaml_source import MAX_BYTES, MAX_DEPTH, MAX_NODES

PAGE = Path("docs/reference/topology.md")
SCHEMA = Path("src/disagg/topology") / FILE_NAME

_INTRO = f"""\
<!-- Made by `python -m disagg.topology.reference` from src/disagg/topology/spec.py. Edit that, not this page. -->

# Topology reference

A topology says what is deployed: the model, the pools of each stage, how KV travels, and the endpoint. It is a YAML
file, the same thing as flags, or both; flags win. `disagg serve ... --print-config` turns flags into the file and
says where each value came from. `{FILE_NAME}` in the package describes the file to editors.

```yaml
model: smollm2-135m-instruct
prefill:
  device_groups: [0, 1]      # two instances, one CPU core each
decode:
  device_groups: ["2,3"]     # one instance with two cores
  max_num_seqs: 16
```

Everything that is wrong is reported at once, each problem with its flag or with file, line and key.

## The file

- An unknown key is an error that names the nearest known one. So are a key that is given twice, a key without a
  value, and a value of the wrong type.
- Values are read by the rules of YAML 1.2: `no`, `on` and `010` are text, `true` and `false` are the only booleans.
- Anchors, aliases and `<<` work. A file has at most {MAX_BYTES // 1024} KiB, {MAX_DEPTH} levels and {MAX_NODES}
  values, aliases expanded.
- Lists of one may be written as the one: `ports: 9900`, `device_groups: 0..15`.
- Counts may end in k, m, g (powers of ten: `8k` is 8000) or K, M, G (powers of two: `8K` is 8192), as in vLLM.
- Compile settings may be text, `"mxfp6_matmul:True num_cores=10 split_retained_state_io"`, and mean the same as the
  mapping `{{mxfp6_matmul: true, num_cores: 10, split_retained_state_io: true}}`.

## The flags

- `--flag value` and `--flag=value` are the same, and underscores in a flag's name count as dashes.
- A first word without dashes is the model.
- A repeated flag has its last value, and a warning says so if the values differ. `-v` adds up: `-v -v -v` is `-vvv`.
- {{short}}
- Any flag of the engine is accepted, with `--encode-`, `--prefill-`, `--decode-` or `--colocated-` in front for one
  stage and without for all. It becomes an entry of `engine_args`. Booleans have a `--no-` twin, and a part of a JSON
  flag is set with a dot: `--decode-compilation-config.level 3`. Flags that `disagg` sets itself are refused with what
  to use instead; unknown ones are refused with the nearest known one, unless `--allow-unknown-engine-args` is given.
{{refused}}
"""

_GROUPS = f"""\
## Device groups and ports

A group is `0..15` (both ends included), `0,2,4`, or a mixture such as `0..3,8`. Several groups, one per instance, are
separated by spaces behind one flag, or are a list in the file: `--prefill-device-group 0,1 2,3`. What an id is
depends on the platform:

| Platform | An id is | A group has to have |
|---|---|---|
| cpu | a CPU core | at least tensor x pipeline x data ids |
| cuda, rocm | a CUDA or HIP device | exactly tensor x pipeline x data ids |
| qaic | a QID, absolute on the host | a multiple of tensor x pipeline x data ids |
| emulated | a number | anything |

A device belongs to one instance. On qaic two instances may share one if `num_cores` in both
`override_qaic_config` (a draft model's included) adds up to at most {QAIC_CORES}. A colocated pool never
shares. Groups are given for all pools or for none. Without groups the topology gives an instance no devices; the
launcher may share out CPU cores evenly.

`replicas`, the number of groups and the number of ports agree wherever more than one of them is given. Ports that are
not given are counted up from the stage's default, past every port that the topology uses elsewhere. Each instance
reserves as many side-channel ports as it has data-parallel ranks, counted up from `link.side_channel_port`.

## What fits together

- A decode pool, and a prefill pool (xPyD), an encode pool (xEyPD) or both (xEyPzD) before it; or a colocated pool,
  alone or beside them.
- Prefill and decode have the same `kv_cache_dtype` and `block_size`. Different `max_model_len` are allowed; the
  endpoint takes the smaller.
- `mxint8` is a KV format of qaic. Speculation on qaic is decode's alone. Fields about KV and tokens have no meaning
  for encode.
- The engine's adapter adds what only it knows.
"""

_SECTIONS: tuple[tuple[str, str, str], ...] = (
    ("", "Topology", "Top-level keys. A pool's key of the same name wins for its stage."),
    (
        "prefill",
        "Pools: `encode`, `prefill`, `decode`, `colocated`",
        "All four have these keys; the flags shown are prefill's.",
    ),
    (
        "prefill.parallel",
        "`parallel`, inside a pool",
        "A flag without a stage sets every pool that has no value of its own.",
    ),
    ("link", "`link`", ""),
    ("kv_store", "`kv_store`", ""),
    ("router", "`router`", ""),
)


def make_page() -> str:
    """The reference page as the specs have it now."""
    short = "Short spellings: " + ", ".join(f"`{s}` for `--{n}`" for s, n in SHORT_FLAGS.items()) + "."
    refused = "\n".join(f"- `--{name}` {why}." for name, why in REFUSED_FLAGS.items())
    parts = [_INTRO.replace("{short}", short).replace("{refused}", refused), _GROUPS]
    parts.extend("\n".join(_table(path, title, note)) + "\n" for path, title, note in _SECTIONS)
    return "\n".join(parts)


def _table(path: str, title: str, note: str) -> Iterator[str]:
    yield f"## {title}"
    yield ""
    model = _model_doc(path)
    yield f"{model} {note}".strip()
    yield ""
    yield "| Key | Type | Default | Flag | Effect |"
    yield "|---|---|---|---|---|"
    prefix = f"{path}." if path else ""
    for field in spec_fields().values():
        if field.path == prefix + field.name:
            cells = (f"`{field.name}`", field.expects, _default(field), _flags(field), field.doc)
            yield "| " + " | ".join(_cell(c) for c in cells) + " |"


def _model_doc(path: str) -> str:
    names = {"": "Topology", "prefill": "Pool", "prefill.parallel": "ParallelShape", "kv_store": "KvStore"}
    model = getattr(spec, names.get(path, path.capitalize()))
    return " ".join((model.__doc__ or "").split())


def _default(field: SpecField) -> str:
    if field.required:
        return "required"
    if isinstance(field.default, BaseModel):
        return "defaults below"
    if field.default is None:
        return "-"
    words = {True: "true", False: "false"}
    return f"`{words[field.default] if isinstance(field.default, bool) else field.default}`"


def _flags(field: SpecField) -> str:
    if field.kind is Kind.SECTION:
        return "see its section"
    if field.name == "engine_args":
        return "any flag of the engine"
    names = list(flags_of(field.path))
    tail = field.path.partition(".")[2]
    for flag in flag_table():
        if flag.spread and ".".join(flag.path) == tail:
            names.extend(f"--{n}" for n in flag.names)
    if field.name == "verbosity":
        names.append("-v")
    return ", ".join(f"`{n}`" for n in names)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main(argv: Sequence[str]) -> int:
    """Write both files, or with ``--check`` say whether they are current; 1 if one is not."""
    stale = 0
    for path, text in ((PAGE, make_page()), (SCHEMA, make_schema())):
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        if "--check" in argv:
            stale = 1
            sys.stdout.write(f"{path} is not current; run python -m disagg.topology.reference\n")
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            sys.stdout.write(f"wrote {path}\n")
    return stale


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
