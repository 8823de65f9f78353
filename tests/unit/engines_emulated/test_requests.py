"""Request bodies: what is refused with which words, and what becomes of what is accepted."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.engines.emulated.fields import MalformedBodyError, read_object
from disagg.engines.emulated.model import EOS, Tokenizer
from disagg.engines.emulated.requests import Generation, read_generation
from disagg.errors import BadRequestError, ClientError, UnknownModelError
from tests.unit.engines_emulated.running import SETTINGS

TOKENIZER = Tokenizer()
JSON = b"application/json"
ASK = {"messages": [{"role": "user", "content": "hello"}]}


def chat(**fields: Any) -> Generation:
    return read_generation({**ASK, **fields}, "chat", SETTINGS, TOKENIZER)


def completion(**fields: Any) -> Generation:
    return read_generation({"prompt": "hello", **fields}, "completion", SETTINGS, TOKENIZER)


REFUSED: list[tuple[dict[str, Any], str, str | None]] = [
    (
        {"prompt": "a b " * 1100},
        "maximum context length is 2048 tokens. However, your prompt contains at least 2049",
        "input_tokens",
    ),
    ({"prompt": [1] * 2050}, "your prompt contains 2050 input tokens", "input_tokens"),
    ({"prompt": [1] * 2048}, "max_tokens must be at least 1, got 0.", "max_tokens"),
    ({"prompt": ""}, "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)", "prompt"),
    ({"prompt": None}, "Either prompt or prompt_embeds", "prompt"),
    ({"prompt": [[]]}, "cannot be empty", None),
    ({"prompt": [10**9]}, "out of vocabulary", None),
    ({"max_tokens": 3, "min_tokens": 4}, "min_tokens must be less than or equal to max_tokens=3, got 4.", None),
    ({"max_tokens": 0}, "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)", "max_tokens"),
    ({"max_tokens": 5000}, "max_tokens=5000 cannot be greater than max_model_len=2048.", "max_tokens"),
    ({"min_tokens": -1}, "min_tokens must be greater than or equal to 0, got -1.", None),
    ({"n": 0}, "n must be at least 1, got 0.", None),
    ({"n": 2, "temperature": 0}, "n must be 1 when using greedy sampling, got 2.", None),
    ({"temperature": -1}, "temperature must be non-negative, got -1.0.", "temperature"),
    ({"temperature": 2.5}, "temperature must be in [0, 2], got 2.5.", "temperature"),
    ({"top_p": 0}, "top_p must be in (0, 1], got 0.0.", "top_p"),
    ({"stop": ["a", ""]}, "stop cannot contain an empty string.", None),
    (
        {"stream_options": {"include_usage": True}},
        "Stream options can only be defined when `stream=True`.",
        "stream_options",
    ),
    ({"logprobs": "many"}, "`logprobs` must be an integer.", "logprobs"),
    ({"logprobs": 21}, "Requested sample logprobs of 21, which is greater than max allowed: 20", "logprobs"),
    (
        {"prompt_logprobs": 1, "stream": True},
        "`prompt_logprobs` are not available when `stream=True`.",
        "prompt_logprobs",
    ),
    ({"use_beam_search": True}, "does not support use_beam_search", "use_beam_search"),
    ({"response_format": {"type": "json_schema"}}, "field must be provided", "response_format"),
    ({"suffix": "y"}, "suffix is only supported for models with FIM completion rendering", "suffix"),
    ({"prompt": "a" * 170_000}, "contains 170000 characters (more than 165888 characters", "input_text"),
    ({"prompt": []}, "You must pass at least one prompt", None),
    ({"cache_salt": ""}, "Parameter 'cache_salt' must be a non-empty string if provided.", "cache_salt"),
    ({"top_k": -2}, "top_k must be 0 (disable), or at least 1, got -2.", None),
    ({"frequency_penalty": 3}, "frequency_penalty must be in [-2, 2], got 3.0.", None),
    ({"repetition_penalty": 0}, "repetition_penalty must be greater than zero, got 0.0.", None),
    ({"min_p": 2}, "min_p must be in [0, 1], got 2.0.", None),
    ({"allowed_token_ids": []}, "allowed_token_ids is not None and empty!", "allowed_token_ids"),
    ({"allowed_token_ids": [10**7]}, "allowed_token_ids contains out-of-vocab token id!", "allowed_token_ids"),
    ({"logit_bias": {"x": 1}}, "cannot be converted to integer token IDs: ['x']", "logit_bias"),
    ({"logit_bias": {"9999999": 1}}, "token_id(s) [9999999] in logit_bias contain out-of-vocab", "logit_bias"),
]


@pytest.mark.parametrize(("fields", "words", "param"), REFUSED)
def test_what_the_real_engine_refuses_is_refused_in_its_words(
    fields: dict[str, Any], words: str, param: str | None
) -> None:
    """Message, error type and parameter are what a client of vLLM sees."""
    with pytest.raises(BadRequestError) as caught:
        completion(**fields)
    assert words in str(caught.value)
    assert (caught.value.kind, caught.value.param, caught.value.status) == ("BadRequestError", param, 400)


REFUSED_CHAT: list[tuple[dict[str, Any], str]] = [
    ({"top_logprobs": 2}, "when using `top_logprobs`, `logprobs` must be set to true."),
    ({"tools": []}, "`tools` must not be an empty array."),
    ({"tool_choice": "auto"}, "When using `tool_choice`, `tools` must be set."),
    (
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        '"auto" tool choice requires',
    ),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "toy is not a multimodal model"),
    ({"kv_transfer_params": {"prompt_token_ids": [-1]}}, "must be a non-empty list of non-negative integers"),
    ({"messages": []}, "Cannot apply chat template to an empty conversation."),
    ({"continue_final_message": True}, "continue_final_message and add_generation_prompt are not compatible."),
]


@pytest.mark.parametrize(("fields", "words"), REFUSED_CHAT)
def test_what_chat_refuses(fields: dict[str, Any], words: str) -> None:
    """The chat API's own checks."""
    with pytest.raises(BadRequestError) as caught:
        chat(**fields)
    assert words in str(caught.value)


MALFORMED: list[tuple[bytes, bytes | None, str, str | None]] = [
    (b"{", JSON, "'type': 'json_invalid'", "body.1"),
    (b"", JSON, "'type': 'missing'", "body"),
    (b"null", JSON, "'type': 'missing'", "body"),
    (b'{"messages": [], "stop": ["a","b","c","d","e"]}', JSON, "'type': 'too_long'", "body.stop"),
    (b'{"messages": [], "stop": 5}', JSON, "'input': '5'", "body.stop"),
    (b'{"messages": [], "min_tokens": null}', JSON, "'type': 'int_type'", "body.min_tokens"),
    (b'{"messages": [], "seed": 99999999999999999999}', JSON, "'type': 'less_than_equal'", "body.seed"),
    (b'{"messages": "\xff"}', JSON, "There was an error parsing the body", None),
    (b'{"max_tokens": ' + b"9" * 5000 + b"}", JSON, "There was an error parsing the body", None),
    (b"[]", JSON, "'type': 'model_attributes_type'", "body"),
    (b"{}", b"text/plain", "Unsupported Media Type: Only 'application/json' is allowed", None),
    (b"{}", None, "Unsupported Media Type", None),
    (b'{"messages": "hi"}', JSON, "'loc': 'body.messages'", "body.messages"),
    (b'{"messages": [{}]}', JSON, "'loc': 'body.messages.0.role'", "body.messages.0.role"),
    (b"{}", JSON, "'loc': 'body.messages', 'msg': 'Field required'", "body.messages"),
    (b'{"messages": [], "max_tokens": "x"}', JSON, "'type': 'int_parsing'", "body.max_tokens"),
    (b'{"messages": [], "max_tokens": 1.5}', JSON, "'type': 'int_from_float'", "body.max_tokens"),
    (b'{"messages": [], "stream": "maybe"}', JSON, "'type': 'bool_parsing'", "body.stream"),
    (b'{"messages": [], "stream": []}', JSON, "'type': 'bool_type'", "body.stream"),
    (b'{"messages": [], "kv_transfer_params": "x"}', JSON, "'type': 'dict_type'", "body.kv_transfer_params"),
    (b'{"messages": [], "model": 7}', JSON, "'type': 'string_type'", "body.model"),
]


@pytest.mark.parametrize(("body", "content_type", "words", "param"), MALFORMED)
def test_a_body_that_does_not_fit_the_schema(
    body: bytes, content_type: bytes | None, words: str, param: str | None
) -> None:
    """Schema errors have the status phrase as type, one line per problem, and the place as parameter."""
    with pytest.raises(MalformedBodyError) as caught:
        read_generation(read_object(body, content_type), "chat", SETTINGS, TOKENIZER)
    assert words in str(caught.value)
    assert (caught.value.kind, caught.value.param) == ("Bad Request", param)


def test_all_schema_problems_are_told_at_once() -> None:
    """Several wrong fields give one answer."""
    with pytest.raises(MalformedBodyError, match="3 validation errors:"):
        read_generation({"max_tokens": "x", "n": []}, "chat", SETTINGS, TOKENIZER)


def test_an_unknown_model_is_404_and_comes_before_other_checks() -> None:
    """As on the real engine: the model is looked at once the schema fits, before prompt and sampling."""
    with pytest.raises(UnknownModelError) as caught:
        completion(model="other", prompt=[1] * 9999, n=0)
    assert str(caught.value) == "The model `other` does not exist. Valid aliases: toy."
    assert (caught.value.status, caught.value.kind, caught.value.param) == (404, "NotFoundError", "model")
    assert completion(model="toy").prompts == completion(model=None).prompts


@given(
    st.dictionaries(
        st.sampled_from(sorted({k for f, *_ in REFUSED for k in f} | {"echo", "seed", "ignore_eos"})),
        st.recursive(
            st.none() | st.booleans() | st.integers(-3, 30) | st.floats(allow_nan=False) | st.text(max_size=4),
            lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
            max_leaves=4,
        ),
    )
)
def test_no_body_breaks_the_parser(fields: dict[str, Any]) -> None:
    """Whatever the types, a request is taken or refused as the client's fault."""
    with contextlib.suppress(ClientError):
        assert completion(**fields).samplings


@given(st.binary(max_size=40))
def test_no_bytes_break_the_parser(body: bytes) -> None:
    """Any bytes are an object or a 400."""
    with contextlib.suppress(MalformedBodyError):
        assert isinstance(read_object(body, JSON), dict)


def test_the_chat_prompt_shows_all_that_a_template_can_show() -> None:
    """Two legs with a different tools order, name or part would render different prompts, and that must be seen."""
    tools = [{"type": "function", "function": {"name": name}} for name in ("a", "b")]
    bodies: list[dict[str, Any]] = [
        {},
        {"tools": tools, "tool_choice": "none"},
        {"add_generation_prompt": False},
        {"messages": [{"role": "system", "content": "hello"}]},
        {"messages": [{"role": "user", "content": "hello", "name": "x"}]},
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "hello"}, {"type": "text", "text": "x"}]}
            ]
        },
    ]
    prompts = [tuple(chat(**body).prompts[0]) for body in bodies]
    assert len(set(prompts)) == len(prompts) - 1, "tool_choice none hides the tools, everything else shows"
    same = chat(messages=[{"role": "user", "content": [{"type": "text", "text": "hello"}]}])
    assert same.prompts == chat().prompts


def test_token_ids_in_the_handoff_parameters_replace_the_template() -> None:
    """D can be given P's token ids."""
    assert chat(kv_transfer_params={"prompt_token_ids": [5, 6]}).prompts == [[5, 6]]


def test_limits_follow_the_api() -> None:
    """Chat answers up to the context limit and prefers max_completion_tokens; completions default to 16."""
    assert chat().samplings[0].max_tokens == 2048 - len(chat().prompts[0])
    assert chat(max_tokens=9, max_completion_tokens=1).samplings[0].max_tokens == 1
    assert completion().samplings[0].max_tokens == 16
    assert completion(prompt=[1] * 2040, max_tokens=100).samplings[0].max_tokens == 8
    assert completion(max_tokens="7").samplings[0].max_tokens == 7


def test_sampling_is_greedy_seeded_or_by_choice() -> None:
    """The same request gives the same answer; another seed or choice gives another."""
    assert chat(temperature=0, seed=5).samplings[0].salt == 0
    assert chat().samplings[0].salt == 0
    assert chat(seed=1).samplings[0].salt == chat(seed=1).samplings[0].salt != chat(seed=2).samplings[0].salt
    assert len({s.salt for s in chat(n=4).samplings}) == 4


def test_logit_bias_decides_at_its_ends_only() -> None:
    """+100 forces, -100 bans, the rest has no effect on a toy."""
    sampling = completion(logit_bias={str(EOS): 100, "70": -100, "71": 5}).samplings[0]
    assert (sampling.forced, sampling.banned) == ((EOS,), frozenset({70}))


def test_prompt_lists_and_echo() -> None:
    """Each prompt of a list is its own; echo repeats text as sent and token ids as text."""
    generation = completion(prompt=["hello", "you"], echo=True)
    assert (len(generation.prompts), generation.echoed) == (2, ["hello", "you"])
    ids = TOKENIZER.encode("grüße")
    assert completion(prompt=[ids], echo=True).echoed == ["grüße"]
    assert completion(echo=True, max_tokens=0).only_echo
    assert json.dumps(chat(echo=True).echoed) == '[""]'
