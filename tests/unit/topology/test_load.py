"""File and flags put together: precedence, origins, and all problems at once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from disagg.errors import ConfigError, Problem
from disagg.topology.draft import Setting
from disagg.topology.instances import Instance
from disagg.topology.load import FlagProblems, load_file, load_topology
from disagg.topology.provenance import Origin, OriginKind
from disagg.topology.spec import Platform, Stage, Topology
from disagg.topology.yaml_source import read_yaml
from tests.unit.topology.helpers import load, problems

PAIR = "model: m\nprefill: {}\ndecode: {}\n"


def _flag(path: str, value: object, spread: tuple[Stage, ...] = ()) -> Setting:
    name = path.replace(".", "-").replace("_", "-")
    return Setting(tuple(path.split(".")), value, Origin(OriginKind.FLAG, f"--{name}"), spread)  # type: ignore[arg-type]


def test_flags_win_over_the_file_and_each_value_knows_its_source() -> None:
    """A flag replaces the file's value; everything else keeps its line or is the default."""
    document = read_yaml("model: m\nport: 1\nprefill:\n  ports: [2]\ndecode: {ports: 3}\n", name="t.yaml")
    loaded = load_topology(document, [_flag("prefill.ports", "4"), _flag("seed", 5)], auto=Platform.CPU)
    assert loaded.topology.prefill is not None
    assert loaded.topology.prefill.ports == (4,)
    assert str(loaded.provenance.of("prefill.ports")) == "flag --prefill-ports"
    assert str(loaded.provenance.of("decode.ports")) == "t.yaml:5"
    assert str(loaded.provenance.of("port")) == "t.yaml:2"
    assert str(loaded.provenance.of("seed")) == "flag --seed"
    assert str(loaded.provenance.of("host")) == "default"
    assert str(loaded.provenance.of("prefill.replicas")) == "default"
    assert str(loaded.provenance.of("prefill")) == "t.yaml:4"


def test_a_flag_replaces_a_whole_mapping_of_the_file() -> None:
    """Compile settings given as a flag are the settings, not an addition to the file's."""
    text = "model: m\nplatform: qaic\nprefill: {override_qaic_config: {a: 1, b: 2}}\ndecode: {}\n"
    settings = [_flag("prefill.override_qaic_config", "a:2 c:3")]
    loaded = load_topology(read_yaml(text, name="t"), settings, auto=Platform.CPU)
    assert loaded.topology.prefill is not None
    assert loaded.topology.prefill.override_qaic_config == {"a": 2, "c": 3}
    for path in ("", ".a", ".c"):
        assert str(loaded.provenance.of(f"prefill.override_qaic_config{path}")).startswith("flag")


def test_a_flag_adds_one_entry_to_engine_args_and_env() -> None:
    """Each engine flag and variable is a value of its own."""
    text = "model: m\nprefill: {}\ndecode: {engine_args: {a: 1, b: 2}, env: {A: x}}\n"
    settings = [_flag("decode.engine_args.b", 3), _flag("decode.env.B", "y")]
    decode = load_topology(read_yaml(text, name="t"), settings, auto=Platform.CPU).topology.decode
    assert decode is not None
    assert decode.engine_args == {"a": 1, "b": 3}
    assert decode.env == {"A": "x", "B": "y"}


def test_a_part_of_a_single_value_cannot_be_set() -> None:
    """Text in the file has no parts that a flag could set."""
    text = "model: m\nprefill: {}\ndecode: {override_qaic_config: 'a:1'}\n"
    with pytest.raises(ConfigError, match="as one value and not as a mapping"):
        load_topology(read_yaml(text, name="t"), [_flag("decode.override_qaic_config.b", 3)], auto=Platform.QAIC)


def test_a_spread_flag_reaches_pools_without_a_value_of_their_own() -> None:
    """`--tp 2` is for all stages, except those that say otherwise."""
    text = "model: m\nprefill: {parallel: {tensor: 4}}\ndecode: {}\n"
    settings = [_flag("parallel.tensor", 2, tuple(Stage))]
    topology = load_topology(read_yaml(text, name="t"), settings, auto=Platform.CPU).topology
    assert topology.prefill is not None
    assert topology.decode is not None
    assert (topology.prefill.parallel.tensor, topology.decode.parallel.tensor) == (4, 2)
    assert topology.encode is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("port: '80'\n", "t.yaml:4: port: expected a whole number from 1 to 65535, got '80'"),
        ("port: true\n", "t.yaml:4: port: expected a whole number from 1 to 65535, got true"),
        ("port: 8.5\n", "t.yaml:4: port: expected a whole number from 1 to 65535, got 8.5"),
        ("port: 70000\n", "t.yaml:4: port: expected a whole number from 1 to 65535, got 70000"),
        ("port:\n", "t.yaml:4: port: has no value; expected a whole number from 1 to 65535, or remove it for the"),
        ("host: ''\n", "t.yaml:4: host: must not be empty"),
        ("host: 5\n", "t.yaml:4: host: expected text, got 5"),
        ("prot: 1\n", "t.yaml:4: prot: unknown key; did you mean port?"),
        ("max-model-len: 1\n", "t.yaml:4: max-model-len: unknown key; did you mean max_model_len?"),
        ("retries: 1\n", "t.yaml:4: retries: unknown key; it exists as router.retries"),
        ("qqqqqqqq: 1\n", "t.yaml:4: qqqqqqqq: unknown key; known are model, served_model_name"),
        ("link: 3\n", "t.yaml:4: link: expected a mapping of keys to values, got 3"),
        ("link:\n", "t.yaml:4: link: is empty; remove it, or write {}"),
        ("link: {leas_s: 1}\n", "t.yaml:4: link.leas_s: unknown key of link; did you mean lease_s?"),
        ("link: {lease_s: 0}\n", "t.yaml:4: link.lease_s: expected a number above 0 and up to 86400, got 0"),
        ("link: {on_failure: recompte}\n", "got 'recompte'; did you mean recompute?"),
        ("router: {strict: 'no'}\n", "t.yaml:4: router.strict: expected true or false, got 'no'"),
        ("platform: gpu\n", "expected one of auto, cpu, cuda, rocm, qaic, emulated, got 'gpu'"),
        ("env: {A-B: x}\n", "t.yaml:4: env.A-B: 'A-B' is no name of an environment variable"),
        ("env: {A: true}\n", "t.yaml:4: env.A: expected text; put quotes around it, got true"),
        ("engine_args: {--dtype: x}\n", "'--dtype' is no name of an engine flag"),
        ("engine_args: [a]\n", "t.yaml:4: engine_args: expected a mapping of names to values, got a list"),
        ("served_model_name: []\n", "t.yaml:4: served_model_name: is an empty list"),
        ("served_model_name: [3]\n", "t.yaml:4: served_model_name.0: expected a text, got 3"),
        ("kv_store: {}\n", "kv_store.url: is required"),
        ("kv_store: {url: 'x'}\n", "t.yaml:4: kv_store.url: 'x' is not the URL of a store"),
        ("max_model_len: 1.5K\n", "mixes a fraction with a power of two"),
        ("max_model_len: 8q\n", "expected a whole number from 1 to 100000000, got '8q'"),
        (
            "kv_store: {url: 'redis://h', chunk_tokens: 0}\n",
            "kv_store.chunk_tokens: expected a whole number from 1 to",
        ),
        ("prefix: {a: {}}\n", "prefix: unknown key; did you mean prefill?"),
        (f"served_model_name: [{{{'x' * 80}: 1}}]\n", "served_model_name.0: expected a text, got a mapping"),
        (f"platform: {'x' * 80}\n", f"got '{'x' * 57}...'"),
        ("link: {transport: [nixl]}\n", "link.transport: expected one of auto, nixl, shared-memory, got a list"),
        ("kv_store: {url: null}\n", "kv_store.url: is required; expected text"),
        ("override_qaic_config: 3\n", "override_qaic_config: expected a mapping of names to values, got 3"),
    ],
)
def test_a_wrong_value_is_told_in_the_users_words(text: str, message: str) -> None:
    """The line, the key, what was expected and what was found; no word of the validation library."""
    found = problems(PAIR + text)
    assert len(found) == 1
    assert message in found[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prefill: {device_groups: [0, 2..1]}\n", "prefill.device_groups.1: range 2..1 is reversed; write 1..2"),
        ("prefill: {device_groups: ['0,0']}\n", "prefill.device_groups.0: id 0 is repeated"),
        ("prefill: {device_groups: ['']}\n", "prefill.device_groups.0: a device group is empty"),
        ("prefill: {device_groups: [true]}\n", "expected a device group such as 0..15 or 0,2,4, got true"),
        ("prefill: {device_groups: []}\n", "prefill.device_groups: is an empty list"),
        ("prefill: {ports: [0]}\n", "prefill.ports.0: expected a port from 1 to 65535, got 0"),
        ("prefill: {ports: '9900,x'}\n", "prefill.ports: 'x' is not a port"),
        ("prefill: {speculative_config: '{'}\n", "prefill.speculative_config: is not JSON"),
        ("prefill: 5\n", "prefill: expected a mapping of keys to values, got 5"),
        ("prefill:\n", "prefill: is empty; remove it, or write {} for one with default values"),
    ],
)
def test_a_wrong_value_in_a_pool_is_told_once(text: str, message: str) -> None:
    """A refused value causes no second message about its absence."""
    found = problems(f"model: m\ndecode: {{}}\n{text}")
    assert len(found) == 1
    assert message in found[0]
    assert found[0].startswith("t.yaml:3")


def test_all_problems_come_at_once() -> None:
    """Form, types, unknown keys and what does not fit together are one report."""
    found = problems(
        "port: 9900\nport: 9900\nprefill:\n  ports: [9900, 9901]\n  device_groups: [0, 1]\n"
        "  max_num_seqs: many\ndecode:\n  device_groups: [1]\n  prots: 3\n"
    )
    text = "\n".join(found)
    assert len(found) == 6
    parts = [
        "given twice",
        "got 'many'",
        "did you mean ports",
        "model (--model): is required",
        "both have CPU core 1",
        "port 9900 is given to the endpoint and prefill-0",
    ]
    assert [part for part in parts if part not in text] == []


def test_shorthands_of_the_file() -> None:
    """One value stands for a list of one, numbers for groups, suffixes for counts."""
    topology = load(
        "model: m\nserved_model_name: a\nmax_model_len: 8k\nenv: {N: 4}\n"
        "prefill: {ports: 9900, device_groups: 0}\ndecode: {ports: '9800,9801', device_groups: [[1, 2], 3]}\n"
    ).topology
    assert topology.prefill is not None
    assert topology.decode is not None
    assert topology.served_model_name == ("a",)
    assert topology.max_model_len == 8000
    assert topology.env == {"N": "4"}
    assert (topology.prefill.ports, topology.prefill.device_groups) == ((9900,), ("0",))
    assert (topology.decode.ports, topology.decode.device_groups) == ((9800, 9801), ("1,2", "3"))


def test_what_the_engine_says_is_part_of_the_report() -> None:
    """The adapter sees the resolved platform and the plan; its places become lines, and nothing is said twice."""
    seen: list[tuple[Platform, int]] = []

    def check(topology: Topology, instances: Sequence[Instance]) -> tuple[list[Problem], list[Problem]]:
        seen.append((topology.platform, len(instances)))
        errors = [Problem("seed", "no seeds here"), Problem("port", "engine's own words")]
        return errors, [Problem("decode.env.A", "odd")]

    text = PAIR.replace("decode: {}", "decode: {env: {A: x}}") + "seed: 3\nport: 9900\n"
    document = read_yaml(text.replace("prefill: {}", "prefill: {ports: 9900}"), name="t.yaml")
    with pytest.raises(ConfigError) as caught:
        load_topology(document, auto=Platform.EMULATED, check=check)
    assert seen == [(Platform.EMULATED, 2)]
    assert [p.where for p in caught.value.problems] == ["t.yaml:5: port, t.yaml:2: prefill.ports.0", "t.yaml:4: seed"]


def test_warnings_of_the_engine_name_their_line() -> None:
    """A warning does not stop the load."""
    loaded = load_topology(
        read_yaml(PAIR, name="t.yaml"), auto=Platform.CPU, check=lambda _t, _i: ([], [Problem("decode", "odd")])
    )
    assert loaded.warnings == (Problem("t.yaml:3: decode", "odd"),)


def test_the_engine_is_asked_only_about_a_deployment() -> None:
    """Adapters may rely on the stages making sense."""
    with pytest.raises(ConfigError, match="decode"):
        load_topology(
            read_yaml("model: m\nprefill: {}\n", name="t"),
            auto=Platform.CPU,
            check=lambda _t, _i: pytest.fail("asked"),
        )


def test_a_refused_flag_does_not_count_as_missing() -> None:
    """If the only flag of a pool was wrong, nobody says that the pool is missing."""
    before = FlagProblems(errors=(Problem("--decode-port", "needs a value"),), refused=frozenset({"decode.ports"}))
    with pytest.raises(ConfigError) as caught:
        load_topology(None, [_flag("model", "m"), _flag("prefill.replicas", 1)], auto=Platform.CPU, before=before)
    assert [p.where for p in caught.value.problems] == ["--decode-port"]


def test_auto_resolves_into_a_new_topology() -> None:
    """The topology stays as given; the resolved one differs in its platform alone."""
    loaded = load(PAIR, auto=Platform.EMULATED)
    assert loaded.topology.platform is Platform.AUTO
    assert loaded.platform is Platform.EMULATED
    assert loaded.resolved() == loaded.topology.model_copy(update={"platform": Platform.EMULATED})
    assert load(PAIR + "platform: cuda\n", auto=Platform.EMULATED).platform is Platform.CUDA


def test_a_file_is_read_from_disk(tmp_path: object) -> None:
    """`load_file` is the whole way from a path to a topology."""
    path = f"{tmp_path}/t.yaml"
    with open(path, "w", encoding="utf-8") as file:
        file.write(PAIR)
    loaded = load_file(path, auto=Platform.CPU)
    assert loaded.topology.model == "m"
    assert str(loaded.provenance.of("model")) == f"{path}:1"
