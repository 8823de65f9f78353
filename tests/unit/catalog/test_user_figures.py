"""Figures from the user in place of the catalogue's."""

from __future__ import annotations

import pytest

from disagg.catalog.accelerator import Kernel
from disagg.catalog.accelerators import find_accelerator
from disagg.catalog.figure import Origin
from disagg.catalog.precision import Dtype
from disagg.catalog.user_figures import UserFigure, with_user_figures
from disagg.errors import ConfigError


def test_a_figure_is_replaced_with_its_flag_as_the_source() -> None:
    """Each figure that the user gives replaces the entry's, says which flag it is from, and leaves the rest alone."""
    base = find_accelerator("mi300x")
    mine = with_user_figures(
        base,
        [
            UserFigure("memory", "64GB", "--memory-gb 64"),
            UserFigure("peak.fp8", "1PFLOP/s", "--peak-tflops fp8=1000"),
            UserFigure("efficiency.gemm.fp8", 0.5, "--efficiency"),
            UserFigure("scale_up.bandwidth", "100GB/s", "--link"),
            UserFigure("scale_up.devices", "4", "--node"),
            UserFigure("scale_out.bandwidth", "400Gbit/s", "--nic"),
        ],
    )
    assert (mine.memory.value, mine.memory.origin, mine.memory.source) == (64e9, Origin.USER, "--memory-gb 64")
    assert mine.peak[Dtype.FP8].value == 1e15
    assert mine.peak[Dtype.BF16] == base.peak[Dtype.BF16]
    assert mine.efficiency[Kernel.GEMM, Dtype.FP8].value == 0.5
    assert mine.scale_up is not None
    assert mine.scale_up.devices == 4
    assert mine.scale_out is not None
    assert (mine.scale_out.bandwidth.value, mine.scale_out.latency.origin) == (50e9, Origin.DEFAULT)
    assert base.scale_out is None


def test_all_wrong_figures_are_told_at_once() -> None:
    """Unknown fields, formats and absurd values are refused together, each with its flag."""
    wrong = [
        UserFigure("memory", "64GB/s", "--a"),
        UserFigure("peak.fp7", 1e12, "--b"),
        UserFigure("colour", 1, "--c"),
        UserFigure("efficiency.gemm.bf16", 2, "--d"),
        UserFigure("efficiency.gem.bf16", 0.5, "--e"),
        UserFigure("scale_out.latency", 1e-6, "--f"),
        UserFigure("scale_up.devices", "1", "--g"),
        UserFigure("scale_up.devices", "many", "--h"),
        UserFigure("scale_up.colour", 1, "--i"),
    ]
    with pytest.raises(ConfigError) as caught:
        with_user_figures(find_accelerator("mi300x"), wrong)
    assert [problem.where for problem in caught.value.problems] == [given.source for given in wrong]
