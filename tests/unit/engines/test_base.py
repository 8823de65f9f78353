"""What all adapters build their plans from."""

from __future__ import annotations

import subprocess
from pathlib import Path

from disagg.engines.base import python_module


def test_files_in_the_current_folder_are_not_imported(tmp_path: Path) -> None:
    """A user's own argparse.py beside the topology must not end every engine at its start."""
    (tmp_path / "argparse.py").write_text("raise SystemExit(77)\n")
    done = subprocess.run(
        [*python_module("json.tool"), "--help"], cwd=tmp_path, capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 0
