"""The accelerators of the catalogue, finding one, and descriptions from files."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from disagg.catalog.accelerator import Accelerator, Kernel
from disagg.catalog.accelerator_file import accelerator_from
from disagg.catalog.accelerators import accelerators, find_accelerator
from disagg.catalog.figure import Origin
from disagg.catalog.figure_list import description
from disagg.catalog.precision import Dtype
from disagg.errors import ConfigError

ALL = tuple(accelerators().values())


@pytest.mark.parametrize("entry", ALL, ids=lambda entry: entry.name)
def test_figures_of_an_entry_are_possible_and_cited(entry: Accelerator) -> None:
    """Shares are at most 1, narrower formats are not slower unless noted, and each figure says where it is from."""
    assert all(0 < figure.value <= 1 for figure in entry.efficiency.values())
    figures = [*entry.peak.values(), *entry.efficiency.values(), entry.memory, entry.bandwidth]
    assert all(len(figure.source) > 10 for figure in figures)
    wide = entry.peak.get(Dtype.BF16) or entry.peak[Dtype.FP16]
    assert all(f.value >= wide.value for d, f in entry.peak.items() if d in {Dtype.FP8, Dtype.NVFP4, Dtype.MXFP4})
    # A decode step of one token reads the weights: no device of today has under 10 or over 1000 FLOPs per byte.
    assert 10 < wide.value / entry.bandwidth.value < 1000


@pytest.mark.parametrize("entry", [e for e in ALL if e.collectives], ids=lambda entry: entry.name)
def test_measured_collectives_are_no_faster_than_the_link(entry: Accelerator) -> None:
    """A large all-gather moves (N - 1) / N of its bytes into each device: that is never faster than the link."""
    assert entry.scale_up is not None
    for curve in entry.collectives["all_gather"]:
        assert list(curve.sizes) == sorted(curve.sizes)
        rate = curve.sizes[-1] * (curve.devices - 1) / curve.devices / curve.seconds[-1]
        assert rate <= entry.scale_up.bandwidth.value
        assert all(later > 0.5 * earlier for earlier, later in pairwise(curve.seconds))


@pytest.mark.parametrize("entry", ALL, ids=lambda entry: entry.name)
def test_a_description_is_read_back(entry: Accelerator) -> None:
    """`--json` of any device is a file that gives the same device, to edit."""
    assert accelerator_from(description(entry), name="other", where="file") == entry


def test_known_figures() -> None:
    """What the sources print: 80 GiB and 3350 GB/s of H100 SXM; a quarter of an AI 100 Ultra has 32 GB."""
    h100 = find_accelerator("h100-sxm")
    assert (h100.memory.value, h100.bandwidth.value, h100.peak[Dtype.FP8].value) == (80 * 2**30, 3.35e12, 1978e12)
    assert h100.efficiency[Kernel.GEMM, Dtype.BF16].value == pytest.approx(0.75, abs=0.005)
    # 8 devices, 512 MiB in half precision: 2 * 7 / 8 * 2^29 bytes at 445 GB/s.
    ring = next(c for c in h100.collectives["all_reduce"] if c.devices == 8)
    assert 2 * 7 / 8 * ring.sizes[-1] / ring.seconds[-1] == pytest.approx(445e9, rel=0.01)
    ultra = find_accelerator("qualcomm-ai100-ultra")
    assert (ultra.memory.value, ultra.peak[Dtype.INT8].value, ultra.bandwidth.value) == (32e9, 217.5e12, 137e9)


def test_what_was_not_measured_on_a_device_is_a_named_default() -> None:
    """Shares that are taken over from other devices have the origin default and say so."""
    for figure in find_accelerator("mi300x").efficiency.values():
        assert figure.origin is Origin.DEFAULT
        assert "not measured on this device" in figure.source


@pytest.mark.parametrize(
    ("asked", "name"),
    [("H100", "h100-sxm"), ("gfx942", "mi300x"), ("GB200", "gb200"), ("A100-SXM4-80GB", "a100-sxm-80gb")],
)
def test_aliases_find_an_entry(asked: str, name: str) -> None:
    """Names of architectures and boards find the device, in any case."""
    assert find_accelerator(asked).name == name


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    """A slip of the keyboard is answered with what was probably meant, and with how to describe a device."""
    with pytest.raises(ConfigError, match=r"h100-sxm.*YAML"):
        find_accelerator("h100-smx")


GOOD = """
vendor: Example
sources: {sheet: "Example data sheet"}
peak: {bf16: {value: 400TFLOP/s, source: sheet}, fp8: 800TFLOP/s}
memory: {value: 64GB, source: sheet, origin: measured}
bandwidth: 2TB/s
scale_up: {bandwidth: 100GB/s, latency: 5us, efficiency: 0.8, devices: 8}
efficiency: {gemm: {bf16: 70%}}
collectives: {all_reduce: [{devices: 2, sizes: [1024, 2048], seconds: [5us, 6us], source: sheet}]}
"""


def test_a_file_describes_a_device(tmp_path: Path) -> None:
    """A device that is not in the catalogue is described in YAML; bare values are the user's own."""
    file = tmp_path / "mine.yaml"
    file.write_text(GOOD, encoding="utf-8")
    entry = find_accelerator(str(file))
    assert (entry.name, entry.vendor) == ("mine", "Example")
    assert (entry.peak[Dtype.BF16].origin, entry.peak[Dtype.BF16].source) == (Origin.CATALOGUE, "Example data sheet")
    assert entry.peak[Dtype.FP8].origin is Origin.USER
    assert (entry.memory.value, entry.memory.origin) == (64e9, Origin.MEASURED)
    assert entry.scale_up is not None
    assert (entry.scale_up.devices, entry.scale_out, entry.host_link) == (8, None, None)
    assert entry.efficiency[Kernel.GEMM, Dtype.BF16].value == pytest.approx(0.7)
    assert entry.collectives["all_reduce"][0].seconds == pytest.approx((5e-6, 6e-6))


def test_all_that_is_wrong_in_a_file_is_told_at_once(tmp_path: Path) -> None:
    """Missing, unknown and absurd fields are named together, each by its path."""
    file = tmp_path / "bad.yaml"
    file.write_text(
        "peak: {bf17: 1TFLOP/s}\nbandwidth: fast\nmemry: 3GB\nscale_up: {bandwidth: 1GB/s, devices: 1}\n"
        "efficiency: {gem: {bf16: 0.5}, gemm: {bf16: 1.5}}\ncollectives: {gossip: []}\n",
        encoding="utf-8",
    )
    with pytest.raises(ConfigError) as caught:
        find_accelerator(str(file))
    places = {problem.where.removeprefix(f"{file}: ") for problem in caught.value.problems}
    assert places == {
        "peak", "peak.bf17", "bandwidth", "memory", "memry", "scale_up.devices", "scale_up.latency",
        "scale_up.efficiency", "efficiency.gem", "efficiency.gemm.bf16", "collectives.gossip",
    }  # fmt: skip


@pytest.mark.parametrize("text", ["- a list", "a: b: c", "\x00"])
def test_a_file_that_is_no_description_is_refused(tmp_path: Path, text: str) -> None:
    """What is not YAML, or not an object, is refused with the file's name."""
    file = tmp_path / "bad.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"bad\.yaml"):
        find_accelerator(str(file))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    """A path that does not exist is a problem of that path, not an unknown name."""
    with pytest.raises(ConfigError, match="cannot be read"):
        find_accelerator(str(tmp_path / "absent.yaml"))
