"""The command line that describes a topology."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.cli.flags import CommandFlag, CommandLine, add_topology_flags, build_topology, split_command_flags
from disagg.errors import ConfigError
from disagg.topology.spec import Platform, Pool
from tests.unit.cli.flag_tables import PAIR, TABLES, build, problems


def _pools(*words: str) -> tuple[Pool, Pool]:
    topology = build(*words).topology
    assert topology.prefill is not None
    assert topology.decode is not None
    return topology.prefill, topology.decode


def test_ports_and_groups_of_one_and_several_instances() -> None:
    """The spellings of Qualcomm's launcher: a comma list of ports, groups separated by spaces behind one flag."""
    words = ["--model=m", "--prefill-port", "9900,9901", "--prefill-device-group", "0,1", "2,3"]
    words += ["--decode-port", "9800", "--decode-device-group", "4..7"]
    topology = build(*words, pair=False).topology
    assert topology.prefill == Pool(ports=(9900, 9901), device_groups=("0,1", "2,3"))
    assert topology.decode == Pool(ports=(9800,), device_groups=("4..7",))
    quoted = build_topology([*words[:4], "0,1 2,3", *words[6:]], flag_tables=TABLES)
    assert quoted.topology == topology


@pytest.mark.parametrize(
    ("words", "path", "value"),
    [
        (["--port", "80"], "port", 80),
        (["--port=80"], "port", 80),
        (["--max_model_len", "8k"], "max_model_len", 8000),
        (["--max-model-len", "8K"], "max_model_len", 8192),
        (["--prefill-max-num-seqs", "1"], "prefill.max_num_seqs", 1),
        (["--decode-max-seq-len-to-capture", "256"], "decode.max_seq_len_to_capture", 256),
        (["--kv-cache-dtype", "fp8"], "kv_cache_dtype", "fp8"),
        (["--generation-config", "vllm"], "generation_config", "vllm"),
        (["--quantization", "awq"], "quantization", "awq"),
        (["-q", "awq"], "quantization", "awq"),
        (["--seed", "7"], "seed", 7),
        (["--served-model-name", "a", "b"], "served_model_name", ("a", "b")),
        (["-v", "-v", "-v"], "verbosity", 3),
        (["-vvv"], "verbosity", 3),
        (["-vv", "-v"], "verbosity", 3),
        (["--kv-handOff-port", "5657"], "link.handoff_port", 5657),
        (["--kv-handoff-port", "5657"], "link.handoff_port", 5657),
        (["--handoff-store-mb", "768"], "link.handoff_store_mb", 768),
        (["--link-lease-s", "12.5"], "link.lease_s", 12.5),
        (["--link-lease-s", "12"], "link.lease_s", 12.0),
        (["--side-channel-port", "6000"], "link.side_channel_port", 6000),
        (["--prefill-policy", "round-robin"], "router.prefill_policy", "round-robin"),
        (["--decode-policy", "round-robin"], "router.decode_policy", "round-robin"),
        (["--strict"], "router.strict", True),
        (["--no-strict"], "router.strict", False),
        (["--strict=false"], "router.strict", False),
        (["--prefill-tp", "2"], "prefill.parallel.tensor", 2),
        (["--prefill-tensor-parallel-size", "2"], "prefill.parallel.tensor", 2),
        (["--decode-pp", "2"], "decode.parallel.pipeline", 2),
        (["--decode-dp", "2"], "decode.parallel.data", 2),
        (["--decode-ep", "2"], "decode.parallel.expert", 2),
        (["--tp", "2"], "decode.parallel.tensor", 2),
        (["-tp", "2"], "prefill.parallel.tensor", 2),
        (["--encode-max-num-seqs", "3"], "encode.max_num_seqs", 3),
        (["--colocated-replicas", "3"], "colocated.replicas", 3),
        (["--env", "A=b=c", "--env", "B="], "env", {"A": "b=c", "B": ""}),
        (["--prefill-env=A=1"], "prefill.env", {"A": "1"}),
        (["--kv-store-url", "redis://h:1"], "kv_store.url", "redis://h:1"),
        (["--log-dir", "-odd name"], "log_dir", "-odd name"),
        (
            ["--prefill-override-qaic-config", "a:True b=1 bare"],
            "prefill.override_qaic_config",
            {"a": True, "b": 1, "bare": True},
        ),
        (["--prefill-override-qaic-config", "a:True", "b=1"], "prefill.override_qaic_config", {"a": True, "b": 1}),
        (
            ["--decode-override-qaic-config", '{"a": true, "b": 1}'],
            "decode.override_qaic_config",
            {"a": True, "b": 1},
        ),
        (
            ["--decode-speculative-config", '{"method":"ngram","n":-1}'],
            "decode.speculative_config",
            {"method": "ngram", "n": -1},
        ),
        (["--speculative-config", '{"method":"ngram"}'], "decode.speculative_config", {"method": "ngram"}),
        (
            ["--decode-speculative-config.method", "ngram", "--decode-speculative-config.num_speculative_tokens=5"],
            "decode.speculative_config",
            {"method": "ngram", "num_speculative_tokens": 5},
        ),
    ],
)
def test_each_spelling_sets_its_field(words: list[str], path: str, value: object) -> None:
    """One flag, one field."""
    here: Any = build(*words).topology
    for part in path.split("."):
        here = getattr(here, part)
    assert here == value


def test_speculation_without_a_stage_stays_off_prefill() -> None:
    """Proposals are made where tokens are."""
    prefill, decode = _pools("--speculative-config", '{"method":"ngram"}')
    assert prefill.speculative_config is None
    assert decode.speculative_config == {"method": "ngram"}


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        (["--dtype", "float32"], "dtype", "float32"),
        (["--enable-prefix-caching"], "enable-prefix-caching", True),
        (["--no-enable-prefix-caching"], "enable-prefix-caching", False),
        (["--enable_prefix_caching"], "enable-prefix-caching", True),
        (["--enable-prefix-caching=false"], "enable-prefix-caching", False),
        (["--gpu-memory-utilization", ".5"], "gpu-memory-utilization", 0.5),
        (["--max-lora-rank", "8k"], "max-lora-rank", 8000),
        (["--lora-modules", "a=b", "c=d"], "lora-modules", ["a=b", "c=d"]),
        (["--compilation-config", '{"level": 3}'], "compilation-config", {"level": 3}),
        (["--compilation-config.level", "3"], "compilation-config.level", 3),
        (["--compilation_config.pass_config.a=true"], "compilation-config.pass_config.a", True),
        (["--compilation-config.mode", "none"], "compilation-config.mode", "none"),
        (["--compilation-config.sizes+", "1,2"], "compilation-config.sizes+", "1,2"),
        (["--hf-overrides", '{"a": 1}'], "hf-overrides", {"a": 1}),
        (["--hf-overrides", "name"], "hf-overrides", "name"),
        (["--no-code"], "no-code", True),
        (["--prefill-schedule-interval", "3"], "prefill-schedule-interval", 3),
        (["--tokenizer", "8"], "tokenizer", "8"),
    ],
)
def test_engine_flags_go_to_engine_args_with_their_type(words: list[str], key: str, value: object) -> None:
    """Without a stage for all, with one for its pool alone; the table says how many words belong to a flag."""
    assert build(*words).topology.engine_args == {key: value}
    staged = [f"--decode-{w[2:]}" if w.startswith("--") else w for w in words]
    prefill, decode = _pools(*staged)
    assert decode.engine_args == {key: value}
    assert prefill.engine_args == {}


def test_the_table_of_the_platform_is_used(tmp_path: Path) -> None:
    """The platform decides which engine's flags are known, whether it is a flag or in the file."""
    only_cuda = {Platform.CUDA: TABLES[Platform.CUDA]}
    words = [*PAIR, "--dtype", "float32"]
    assert build_topology([*words, "--platform", "cuda"], flag_tables=only_cuda).topology.engine_args
    assert build_topology(["--platform=cpu", "--platform=cuda", *words], flag_tables=only_cuda).topology.engine_args
    assert build_topology(words, flag_tables=only_cuda, auto=Platform.CUDA).platform is Platform.CUDA
    path = tmp_path / "t.yaml"
    path.write_text("platform: cuda\n")
    assert build_topology(words, flag_tables=only_cuda, config=str(path)).topology.engine_args
    with pytest.raises(ConfigError, match="--dtype: unknown flag"):
        build_topology(words, flag_tables=only_cuda)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--port"], "--port: needs a value: a whole number from 1 to 65535"),
        (["--port", "x"], "--port: expected a whole number from 1 to 65535, got 'x'"),
        (["--port", "-1"], "--port: expected a whole number from 1 to 65535, got -1"),
        (["--port", "80", "81"], "--port: does not take the further value '81'; quote a value that holds spaces"),
        (["--link-lease-s", "nan"], "--link-lease-s: expected a number above 0 and up to 86400, got 'nan'"),
        (["--strict", "yes"], "--strict: does not take the further value 'yes'"),
        (["--strict=maybe"], "--strict: takes no value; write --strict or --no-strict"),
        (["--env", "A"], "--env: expected NAME=VALUE, got 'A'"),
        (["--env", "A-B=1"], "--env: 'A-B' is no name of an environment variable"),
        (["--decode-speculative-config", "[]"], "--decode-speculative-config: expected a JSON object"),
        (["--decode-speculative-config", "{"], "--decode-speculative-config: is not JSON"),
        (["--speculative-config.method", "x"], "give the stage, as in --decode-speculative-config.method"),
        (["--kv-store-size", "64"], "--kv-store-size: has no known unit"),
        (["--kv-store-size", "64"], "give --handoff-store-mb or --handoff-store-entries"),
        (["--prefil-port", "1"], "--prefil-port: unknown flag; did you mean --prefill-port?"),
        (["--decode-prot", "1"], "--decode-prot: unknown flag; did you mean --decode-port?"),
        (["--decode-dtyp", "1"], "--decode-dtyp: unknown flag; did you mean --decode-dtype?"),
        (["--enable-prefix-cachin"], "did you mean --enable-prefix-caching?"),
        (["--zzz", "1", "2"], "--zzz: neither disagg nor engine 1 has this flag; --allow-unknown-engine-args"),
        (["--max-model", "1"], "--max-model: unknown flag; did you mean"),
        (["-x"], "-x: unknown short flag; write the long form"),
        (["--", "x"], "--"),
        (["--prefill-host", "h"], "--prefill-host: is set by disagg; use --host"),
        (["--decode-api-key", "k"], "--decode-api-key: is set by disagg; the router checks keys"),
        (["--kv-transfer-config", "{}"], "--kv-transfer-config: is set by disagg; use link"),
        (["--dtype"], "--dtype: needs a value"),
        (["--max-lora-rank", "x"], "--max-lora-rank: expected a whole number, got 'x'"),
        (["--gpu-memory-utilization", "inf"], "--gpu-memory-utilization: expected a number, got 'inf'"),
        (["--enable-prefix-caching=3"], "--enable-prefix-caching: takes no value, got '3'"),
        (["--compilation-config", "{"], "--compilation-config: is not JSON"),
        (["--model", "\udcff"], "is not UTF-8 text"),
    ],
)
def test_a_wrong_flag_is_told_with_its_name(words: list[str], message: str) -> None:
    """What is wrong and what would be right, and no second problem that follows from the first."""
    found = problems(*words)
    assert message in found[0]
    assert len(found) == 1 or words[0] == "--"


def test_all_flag_problems_come_at_once() -> None:
    """argparse would stop at the first."""
    found = problems("--port", "x", "--prefil-port", "1", "--decode-api-key", "k", "--max-model-len", "--zzz")
    assert [p.partition(":")[0] for p in found] == [
        "--prefil-port", "--decode-api-key", "--max-model-len", "--zzz", "--port",
    ]  # fmt: skip


def test_a_refused_flag_of_the_only_decode_flag_is_the_only_problem() -> None:
    """The pool was asked for, so it is not called missing."""
    assert problems("--model", "m", "--prefill-replicas", "1", "--decode-replicas", pair=False) == [
        "--decode-replicas: needs a value: a whole number from 1 to 1000000"
    ]


def test_unknown_engine_flags_may_be_let_through() -> None:
    """With a warning, with as many words as follow, for the stage in front; the flag or the file may allow it."""
    loaded = build("--zzz", "--decode-yyy", "1", "--xxx", "a", "b", "--allow-unknown-engine-args")
    assert loaded.topology.engine_args == {"zzz": True, "xxx": ["a", "b"]}
    assert loaded.topology.decode is not None
    assert loaded.topology.decode.engine_args == {"yyy": "1"}
    assert [w.where for w in loaded.warnings] == ["--zzz", "--decode-yyy", "--xxx"]
    assert problems("--zzz", "--allow-unknown-engine-args", "--no-allow-unknown-engine-args")


def test_the_file_may_allow_unknown_engine_flags(tmp_path: Path) -> None:
    """The permission is a value like any other."""
    path = tmp_path / "t.yaml"
    path.write_text("allow_unknown_engine_args: true\n")
    assert build("--zzz", config=str(path)).topology.engine_args == {"zzz": True}


def test_a_repeated_flag_has_its_last_value_and_a_warning() -> None:
    """As in vLLM; the same value twice is no reason to warn."""
    loaded = build("--port", "1", "--port", "2", "--prefill-tp", "2", "--prefill-tensor-parallel-size=3", "--seed=1")
    assert loaded.topology.port == 2
    assert [str(w) for w in loaded.warnings] == [
        "--port: given more than once for port; the last value, 2, holds",
        "--prefill-tp and --prefill-tensor-parallel-size: given more than once for prefill.parallel.tensor; "
        "the last value, 3, holds",
    ]
    assert build("--port", "1", "--port", "1").warnings == ()
    prefill, decode = _pools("--tp", "2", "--tp", "3")
    assert (prefill.parallel.tensor, decode.parallel.tensor) == (3, 3)


def test_a_first_word_is_the_model() -> None:
    """As in vLLM; later stray words are errors."""
    assert build("m", "--prefill-replicas", "1", "--decode-replicas", "1", pair=False).topology.model == "m"
    assert "does not take the further value" in problems("x")[0]


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    """And each value says where it came from."""
    path = tmp_path / "t.yaml"
    path.write_text("model: m\nport: 1\nprefill: {ports: [2]}\ndecode: {parallel: {tensor: 4}}\n")
    loaded = build("--prefill-port", "3", "--tp", "2", pair=False, config=str(path))
    assert loaded.topology.prefill is not None
    assert loaded.topology.decode is not None
    assert loaded.topology.prefill.ports == (3,)
    assert (loaded.topology.prefill.parallel.tensor, loaded.topology.decode.parallel.tensor) == (2, 4)
    assert str(loaded.provenance.of("prefill.ports")) == "flag --prefill-port"
    assert str(loaded.provenance.of("prefill.parallel.tensor")) == "flag --tp"
    assert str(loaded.provenance.of("port")) == f"{path}:2"


def test_an_unreadable_file_is_told_beside_the_flags_own_mistakes(tmp_path: Path) -> None:
    """What the file would have said is not reported as missing."""
    found = problems("--zzz", pair=False, config=str(tmp_path / "none.yaml"))
    assert len(found) == 2
    assert "no such file" in found[0]
    assert found[1].startswith("--zzz")


def test_without_an_engine_only_our_flags_are_known() -> None:
    """A projection needs no engine; it still names the nearest flag."""
    with pytest.raises(ConfigError) as caught:
        build_topology([*PAIR, "--dtype", "x", "--zzzzzz"], flag_tables={})
    assert str(caught.value.problems[1]) == "--zzzzzz: unknown flag; --help lists all"


def test_nothing_at_all_says_what_to_give() -> None:
    """The shortest command line names the flags that make a longer one."""
    text = "\n".join(problems(pair=False))
    assert "model (--model): is required" in text
    assert "--prefill-replicas 1 and --decode-replicas 1" in text


def test_a_commands_own_flags_are_taken_out() -> None:
    """In any place and spelling; the rest keeps its order."""
    own = [CommandFlag("--config", takes_value=True, short="-c"), CommandFlag("--dry-run"), CommandFlag("--json")]
    argv = ["m", "--dry-run", "--port", "1", "-c", "a.yaml", "--config=b.yaml", "-v"]
    given_flags, rest = split_command_flags(argv, own)
    assert given_flags == {"--dry-run": True, "--config": "b.yaml"}
    assert rest == ["m", "--port", "1", "-v"]
    with pytest.raises(ConfigError) as caught:
        split_command_flags(["--config", "--dry-run=1", "--config"], own)
    assert [p.where for p in caught.value.problems] == ["--config", "--dry-run", "--config"]


@pytest.mark.parametrize("word", ["-", "---", "--=x", "-c/some/file"])
def test_a_first_word_with_a_dash_is_not_a_model(word: str) -> None:
    """A slip in a flag must not start engines with its spelling for a model."""
    words = [word, "--prefill-replicas", "1", "--decode-replicas", "1"]
    told = problems(*words, pair=False)
    assert told == [f"{word}: is neither a flag nor a model; flags are written --name=value", told[-1]]
    assert "model (--model): is required" in told[-1]


def test_an_empty_value_of_a_commands_flag_is_none() -> None:
    """`--config $FILE` without FILE."""
    own = [CommandFlag("--config", takes_value=True)]
    for argv in (["--config", ""], ["--config="]):
        with pytest.raises(ConfigError, match="--config: needs a value"):
            split_command_flags(argv, own)


def test_a_slip_in_a_commands_own_flag_is_recognised() -> None:
    """The topology's flags are not the only ones that can have been meant."""
    with pytest.raises(ConfigError, match=r"--dryrun: unknown flag; did you mean --dry-run\?"):
        build_topology([*PAIR, "--dryrun"], flag_tables=TABLES, command=CommandLine((CommandFlag("--dry-run"),)))


def test_help_shows_the_flags_in_groups_with_examples() -> None:
    """One pool's flags stand for all four."""
    parser = argparse.ArgumentParser(prog="disagg serve")
    add_topology_flags(parser)
    text = parser.format_help()
    for part in (
        "each pool:",
        "router:",
        "KV transfer:",
        "--prefill-device-group",
        "topology examples:",
        "--strict, --no-strict",
        "--kv-handOff-port",
        "-v ",
    ):
        assert part in text
    assert "--decode-device-groups" not in text
    assert not parser.allow_abbrev


_WORDS = st.sampled_from(
    [
        "--port",
        "--prefill-port",
        "9900",
        "0..3",
        "3..0",
        "--decode-device-group",
        "-v",
        "--",
        "x",
        "{}",
        "{",
        "=",
        "--=",
        "--strict",
        "--no-strict",
        "--dtype",
        "--decode-no-dtype",
        "--compilation-config.a.b",
        "--x.y",
        "-1",
        "--env",
        "A=1",
        "--prefill-",
        "--decode-engine-args",
        "--speculative-config",
        "--prefill-override-qaic-config",
        "a:1",
        "é",
        "--é",
    ]
)


@settings(deadline=None)
@given(st.lists(_WORDS | st.text(max_size=6), max_size=8))
def test_any_words_are_read_or_refused(words: list[str]) -> None:
    """Nothing but a ConfigError comes out, and each problem says something."""
    for argv in (words, [*PAIR, *words]):
        try:
            build_topology(argv, flag_tables=TABLES)
        except ConfigError as error:
            assert all(p.message for p in error.problems)  # noqa: PT017
