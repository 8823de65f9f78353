"""A processor as an accelerator."""

from __future__ import annotations

import pytest

from disagg.catalog.accelerator import Kernel
from disagg.catalog.accelerator_file import accelerator_from
from disagg.catalog.figure import Origin
from disagg.catalog.figure_list import description, figures
from disagg.catalog.host import HostFigures, host_accelerator
from disagg.catalog.precision import Dtype


def test_what_was_measured_becomes_the_figures() -> None:
    """Peak and bandwidth are the measured ones; reading at 8 of 10 GB/s makes a share of 0.8 for weights."""
    measured = HostFigures(2, {Dtype.FP32: 5e10}, copy=10e9, read=8e9, how="2 threads, measured 2026-01-02")
    host = host_accelerator("host", "Some CPU", 16 * 2**30, measured)
    assert (host.peak[Dtype.FP32].value, host.bandwidth.value, host.memory.value) == (5e10, 10e9, 16 * 2**30)
    assert host.efficiency[Kernel.WEIGHTS, Dtype.FP32].value == pytest.approx(0.8)
    assert host.efficiency[Kernel.ELEMENTWISE, Dtype.FP32].value == pytest.approx(1.0)
    for named in figures(host):
        assert named.figure.origin is Origin.MEASURED
        assert "2026-01-02" in named.figure.source


def test_the_description_is_read_back() -> None:
    """What is written to the file is the same device again."""
    measured = HostFigures(1, {Dtype.FP32: 5e10, Dtype.BF16: 9e10}, copy=8e9, read=10e9, how="1 thread")
    host = host_accelerator("host", "Some CPU", 1000, measured)
    assert accelerator_from(description(host), name="other", where="file") == host
