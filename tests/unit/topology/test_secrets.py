"""What is hidden when a configuration or a command line is shown, and what is not."""

from hypothesis import given
from hypothesis import strategies as st

from disagg.topology.secrets import HIDDEN, masked, masked_words, without_password


def test_passwords_in_urls_are_hidden_and_users_are_not() -> None:
    """Only the part between the colon and the at sign is a secret."""
    assert without_password("redis://me:pw@host:6379/0") == f"redis://me:{HIDDEN}@host:6379/0"
    assert without_password("redis://:pw@host") == f"redis://:{HIDDEN}@host"
    for plain in ("redis://host:6379", "lmcache://h:1", "file:///a@b:c", "text"):
        assert without_password(plain) == plain


def test_keys_of_the_router_and_secret_variables_are_hidden() -> None:
    """Wherever they stand in the file; other values keep theirs."""
    shown = masked("", {
        "router": {"api_key": ["a", "b"], "api_key_file": "/k", "retries": 2},
        "kv_store": {"url": "redis://:pw@h"},
        "env": {"HF_TOKEN": "t", "OMP_NUM_THREADS": "1"},
        "prefill": {"engine_args": {"api-key": ["x"], "dtype": "auto"}, "env": {"AWS_SECRET": "s"}},
    })  # fmt: skip
    assert shown == {
        "router": {"api_key": [HIDDEN, HIDDEN], "api_key_file": "/k", "retries": 2},
        "kv_store": {"url": f"redis://:{HIDDEN}@h"},
        "env": {"HF_TOKEN": HIDDEN, "OMP_NUM_THREADS": "1"},
        "prefill": {"engine_args": {"api-key": [HIDDEN], "dtype": "auto"}, "env": {"AWS_SECRET": HIDDEN}},
    }


def test_a_command_line_is_shown_without_what_follows_secret_flags() -> None:
    """Both spellings of a flag, all words that belong to it, and URLs inside of JSON."""
    words = ["serve", "--api-key", "a", "b", "--port", "1", "--hf-token=t", '{"url": "redis://u:pw@h"}']
    assert masked_words(words) == [
        "serve", "--api-key", HIDDEN, HIDDEN, "--port", "1", f"--hf-token={HIDDEN}",
        f'{{"url": "redis://u:{HIDDEN}@h"}}',
    ]  # fmt: skip


@given(st.lists(st.text()))
def test_words_without_secrets_are_shown_as_they_are(words: list[str]) -> None:
    """What is copied from a dry run has to run."""
    plain = [w for w in words if "://" not in w and not w.startswith("-")]
    assert masked_words(plain) == plain
