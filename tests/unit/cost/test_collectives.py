"""Collectives by hand: what crosses which link, in how many hops, and what measured times do."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.catalog.accelerator import CollectiveCurve, Fabric
from disagg.catalog.figure import Origin
from disagg.catalog.precision import Dtype
from disagg.cost.collectives import (
    ALL_REDUCE_ALGORITHMS,
    ALL_TO_ALL_ALGORITHMS,
    Collective,
    Exchange,
    Network,
    network,
    network_notes,
    seconds,
)
from disagg.cost.curves import measured_seconds
from disagg.cost.load import load
from disagg.cost.plan import Precision, Replica, Shape
from disagg.cost.step import step_exchanges
from disagg.cost.work import decode_work
from disagg.errors import ConfigError
from tests.support.cost_examples import DEEPSEEK_V3, LLAMA_8B, device, figure

# 100 GB/s and 1 us inside a node of 8, 10 GB/s and 10 us between nodes, both reached in full.
INNER = Fabric(figure(100e9), figure(1e-6), 8, figure(1.0))
OUTER = Fabric(figure(10e9), figure(10e-6), None, figure(1.0))
NODE = Network(INNER, OUTER, 8)
MB = 1e6


def a(value: float) -> np.ndarray:
    """A scalar array."""
    return np.asarray(value, dtype=np.float64)


def one(kind: Collective, ranks: int, size: float, net: Network = NODE, **how: str) -> float:
    """Microseconds of one call."""
    return float(seconds(Exchange(kind, ranks, 1.0, a(size)), net, **how)) * 1e6


def test_all_reduce_by_each_algorithm() -> None:
    """8 MB over 8 ranks: ring 2 (7/8 x 80 us + 3 hops), one-shot 7 x 80 us + 1 hop, two-shot 2 (7/8 x 80 us + 1 hop).
    The fastest is taken."""
    size = 8 * MB
    assert one(Collective.ALL_REDUCE, 8, size, allreduce="ring") == pytest.approx(2 * (70 + 3))
    assert one(Collective.ALL_REDUCE, 8, size, allreduce="one_shot") == pytest.approx(560 + 1)
    assert one(Collective.ALL_REDUCE, 8, size, allreduce="two_shot") == pytest.approx(2 * (70 + 1))
    assert one(Collective.ALL_REDUCE, 8, size) == pytest.approx(142)


def test_small_vectors_go_in_one_shot() -> None:
    """8 kB: 7 x 0.08 + 1 = 1.56 us in one shot against 2 (0.07 + 1) = 2.14 us in two."""
    assert one(Collective.ALL_REDUCE, 8, 8e3) == pytest.approx(1.56)
    assert one(Collective.ALL_REDUCE, 8, 8e3, allreduce="two_shot") == pytest.approx(2.14)


def test_all_reduce_across_nodes_sends_an_eighth_per_device() -> None:
    """16 ranks on two nodes, 8 MB: inside 2 (7/8 x 80 + 3); between, an eighth of it: 2 (1/2 x 100 + 10)."""
    expected = 2 * (70 + 3) + 2 * (50 + 10)
    assert one(Collective.ALL_REDUCE, 16, 8 * MB, allreduce="hierarchical") == pytest.approx(expected)
    assert one(Collective.ALL_REDUCE, 16, 8 * MB) == pytest.approx(expected)
    assert one(Collective.ALL_REDUCE, 16, 8 * MB, allreduce="ring") == pytest.approx(2 * (750 + 3 + 10))


def test_inside_a_node_the_hierarchical_one_is_the_ring() -> None:
    """There is no second level to use."""
    ring = one(Collective.ALL_REDUCE, 4, MB, allreduce="ring")
    assert one(Collective.ALL_REDUCE, 4, MB, allreduce="hierarchical") == ring


def test_gather_and_scatter_send_all_but_a_share() -> None:
    """8 MB over 4 ranks: 3/4 x 80 us + 2 hops."""
    for kind in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER):
        assert one(kind, 4, 8 * MB) == pytest.approx(60 + 2)


def test_all_to_all_keeps_its_own_share() -> None:
    """8 MB per rank over 8: 7/8 x 80 us, one hop if all peers are served at once, three if one after another."""
    assert one(Collective.ALL_TO_ALL, 8, 8 * MB) == pytest.approx(71)
    assert one(Collective.ALL_TO_ALL, 8, 8 * MB, alltoall="direct") == pytest.approx(73)


def test_all_to_all_across_nodes_waits_for_the_slow_link() -> None:
    """16 ranks, 8 MB: half leaves the node at 10 GB/s (400 us), 7/16 stays (35 us); both at the same time."""
    assert one(Collective.ALL_TO_ALL, 16, 8 * MB) == pytest.approx(400 + 10)
    assert one(Collective.ALL_TO_ALL, 16, 8 * MB, alltoall="direct") == pytest.approx(400 + 40)
    assert one(Collective.ALL_TO_ALL, 16, 8 * MB, alltoall="hierarchical") == pytest.approx(400 + 10 + 70 + 1)


def test_a_send_takes_the_link_between_the_stages() -> None:
    """1 MB: 10 + 1 us inside a node, 100 + 10 us if the replica spans nodes."""
    assert one(Collective.SEND, 8, MB) == pytest.approx(11)
    assert one(Collective.SEND, 16, MB) == pytest.approx(110)


def test_nobody_to_talk_to_and_nothing_to_say_take_no_time() -> None:
    """One rank, or no bytes: no latency either."""
    assert one(Collective.ALL_REDUCE, 1, MB) == 0
    assert one(Collective.ALL_TO_ALL, 8, 0) == 0


def test_calls_follow_each_other() -> None:
    """Ten calls take ten times as long."""
    ten = float(seconds(Exchange(Collective.ALL_GATHER, 4, 10.0, a(8 * MB)), NODE)) * 1e6
    assert ten == pytest.approx(620)


@given(
    st.sampled_from(list(Collective)),
    st.sampled_from([2, 4, 8, 16, 32]),
    st.floats(1, 1e9),
    st.floats(1, 1e8),
    st.sampled_from(ALL_REDUCE_ALGORITHMS),
    st.sampled_from(ALL_TO_ALL_ALGORITHMS),
)
def test_more_bytes_take_longer(
    kind: Collective, ranks: int, size: float, more: float, allreduce: str, alltoall: str
) -> None:
    """For every algorithm and size of the group, and auto is never slower than any of them."""
    how = {"allreduce": allreduce, "alltoall": alltoall}
    assert one(kind, ranks, size + more, NODE, **how) >= one(kind, ranks, size, NODE, **how) * (1 - 1e-12)
    assert one(kind, ranks, size) <= one(kind, ranks, size, NODE, **how) * (1 + 1e-12)


def curve(devices: int, *times: float) -> CollectiveCurve:
    """Measured at 1 kB, 1 MB and 100 MB; microseconds."""
    return CollectiveCurve(devices, (1e3, 1e6, 1e8), tuple(t * 1e-6 for t in times), Origin.MEASURED, "bench")


def test_measured_times_hold_where_they_were_measured() -> None:
    """Exact at a measured size, the geometric mean half way, the least time below, the last bandwidth above."""
    curves = (curve(4, 5, 20, 1000),)
    for size, micros in ((1e6, 20), (1e7, np.sqrt(20 * 1000)), (10, 5), (1e9, 10_000)):
        found = measured_seconds(curves, 4, a(size))
        assert found is not None
        assert float(found) * 1e6 == pytest.approx(float(micros))


def test_groups_between_measured_ones_are_interpolated() -> None:
    """Between 2 and 8 ranks 4 are half way; 16 were not measured."""
    curves = (curve(2, 4, 10, 800), curve(8, 8, 30, 1200))
    found = measured_seconds(curves, 4, a(1e6))
    assert found is not None
    assert float(found) * 1e6 == pytest.approx(20)
    assert measured_seconds(curves, 16, a(1e6)) is None


def test_noise_does_not_make_more_bytes_cheaper() -> None:
    """A larger size that was measured faster takes as long as the smaller one."""
    found = measured_seconds((curve(2, 9, 5, 800),), 2, a(1e6))
    assert found is not None
    assert float(found) * 1e6 == pytest.approx(9)


def test_the_faster_of_library_and_own_kernel_counts() -> None:
    """Engines use their own all-reduce where it is faster; a named algorithm is computed, not measured."""
    measured = {"all_reduce": (curve(8, 15, 40, 400),), "custom_all_reduce": (curve(8, 5, 20, 900),)}
    net = dataclasses.replace(NODE, curves=measured)
    assert one(Collective.ALL_REDUCE, 8, 1e6, net) == pytest.approx(20)
    assert one(Collective.ALL_REDUCE, 8, 1e8, net) == pytest.approx(400)
    assert one(Collective.ALL_REDUCE, 8, 8 * MB, net, allreduce="ring") == pytest.approx(146)


def test_measured_times_are_of_one_node() -> None:
    """A group that spans nodes is computed from the links."""
    net = dataclasses.replace(NODE, curves={"all_gather": (curve(8, 5, 20, 400), curve(16, 5, 20, 400))})
    assert one(Collective.ALL_GATHER, 8, 1e6, net) == pytest.approx(20)
    assert one(Collective.ALL_GATHER, 16, 1e6, net) == pytest.approx(15 / 16 * 100 + 3 + 10)


def test_a_device_without_links_cannot_be_joined() -> None:
    """What is missing is named: any link, or the one between nodes."""
    lonely = dataclasses.replace(device(), scale_up=None, scale_out=None)
    assert network(lonely, 1) is None
    with pytest.raises(ConfigError, match="no link between devices; 4 devices need one"):
        network(lonely, 4)
    node_only = dataclasses.replace(device(), scale_out=None)
    assert network(node_only, 8) is not None
    with pytest.raises(ConfigError, match="no figure for links between nodes; 16 are needed"):
        network(node_only, 16)
    net_only = network(dataclasses.replace(device(), scale_up=None), 16)
    assert net_only is not None
    assert net_only.inner.bandwidth.value == 50e9


def test_notes_name_the_figures_of_links() -> None:
    """Bandwidth, share and latency of both levels, and who measured."""
    net = dataclasses.replace(NODE, curves={"all_gather": (curve(8, 5, 20, 400),)})
    notes = network_notes(net)
    assert len(notes) == 7
    assert "collectives inside a node: measured: bench" in notes


def exchanges(replica: Replica, sequences: float) -> dict[tuple[str, int], float]:
    """Bytes x calls by kind and group of a decode step."""
    found: dict[tuple[str, int], float] = {}
    for exchange in step_exchanges(replica, load(decode_work(a(sequences), a(100)), replica.shape)):
        key = (exchange.kind.value, exchange.ranks)
        found[key] = found.get(key, 0.0) + float(exchange.size) * exchange.calls
    return found


def test_tensor_parallelism_sums_twice_per_layer() -> None:
    """Llama-3.1-8B, 5 sequences: 2 x 32 + 1 (embedding) vectors of 4096 x 2 B each; logits are gathered."""
    found = exchanges(Replica(LLAMA_8B, device(), Shape(4)), 5)
    assert found == {("all_reduce", 4): 65 * 5 * 8192, ("all_gather", 4): 5 * 128256 * 2}


def test_stages_send_their_part_of_the_stream() -> None:
    """Two stages of two ranks, 6 sequences in two micro-batches: each rank sends half of 3 vectors once."""
    found = exchanges(Replica(LLAMA_8B, device(), Shape(2, 2)), 6)
    assert found["point_to_point", 4] == 3 * 4096 * 2 / 2


def test_stages_with_attention_groups_send_all_tokens() -> None:
    """Two stages of four groups, 16 sequences: each rank sends a quarter of the 8 vectors of a micro-batch."""
    found = exchanges(Replica(LLAMA_8B, device(), Shape(4, 2, attention_data=4)), 16)
    assert found["point_to_point", 8] == 8 * 4096 * 2 / 4


def test_groups_that_share_caches_exchange_their_own_queries() -> None:
    """Two groups of four ranks, two of which share a cache: each group gathers queries of 16 heads for 3 tokens."""
    found = exchanges(Replica(LLAMA_8B, device(), Shape(8, attention_data=2, context=2)), 6)
    assert found["all_gather", 2] == 32 * 3 * 16 * 128 * 2


def test_experts_receive_each_token_once_per_rank() -> None:
    """DeepSeek-V3 on 8 attention groups and expert ranks, 16 sequences: 2 tokens per rank go to 8 (1 - (7/8)^8) ranks
    in 1 B per element and come back in 2, in 58 layers; 3 dense layers gather and scatter all 16."""
    shape = Shape(8, attention_data=8, expert=8)
    precision = Precision(Dtype.FP8, Dtype.FP8, Dtype.FP8)
    found = exchanges(Replica(DEEPSEEK_V3, device(), shape, precision), 16)
    copies = 8 * (1 - (7 / 8) ** 8)
    assert found["all_to_all", 8] == pytest.approx(58 * 2 * copies * 7168 * 3)
    assert found["reduce_scatter", 8] == 3 * 16 * 7168 * 2
    assert found["all_gather", 8] == 3 * 16 * 7168 * 2 + 16 * 129280 * 2
    assert found["all_reduce", 8] == 16 * 7168 * 2


def test_experts_of_ranks_that_hold_the_same_tokens_are_summed() -> None:
    """Without attention groups every rank has every token: expert parallelism needs the second sum only."""
    found = exchanges(Replica(DEEPSEEK_V3, device(), Shape(8, expert=8)), 4)
    assert found["all_reduce", 8] == (2 * 61 + 1) * 4 * 7168 * 2
    assert ("all_to_all", 8) not in found


def test_sharing_a_cache_gathers_queries_and_scatters_results() -> None:
    """DeepSeek-V3, 4 ranks share a cache of 8: queries of 64 heads x 576 go round in each of 61 layers."""
    found = exchanges(Replica(DEEPSEEK_V3, device(), Shape(8, context=4)), 2)
    assert found["all_gather", 4] == found["reduce_scatter", 4] == 61 * 2 * 64 * 576 * 2
