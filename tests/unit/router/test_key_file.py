"""The key file: what its lines mean, and what is wrong with them."""

import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.errors import ConfigError
from disagg.router.key_file import ClientKey, key_digest, make_entry, new_key, parse_keys, read_key_file

HASH = "sha256:" + hashlib.sha256(b"secret").hexdigest()
OTHER = "sha256:" + hashlib.sha256(b"other").hexdigest()


def test_lines_have_names_hashes_and_limits() -> None:
    """Comments and blank lines mean nothing; a key without limits has none."""
    text = f"# keys\n\nalice {HASH} requests_per_minute=600 max_concurrent=8 models=a,b  # a comment\nbob {OTHER}\n"
    alice, bob = parse_keys(text, "keys")
    assert alice == ClientKey("alice", key_digest(b"secret"), 600, 8, frozenset({"a", "b"}))
    assert bob == ClientKey("bob", key_digest(b"other"))


def test_every_problem_is_told_at_once_with_its_line() -> None:
    """A file is mended once; an unknown limit comes with the one that was meant."""
    text = (
        f"alice {HASH} max_concurent=8\n-x {HASH}\nbob secret\ncarl {OTHER} max_concurrent=0 models=\ncarl {HASH}\n"
    )
    with pytest.raises(ConfigError) as caught:
        parse_keys(text, "k")
    told = "\n".join(map(str, caught.value.problems))
    assert "k:1: alice: unknown limit 'max_concurent'; did you mean max_concurrent?" in told
    assert "k:2: '-x' is no name" in told
    assert "k:3: bob: the second word is not sha256:" in told
    assert "k:4: carl: max_concurrent= needs a whole number" in told
    assert "k:4: carl: models= needs names" in told
    assert "k:5: has the same name as line 4" in told
    assert "k:5: has the same key as line 1" in told
    assert "secret" not in told, "a key that was pasted in place of its hash is not shown"


def test_an_empty_file_is_an_error() -> None:
    """A file without keys would lock everybody out, or let everybody in; neither is guessed."""
    with pytest.raises(ConfigError, match="has no key"):
        parse_keys("# nothing\n", "k")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """The message says which file cannot be read."""
    with pytest.raises(ConfigError, match=r"nowhere: cannot be read"):
        read_key_file(str(tmp_path / "nowhere"))


def test_new_keys_are_long_and_differ() -> None:
    """256 bits, with a prefix that scanners for leaked keys can look for."""
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(k.startswith("disagg-") and len(k) >= 50 for k in keys)


_names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)
_number = st.none() | st.integers(1, 9_999_999)


@given(_names, _number, _number, st.none() | st.frozensets(_names, min_size=1, max_size=3))
def test_a_line_reads_back_as_the_entry_that_it_was_made_from(
    name: str, rate: int | None, concurrent: int | None, models: frozenset[str] | None
) -> None:
    """What `disagg keys new` prints is what the router reads."""
    entry = ClientKey(name, key_digest(b"k"), rate, concurrent, models)
    assert parse_keys(entry.line, "k") == (entry,)


@given(st.text())
def test_no_text_breaks_the_reader(text: str) -> None:
    """Whatever a file holds: entries, or a list of problems."""
    problems: tuple[object, ...] = ()
    entries: tuple[object, ...] = ()
    try:
        entries = parse_keys(text, "k")
    except ConfigError as error:
        problems = error.problems
    assert bool(entries) is not bool(problems)


def test_wrong_limits_of_a_new_key_are_refused_by_their_flag() -> None:
    """The command says what is wrong with what was typed."""
    with pytest.raises(ConfigError, match="--limit: alice: unknown limit"):
        make_entry("alice", "k", ["speed=3"], "--limit")
