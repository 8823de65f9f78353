"""`disagg emulate --config`: a whole topology in one process."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import yaml

from disagg.cli.emulate_topology import lay_out, write_route_file
from disagg.cli.main import main
from disagg.engines.emulated.settings import Role
from disagg.errors import ConfigError
from disagg.topology.fleet_file import load_fleet
from disagg.topology.spec import Stage
from disagg.topology.yaml_source import read_yaml_file

TOPOLOGY = """\
model: toy
platform: cuda
port: 18123
prefill: {replicas: 32}
decode: {replicas: 32}
link: {dialect: %s}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "topology.yaml"
    path.write_text(TOPOLOGY % "mooncake")
    return path


def test_every_instance_of_a_topology_runs_here(config: Path, tmp_path: Path) -> None:
    """64 engines of either role start on their ports, whatever platform is named, and the route file has them all."""
    layout = lay_out(str(config), ["--decode-step", "0.01", "--num-blocks", "1000"])
    assert layout.names()[:2] == ["prefill-0", "prefill-1"]
    assert [engine.settings.role for engine in layout.engines] == [Role.PRODUCER] * 32 + [Role.CONSUMER] * 32
    assert all(engine.settings.num_blocks == 1000 for engine in layout.engines)
    assert len({engine.settings.engine_id for engine in layout.engines}) == 64

    async def start_and_describe() -> None:
        instances = [engine.instance(lambda: None) for engine in layout.engines]
        try:
            for instance in instances:
                await instance.start()
            write_route_file(str(tmp_path / "route.yaml"), layout, instances)
        finally:
            for instance in instances:
                await instance.stop()

    asyncio.run(start_and_describe())
    assert len(load_fleet(read_yaml_file(str(tmp_path / "route.yaml")), [], []).file.endpoints(Stage.DECODE)) == 32
    told = yaml.safe_load((tmp_path / "route.yaml").read_text())
    assert (told["model"], told["engine"], told["dialect"], told["port"]) == ("toy", "emulated", "mooncake", 18123)
    planned = [f"http://127.0.0.1:{engine.where.port}" for engine in layout.engines]
    assert [entry["url"] for entry in told["prefill"] + told["decode"]] == planned
    assert len({entry["bootstrap_port"] for entry in told["prefill"]}) == 32


def test_what_the_topology_sets_is_not_a_flag(config: Path) -> None:
    """Ports and roles come from the file."""
    with pytest.raises(ConfigError, match=r"--role: the topology sets it"):
        lay_out(str(config), ["--role", "both"])


def test_a_route_file_needs_a_topology(capsys: pytest.CaptureFixture[str]) -> None:
    """Without one there is nothing to describe."""
    assert main(["emulate", "--route-file", "x.yaml"]) == 2
    assert "--route-file" in capsys.readouterr().err


def test_a_file_that_is_wrong_is_told(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With its line, before anything starts."""
    config.write_text("model: toy\nprefil: {replicas: 1}\n")
    assert main(["emulate", "--config", str(config)]) == 2
    assert "prefil" in capsys.readouterr().err
