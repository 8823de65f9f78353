"""The official `openai` client works against the endpoint, and its errors are the client's own types."""

from __future__ import annotations

import asyncio

import openai
import pytest

from tests.e2e.conftest import MODEL
from tests.e2e.corpus import MAX_MODEL_LEN
from tests.e2e.waiting import engines_are_idle
from tests.support.deployment import Deployment
from tests.support.wire import request

pytestmark = pytest.mark.parametrize("shape", ["1P1D"], indirect=True)

QUESTION: list[openai.types.chat.ChatCompletionMessageParam] = [
    {"role": "user", "content": "What is the capital of France?"}
]


def _client(shape: Deployment) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{shape.url}/v1", api_key="unused", max_retries=0, timeout=60)


def test_sync_chat_whole_and_streamed_agree(shape: Deployment) -> None:
    """The pieces of a stream are the whole answer, and the usage comes last when it is asked for."""
    with _client(shape) as client:
        whole = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=12)
        pieces = list(
            client.chat.completions.create(
                model=MODEL,
                messages=QUESTION,
                temperature=0,
                max_tokens=12,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
    text = whole.choices[0].message.content
    assert text is not None
    assert "Paris" in text
    assert "".join(p.choices[0].delta.content or "" for p in pieces if p.choices) == text
    assert pieces[-1].choices == []
    assert pieces[-1].usage is not None
    assert whole.usage is not None
    assert pieces[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens


async def test_async_client_streams_many_at_once(shape: Deployment) -> None:
    """Parallel streams do not mix: each greedy answer is the one that the question has alone."""
    async with openai.AsyncOpenAI(base_url=f"{shape.url}/v1", api_key="unused", max_retries=0, timeout=120) as client:

        async def ask(n: int) -> str:
            stream = await client.completions.create(
                model=MODEL, prompt=f"{n} plus {n} is", temperature=0, max_tokens=8, stream=True
            )
            return "".join([p.choices[0].text async for p in stream if p.choices])

        together = await asyncio.gather(*(ask(n) for n in range(8)))
        alone = [await ask(n) for n in range(8)]
    assert together == alone


def test_one_token_is_one_token(shape: Deployment) -> None:
    """`max_tokens=1` gives one token, one content packet with the finish reason, and the end."""
    with _client(shape) as client:
        whole = client.completions.create(model=MODEL, prompt="The sky is", max_tokens=1, temperature=0)
        pieces = list(
            client.completions.create(model=MODEL, prompt="The sky is", max_tokens=1, temperature=0, stream=True)
        )
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 1
    assert [p.choices[0].finish_reason for p in pieces] == ["length"]
    assert pieces[0].choices[0].text == whole.choices[0].text


def test_a_stop_string_ends_the_answer(shape: Deployment) -> None:
    """The stop string is not in the text and the reason is `stop`."""
    with _client(shape) as client:
        answer = client.completions.create(
            model=MODEL, prompt="1, 2, 3, 4, 5,", max_tokens=24, temperature=0, stop=[" 8"]
        )
    assert answer.choices[0].finish_reason == "stop"
    assert "8" not in answer.choices[0].text


def test_a_prompt_that_is_too_long_is_a_bad_request(shape: Deployment) -> None:
    """400 with the engine's own message, that names both numbers."""
    with _client(shape) as client, pytest.raises(openai.BadRequestError, match=str(MAX_MODEL_LEN)):
        client.completions.create(model=MODEL, prompt=[5] * (MAX_MODEL_LEN + 1), max_tokens=4)


def test_a_model_that_is_not_served_is_not_found(shape: Deployment) -> None:
    """404, naming the model."""
    with _client(shape) as client, pytest.raises(openai.NotFoundError, match="gpt-17"):
        client.chat.completions.create(model="gpt-17", messages=QUESTION)


def test_a_body_that_is_not_json_is_a_bad_request(shape: Deployment) -> None:
    """400 in the OpenAI error shape."""
    answer = request(shape.url, "/v1/chat/completions", b'{"model": "x", ')
    assert answer.status == 400
    assert set(answer.json()["error"]) >= {"message", "type", "code"}


@pytest.mark.parametrize(
    "body",
    [
        {"max_tokens": -1},
        {"temperature": -3},
        {"messages": []},
        {"messages": "hello"},
        {"top_p": 7},
        {"stop": {"a": 1}},
        {"logprobs": True, "top_logprobs": 1000},
    ],
)
def test_wrong_values_get_the_engines_own_answer(shape: Deployment, body: dict[str, object]) -> None:
    """A 4xx of the engine reaches the client with its status and message, as if the engine had been asked itself."""
    full = {"model": MODEL, "messages": QUESTION, "max_tokens": 4, **body}
    ours = request(shape.url, "/v1/chat/completions", full)
    theirs = request(shape.engines["prefill"][0], "/v1/chat/completions", full)
    assert ours.status == theirs.status
    assert 400 <= ours.status < 500
    assert ours.json()["error"]["message"] == theirs.json()["error"]["message"]


def test_models_lists_the_served_name(shape: Deployment) -> None:
    """Clients find the model under the name that requests use."""
    with _client(shape) as client:
        assert [m.id for m in client.models.list()] == [MODEL]


def test_internal_fields_of_a_client_are_removed(shape: Deployment) -> None:
    """A client can neither read another's cache nor bring an engine down with the handoff's own fields."""
    with _client(shape) as client:
        answer = client.completions.create(
            model=MODEL,
            prompt="The sky is",
            max_tokens=4,
            temperature=0,
            extra_body={"kv_transfer_params": {"do_remote_prefill": True}, "ec_transfer_params": {"a": 1}},
        )
        again = client.completions.create(model=MODEL, prompt="The sky is", max_tokens=4, temperature=0)
    assert answer.choices[0].text == again.choices[0].text


def test_several_choices_and_prompt_lists_are_answered(shape: Deployment) -> None:
    """Prompts of a list are handed over one by one; what cannot be is answered too, and says that it was not."""
    many = request(
        shape.url, "/v1/completions", {"model": MODEL, "prompt": ["One", "Two"], "max_tokens": 3, "temperature": 0}
    )
    assert [c["index"] for c in many.json()["choices"]] == [0, 1]
    assert many.headers["x-disagg-path"] == "disaggregated"
    choices = request(shape.url, "/v1/completions", {"model": MODEL, "prompt": "One", "n": 2, "max_tokens": 3})
    assert len(choices.json()["choices"]) == 2
    assert choices.headers["x-disagg-path"].startswith("local")


def test_a_client_that_leaves_stops_the_engines(shape: Deployment) -> None:
    """A disconnect in mid-stream reaches decode: nothing goes on running."""
    with _client(shape) as client:
        stream = client.completions.create(
            model=MODEL, prompt="Once upon a time", max_tokens=900, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        stream.close()
    engines_are_idle(shape, within_s=30)
