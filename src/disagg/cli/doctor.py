"""`disagg doctor`: check that this Python environment can run the engine."""

from __future__ import annotations

from collections.abc import Sequence

from disagg.launch import environment


def main(argv: Sequence[str]) -> int:
    """Run the command; 0 if everything is there, 1 if problems are left."""
    return environment.main(argv)
