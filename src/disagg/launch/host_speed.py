"""Measures what this machine's processor does: products of matrices, and moving memory.

Numerical libraries fix their number of threads when they are loaded, so each number of threads is measured in a
process of its own: ``python -m disagg.launch.host_speed THREADS SECONDS MEBIBYTES`` prints one JSON object.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from disagg.errors import PreparationError

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
_SIDE = 2048
# Larger than any cache of today, so that memory is what is measured.
_MEBIBYTES = 512
_TIMEOUT = 300.0


@dataclass(frozen=True, slots=True)
class HostSpeed:
    """What so many threads do.

    Attributes:
        threads: How many.
        fp32: FLOP/s of products of 2048 x 2048 matrices in FP32 with NumPy.
        bf16: The same in BF16 with PyTorch; None where it is not installed.
        copy: Bytes/s moved while copying half a GiB, reads and writes both counted.
        read: Bytes/s read while a matrix of half a GiB multiplies a vector, as weights are in decode.
        library: What computed.
    """

    threads: int
    fp32: float
    bf16: float | None
    copy: float
    read: float
    library: str


def measure(threads: int, seconds: float, mebibytes: int = _MEBIBYTES) -> HostSpeed:
    """Measure in a process of its own.

    Args:
        threads: How many threads compute.
        seconds: Least time for each of the measurements.
        mebibytes: Size of what is copied and read.

    Raises:
        PreparationError: If the process fails or takes minutes.
    """
    command = [sys.executable, "-m", "disagg.launch.host_speed", str(threads), str(seconds), str(mebibytes)]
    environment = os.environ | dict.fromkeys(_THREAD_VARIABLES, str(threads))
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_TIMEOUT, check=True)
    except subprocess.CalledProcessError as error:
        last = (error.stderr or "").strip().splitlines()[-1:] or [f"exit code {error.returncode}"]
        raise PreparationError(f"measuring with {threads} threads failed: {last[0]}") from error
    except subprocess.TimeoutExpired as error:
        raise PreparationError(f"measuring with {threads} threads took over {_TIMEOUT:.0f} s") from error
    return HostSpeed(**json.loads(done.stdout))


def usable_threads() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0))


def processor_name() -> str:
    """What the processor calls itself; empty if the system does not say."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def memory_bytes() -> int:
    """Size of the machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _best(work: Callable[[], object], seconds: float) -> float:
    """Shortest time of one run, over at least three runs and so many seconds, after one run to warm up."""
    work()
    best, spent, runs = float("inf"), 0.0, 0
    while spent < seconds or runs < 3:
        start = time.perf_counter()
        work()
        took = time.perf_counter() - start
        best, spent, runs = min(best, took), spent + took, runs + 1
    return best


def _here(threads: int, seconds: float, size: int) -> HostSpeed:
    import numpy as np

    square = np.full((_SIDE, _SIDE), 0.5, dtype=np.float32)
    product = np.empty_like(square)
    fp32 = 2.0 * _SIDE**3 / _best(lambda: np.matmul(square, square, out=product), seconds)

    source = np.ones(size // 4, dtype=np.float32)
    target = np.zeros_like(source)
    bounds = [source.size * i // threads for i in range(threads + 1)]

    def move(piece: tuple[int, int]) -> None:
        np.copyto(target[piece[0] : piece[1]], source[piece[0] : piece[1]])

    with ThreadPoolExecutor(threads) as pool:
        spans = list(pairwise(bounds))
        copy = 2.0 * size / _best(lambda: list(pool.map(move, spans)), seconds)

    matrix, vector = source.reshape(-1, 4096), np.ones(4096, dtype=np.float32)
    read = float(size) / _best(lambda: matrix @ vector, seconds)
    return HostSpeed(threads, fp32, _bf16(threads, seconds), copy, read, f"NumPy {np.__version__}")


def _bf16(threads: int, seconds: float) -> float | None:
    """BF16 products, which NumPy does not have."""
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    torch.set_num_threads(threads)
    square = torch.full((_SIDE, _SIDE), 0.5, dtype=torch.bfloat16)
    return 2.0 * _SIDE**3 / _best(lambda: torch.matmul(square, square), seconds)


def main(argv: Sequence[str]) -> int:
    """Measure here and print the result as JSON."""
    sys.stdout.write(json.dumps(asdict(_here(int(argv[0]), float(argv[1]), int(argv[2]) * 2**20))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
