"""What is measured of a stream on its way to a client."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

from disagg.http.messages import Header
from disagg.router.delivery import Delivery, Stream
from disagg.router.fleet import Fleet
from disagg.router.framing import OPENAI
from disagg.router.metrics import Metrics
from disagg.router.record import Path, Record


class Client:
    """Takes everything, and reads slowly when it is told to."""

    def __init__(self) -> None:
        self.started = False
        self.finished = False
        self.received = b""
        self.flow: Callable[[bool], None]

    def send(self, status: int, body: bytes, headers: Iterable[Header] = ()) -> None:
        self.received += body

    def start(
        self, status: int, headers: Iterable[Header] = (), *, length: int | None = None, first: bytes = b""
    ) -> None:
        self.started = True
        self.received += first

    def write(self, data: bytes) -> None:
        self.received += data

    def finish(self, last: bytes = b"") -> None:
        self.received += last

    def framed_writer(self) -> Callable[[bytes], object] | None:
        """None: what is collected is not framed."""
        return None

    def on_flow(self, callback: Callable[[bool], None] | None) -> None:
        if callback is not None:
            self.flow = callback


class Engine:
    """An answer whose pieces come at set times; between the second and the third the client does not read."""

    status = 200
    headers: tuple[Header, ...] = ()

    def __init__(self, client: Client, clock: list[float]) -> None:
        self.client = client
        self.clock = clock

    def pause(self) -> None:
        self.clock[0] += 100.0

    def resume(self) -> None: ...

    async def relay(self, sink: Callable[[bytes], None], taker: object = None) -> None:
        for n in range(4):
            if n == 2:
                self.client.flow(False)
                self.client.flow(True)
            self.clock[0] += 0.01
            sink(b'data: {"n":%d}\n\n' % n)
        self.clock[0] += 0.01
        sink(b"data: [DONE]\n\n")


class Leg:
    outcome = ""

    def __enter__(self) -> Leg:
        return self

    def __exit__(self, *_: object) -> None: ...

    def served(self, streaming_since: float | None = None) -> None: ...


async def test_the_time_in_which_a_client_does_not_read_is_not_the_engines() -> None:
    """Five writes: the gap before the one that waited for the client is left out."""
    clock = [1000.0]
    metrics = Metrics(Fleet(()), lambda: clock[0])
    record = Record(b"id", "/v1/completions", clock[0], path=Path.DISAGGREGATED)
    client = Client()
    delivery = Delivery(client, record, metrics, lambda: clock[0], OPENAI)
    stream = Stream(cast("Any", Leg()), cast("Any", Engine(client, clock)))
    assert await delivery.stream(stream) is None
    page = metrics.render().decode()
    assert 'disagg_inter_token_latency_seconds_count{path="disaggregated"} 3.0' in page
    assert 'disagg_inter_token_latency_seconds_bucket{le="0.015",path="disaggregated"} 3.0' in page
    assert record.bytes_sent == len(client.received)
