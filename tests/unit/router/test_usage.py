"""Token counts are found in answers of every API, and never taken out of generated text."""

import json

from hypothesis import given
from hypothesis import strategies as st

from disagg.router.usage import Usage, find_usage


def test_usage_of_the_completion_apis() -> None:
    """Whole answers and the last events of a stream, with details or without."""
    usage = {
        "prompt_tokens": 37,
        "total_tokens": 45,
        "completion_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 16},
    }
    whole = json.dumps({"choices": [{"text": "x"}], "usage": usage, "kv_transfer_params": None}).encode()
    assert find_usage(whole) == Usage(37, 8, 16)
    events = b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\ndata: [DONE]\n\n"
    assert find_usage(events) == Usage(37, 8, 16)


def test_usage_with_other_names() -> None:
    """Input and output, as some APIs say."""
    answer = b'{"output":[],"usage":{"input_tokens":5,"output_tokens":2,"total_tokens":7}}'
    assert find_usage(answer) == Usage(5, 2, 0)


def test_an_answer_that_tells_nothing() -> None:
    """A stream without usage, an error."""
    assert find_usage(b'data: {"choices":[{"delta":{"content":"a"}}]}\n\ndata: [DONE]\n\n') is None
    assert find_usage(b'{"usage":null}') == Usage(0, 0, 0)


@given(st.text())
def test_text_is_no_usage(text: str) -> None:
    """Quotes inside of a JSON string are escaped, whatever a model writes."""
    text = f'{text}"usage": {{"completion_tokens": 99}}'
    assert find_usage(json.dumps({"choices": [{"text": text}]}).encode()) is None
