"""The file of `disagg route`: its forms, its mistakes, and the names of engines."""

import pytest

from disagg.errors import ConfigError
from disagg.topology.fleet_file import Endpoint, FleetFile, load_fleet, name_endpoints
from disagg.topology.spec import Stage
from disagg.topology.yaml_source import read_yaml


def load(text: str) -> FleetFile:
    return load_fleet(read_yaml(text, name="r.yaml")).file


def problems(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(text)
    return [str(p) for p in caught.value.problems]


def test_an_engine_is_a_url_or_a_mapping_and_one_stands_for_a_list() -> None:
    """The short forms mean what the long ones say; URLs are brought into one form."""
    file = load("model: m\nprefill: http://a:1/\ndecode: [http://b, {url: 'http://[::1]:9', name: d, tensor: 2}]\n")
    assert [e.url for e in file.endpoints(Stage.PREFILL)] == ["http://a:1"]
    assert [e.url for e in file.endpoints(Stage.DECODE)] == ["http://b:80", "http://[::1]:9"]
    assert file.stages() == (Stage.PREFILL, Stage.DECODE)
    assert (file.names, file.spoken) == (("m",), "nixl-pull")


def test_every_mistake_is_told_at_once_with_its_line_and_the_nearest_key() -> None:
    """Unknown keys, also inside an engine and in the router section, come with the one that was meant."""
    told = problems(
        "modle: m\nprefil: x\nprefill: [ftp://x, 7, {url: http://a:1, bootstrap_prt: 7},"
        " {url: http://a:2, bootstrap_port: x}]\nrouter: {retires: 1, max_queue: x}\nengine: vlm\n"
    )
    text = "\n".join(told)
    assert "r.yaml:1: modle: unknown key; did you mean model?" in text
    assert "r.yaml:2: prefil: unknown key; did you mean prefill?" in text
    assert "prefill.0.url: expected a URL such as http://127.0.0.1:9900, got 'ftp://x'" in text
    assert "prefill.1: expected a URL" in text
    assert "prefill.2.bootstrap_prt: unknown key of prefill.2; did you mean bootstrap_port?" in text
    assert "prefill.3.bootstrap_port: expected a whole number from 1 to 65535, got 'x'" in text
    assert "router.retires: unknown key of router; did you mean retries?" in text
    assert "engine: expected one of vllm, sglang, emulated, got 'vlm'; did you mean vllm?" in text
    assert not [t for t in told if "empty list" in t]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("decode: http://a:1\n", "model (--model): is required"),
        ("model: m\nprefill: http://a:1\n", "no engine generates tokens"),
        ("model: m\ndecode: http://a:1\ncolocated: http://b:1\n", "colocated engines stand alone"),
        ("model: m\nprefill: http://a:1\ncolocated: http://b:1\n", "colocated engines prefill themselves"),
        ("model: m\nprefill: http://a:1\ndecode: http://a:1/\n", "has the same URL as prefill.0"),
        (
            "model: m\nprefill: {url: http://a:1, name: x}\ndecode: {url: http://b:1, name: x}\n",
            "has the same name as prefill.0: x",
        ),
        ("model: m\ndecode: http://a:1\ndialect: sglang\n", "vllm engines do not speak sglang"),
        ("model: m\ndialect: mooncake\nprefill: http://a:1\ndecode: http://b:1\n", "needs its bootstrap_port"),
        ("model: m\ndialect: nixl-push\nprefill: http://a:1\ndecode: http://b:1\n", "needs its engine_id"),
        ("model: m\ndecode: http://user:pw@a:1\n", "expected a URL"),
        ("model: m\ndecode: http://a:99999\n", "is no URL"),
        ("model: m\ndecode: []\n", "is an empty list"),
        ("model: m\ndecode: http://a:1\nport: 9\nrouter: {admin_port: 9}\n", "port 9 is the endpoint's"),
    ],
)
def test_what_does_not_fit_together_is_refused(text: str, part: str) -> None:
    """Each with its place, before anything listens."""
    assert any(part in told for told in problems(text)), problems(text)


def test_a_password_in_a_wrong_url_is_not_shown() -> None:
    """What is told about a mistake ends up in logs."""
    for url in ("http://user:hush@a:1", "http://user:hush@a:99999"):
        told = "\n".join(problems(f"model: m\ndecode: {url}\n"))
        assert "user:********@a" in told
        assert "hush" not in told


def test_engines_behind_tls_are_taken() -> None:
    """An https URL is one too, with the port of its own."""
    file = load("model: m\ndecode: [https://a, https://b:8443]\n")
    assert [e.url for e in file.endpoints(Stage.DECODE)] == ["https://a:443", "https://b:8443"]


def test_an_engine_keeps_its_name_while_others_come_and_go() -> None:
    """A name stands in dashboards: it must not move to another engine when a line of the file is removed."""
    a, b, c = (Endpoint(url=f"http://{h}:1") for h in "abc")
    first = name_endpoints(Stage.DECODE, [a, b], {})
    assert first == {a.url: "decode-0", b.url: "decode-1"}
    assert name_endpoints(Stage.DECODE, [b, c], {b.url: "decode-1"}, ["decode-0"]) == {
        b.url: "decode-1",
        c.url: "decode-2",
    }


def test_names_of_their_own_are_not_given_out_twice() -> None:
    """A numbered name steps around one that an operator chose."""
    own = Endpoint(url="http://a:1", name="decode-0")
    other = Endpoint(url="http://b:1")
    assert name_endpoints(Stage.DECODE, [own, other], {})[other.url] == "decode-1"
