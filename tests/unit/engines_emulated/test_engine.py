"""The engine's state machine: batching, preemption, aborts, handoff; blocks always come home."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.engines.emulated.engine import Engine
from disagg.engines.emulated.handoff import Fetched, LocalSide, RemoteKv, read_remote
from disagg.engines.emulated.sequence import Sampling, Sequence, State
from disagg.engines.emulated.settings import EngineSettings, SimplePace
from tests.unit.engines_emulated.running import SETTINGS

SIDE = LocalSide("engine-a", "127.0.0.1", 1)
SMALL = replace(SETTINGS, block_size=4, num_blocks=16, max_model_len=64, max_num_seqs=4, max_num_batched_tokens=16)


def engine_with(**changes: object) -> Engine:
    return Engine(replace(SMALL, **changes).checked(), SIDE)  # type: ignore[arg-type]


def sequence(prompt: list[int], max_tokens: int = 5, **more: object) -> Sequence:
    sampling = Sampling(max_tokens=max_tokens, ignore_eos=True)
    return Sequence("r", prompt, sampling, on_output=lambda _: None, **more)  # type: ignore[arg-type]


def run(engine: Engine, now: float = 0.0) -> int:
    """Step until nothing is left to do; the number of steps."""
    steps = 0
    while (plan := engine.plan()) is not None:
        engine.commit(plan, now)
        steps += 1
        assert steps < 2000, "the engine does not come to an end"
    return steps


def alone(prompt: list[int], max_tokens: int = 5) -> list[int]:
    """What a prompt is answered with by an engine that has nothing else to do."""
    engine = engine_with(num_blocks=64)
    seq = sequence(prompt, max_tokens)
    engine.add(seq)
    run(engine)
    return seq.output


PROMPTS = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=24), min_size=1, max_size=12)


@given(PROMPTS, st.integers(1, 12), st.booleans())
@settings(max_examples=60)
def test_answers_do_not_depend_on_company(prompts: list[list[int]], max_tokens: int, caching: bool) -> None:
    """Batching, chunking, prefix hits and preemption in a tight pool never change a word, and every block returns."""
    engine = engine_with(prefix_caching=caching)
    seqs = [sequence(prompt, max_tokens) for prompt in prompts]
    for seq in seqs:
        engine.add(seq)
    run(engine)
    assert [seq.output for seq in seqs] == [alone(prompt, max_tokens) for prompt in prompts]
    assert engine.pool.free_blocks == 16
    assert not engine.running
    assert not engine.waiting


def test_a_pool_that_is_too_small_for_all_preempts_the_latest() -> None:
    """A sequence that needs a block takes it from the latest, which is computed again and loses nothing."""
    engine = engine_with()
    seqs = [sequence([n] * 20, 30) for n in range(3)]
    for seq in seqs:
        engine.add(seq)
    run(engine)
    assert engine.counters.preemptions > 0
    assert all(seq.output == alone(seq.prompt, 30) for seq in seqs)
    assert engine.counters.prefix_queries == 60, "a sequence that comes back is not a new query"


def test_no_more_sequences_run_than_allowed_and_no_step_is_larger_than_its_budget() -> None:
    """max_num_seqs and max_num_batched_tokens hold in every step."""
    engine = engine_with(num_blocks=64)
    for n in range(9):
        engine.add(sequence([n] * 15, 4))
    while (plan := engine.plan()) is not None:
        assert len(engine.running) <= 4
        assert sum(count for _, count in plan.work) <= 16
        engine.commit(plan, 0.0)


def test_a_prompt_longer_than_the_budget_is_computed_in_chunks() -> None:
    """A step never computes more prompt tokens than its budget."""
    engine = engine_with(num_blocks=64)
    engine.add(sequence(list(range(40)), 1))
    assert run(engine) == 3


def test_the_prefix_cache_saves_computation_and_the_last_token_is_always_computed() -> None:
    """A prompt that is cached whole still computes the token from which the answer is sampled."""
    engine = engine_with()
    first, second = sequence(list(range(8))), sequence(list(range(8)))
    engine.add(first)
    run(engine)
    engine.add(second)
    run(engine)
    assert (first.cached_tokens, second.cached_tokens) == (0, 4)
    assert second.output == first.output
    assert engine.counters.prefix_hits == 4


@given(PROMPTS, st.integers(0, 2**32))
@settings(max_examples=60)
def test_aborts_at_any_moment_free_everything(prompts: list[list[int]], seed: int) -> None:
    """A client may leave in any state: its blocks return and the others' answers stay right."""
    dice = random.Random(seed)
    engine = engine_with()
    seqs = [sequence(prompt, 8) for prompt in prompts]
    left: set[int] = set()
    for seq in seqs:
        engine.add(seq)
    while (plan := engine.plan()) is not None:
        victim = dice.choice(seqs)
        if dice.random() < 0.3 and victim.state is not State.FINISHED:
            engine.abort(victim)
            left.add(id(victim))
        engine.commit(plan, 0.0)
    assert engine.pool.free_blocks == 16
    for seq in seqs:
        if id(seq) not in left:
            assert seq.output == alone(seq.prompt, 8)


# Handoff.


def prefilled(prompt: list[int], **changes: object) -> tuple[Engine, RemoteKv]:
    """A prefill engine that has finished a prompt, and the handle that it returned."""
    engine = engine_with(**changes)
    seq = sequence(prompt, 1, keep_for_decode=True)
    engine.add(seq)
    run(engine)
    assert seq.params_out is not None
    remote = read_remote(seq.params_out)
    assert remote is not None
    return engine, remote


def pull(decode: Engine, prefill: Engine) -> None:
    """Carry out the loads that decode wants."""
    loads, decode.to_load = decode.to_load, []
    for seq in loads:
        assert seq.remote is not None
        count = len(seq.blocks) - seq.computed // decode.settings.block_size
        data = prefill.pool.read_raw(seq.remote.blocks[-count:])
        decode.loaded(seq, Fetched(data, prefill.settings.block_size))


def decoded(decode: Engine, prefill: Engine, prompt: list[int], remote: RemoteKv) -> Sequence:
    seq = sequence(prompt, remote=remote)
    decode.add(seq)
    assert decode.plan() is None
    pull(decode, prefill)
    run(decode)
    return seq


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 17])
def test_decode_continues_as_if_it_had_computed_the_prompt(length: int) -> None:
    """Around the block size, decode computes one prompt token and says the same words as one engine."""
    prompt = list(range(1, length + 1))
    prefill, remote = prefilled(prompt)
    decode = engine_with()
    seq = decoded(decode, prefill, prompt, remote)
    assert seq.output == alone(prompt)
    assert seq.external_tokens == length
    assert decode.counters.external_hits == length
    assert decode.counters.computed_prompt_tokens == 0
    assert decode.pool.free_blocks == 16


def test_a_prompt_that_decode_has_in_part_is_loaded_in_part() -> None:
    """Blocks in decode's own cache are not transferred again."""
    prompt = list(range(1, 14))
    decode = engine_with()
    decode.add(sequence(prompt[:9]))
    run(decode)
    prefill, remote = prefilled(prompt)
    seq = decoded(decode, prefill, prompt, remote)
    assert seq.output == alone(prompt)
    assert seq.external_tokens == 5


def test_prefill_keeps_the_blocks_until_they_are_collected_or_the_lease_ends() -> None:
    """Pinned KV is freed by the reader's notice, or by the reaper, once."""
    prefill, remote = prefilled([1] * 10)
    assert prefill.pool.free_blocks == 13
    prefill.pool.release(prefill.leases.collect(remote.request_id))
    assert prefill.pool.free_blocks == 16
    prefill.pool.release(prefill.leases.collect(remote.request_id))
    assert prefill.pool.free_blocks == 16
    prefill, _ = prefilled([1] * 10)
    prefill.reap(29.9)
    assert prefill.pool.free_blocks == 13
    prefill.reap(30.0)
    assert prefill.pool.free_blocks == 16


def test_a_stale_handle_gives_other_words_and_they_stay_in_the_cache() -> None:
    """Blocks that were reused in between are read without an error; the same prompt is wrong later, too."""
    prompt = list(range(1, 14))
    prefill, remote = prefilled(prompt, num_blocks=16)
    prefill.reap(30.0)
    other = sequence([7] * 60, 4)
    prefill.add(other)
    run(prefill)
    decode = engine_with()
    assert decoded(decode, prefill, prompt, remote).output != alone(prompt)
    later = sequence(prompt)
    decode.add(later)
    run(decode)
    assert later.output != alone(prompt)


def test_another_prompts_handle_gives_other_words() -> None:
    """Text depends on the KV that was read, not on the prompt that was sent."""
    mine, theirs = list(range(1, 10)), list(range(11, 20))
    prefill, remote = prefilled(theirs)
    seq = decoded(engine_with(), prefill, mine, remote)
    assert seq.output != alone(mine)


def test_larger_blocks_on_decode_give_other_words_without_an_error() -> None:
    """As on the real engine, which answers 200: block sizes have to be compared before."""
    prompt = list(range(1, 14))
    prefill, remote = prefilled(prompt)
    assert decoded(engine_with(block_size=8), prefill, prompt, remote).output != alone(prompt)


def test_a_failed_load_fails_the_request_or_recomputes() -> None:
    """kv_load_failure_policy: an error, or the right words at the price of a prefill; blocks return either way."""
    prompt = list(range(1, 10))
    for recompute in (False, True):
        _, remote = prefilled(prompt)
        decode = engine_with(recompute=recompute)
        seq = sequence(prompt, remote=remote)
        decode.add(seq)
        decode.plan()
        decode.loaded(decode.to_load.pop(), None)
        run(decode)
        assert seq.finish_reason == ("length" if recompute else "error")
        assert seq.output == (alone(prompt) if recompute else [])
        assert decode.pool.free_blocks == 16
        assert decode.counters.failed_loads == 1
        assert decode.counters.loaded_tokens == 0
        assert decode.counters.external_hits == len(prompt), "a planned load is a hit, also on the real engine"


def test_kv_that_has_arrived_goes_first() -> None:
    """Loaded requests hold blocks; behind one that waits for blocks they would wait for each other for ever."""
    prefill, remote = prefilled([1] * 9)
    decode = engine_with(max_num_seqs=1, num_blocks=16)
    long, short = sequence([2] * 40, 20), sequence([1] * 9, 2, remote=remote)
    for seq in (long, short):
        decode.add(seq)
    while not decode.loading:
        plan = decode.plan()
        assert plan is not None
        decode.commit(plan, 0.0)
    pull(decode, prefill)
    run(decode)
    assert short.output == alone([1] * 9, 2)
    assert long.output == alone([2] * 40, 20)
    assert decode.pool.free_blocks == 16


def test_leaving_while_queued_on_decode_lets_prefill_go() -> None:
    """KV that will never be read is released at once and does not wait for the lease."""
    _, remote = prefilled([1] * 5)
    decode = engine_with()
    seq = sequence([1] * 5, remote=remote)
    decode.add(seq)
    decode.abort(seq)
    assert decode.to_release == [remote]
    assert decode.plan() is None
    assert not decode.to_load


def test_leaving_during_the_load_keeps_the_blocks_until_the_transfer_has_ended() -> None:
    """Blocks that a transfer still writes into are nobody else's; they return when it has ended."""
    prefill, remote = prefilled([1] * 5)
    decode = engine_with()
    seq = sequence([1] * 5, remote=remote)
    decode.add(seq)
    decode.plan()
    decode.abort(seq)
    assert decode.pool.free_blocks == 14
    decode.loaded(seq, Fetched(prefill.pool.read_raw(remote.blocks), 4))
    decode.free(seq)
    assert decode.pool.free_blocks == 16
    assert decode.plan() is None


def test_an_aborted_or_failed_prefill_returns_no_handle() -> None:
    """Only an end by length or stop keeps KV."""
    engine = engine_with()
    seq = sequence([1] * 5, 1, keep_for_decode=True)
    engine.add(seq)
    engine.plan()
    engine.abort(seq)
    assert seq.params_out is None
    assert engine.pool.free_blocks == 16


def test_prompt_logprobs_compute_the_whole_prompt_and_let_remote_kv_go() -> None:
    """Every prompt position is needed, so neither cache nor handoff is used."""
    prompt = list(range(1, 10))
    _, remote = prefilled(prompt)
    decode = engine_with()
    decode.add(sequence(prompt))
    run(decode)
    seq = sequence(prompt, remote=remote)
    seq.sampling = replace(seq.sampling, prompt_logprobs=True)
    decode.add(seq)
    run(decode)
    assert decode.to_release == [remote]
    assert len(seq.prompt_contexts) >= len(prompt)
    assert seq.cached_tokens == 0


def test_settings_that_cannot_start_are_refused_with_all_reasons() -> None:
    """A pool that cannot hold one full context would never finish some requests."""
    from disagg.errors import ConfigError

    with pytest.raises(ConfigError, match="at least 16 blocks"):
        replace(SMALL, num_blocks=15).checked()
    with pytest.raises(ConfigError) as caught:
        EngineSettings("m", ("m",), "e", block_size=0, max_num_seqs=0, lease_s=0).checked()
    assert [p.where for p in caught.value.problems] == ["--block-size", "--max-num-seqs", "--kv-lease"]


@pytest.mark.parametrize(
    ("fields", "flag"),
    [
        ({"num_blocks": 10**11}, "--num-blocks"),
        ({"lease_s": float("nan")}, "--kv-lease"),
        ({"lease_s": float("inf")}, "--kv-lease"),
        ({"handshake_timeout_s": 0.0}, "--handshake-timeout"),
        ({"transfer_s": -1.0}, "--transfer-time"),
        ({"mean_output_tokens": -1}, "--mean-output-tokens"),
    ],
)
def test_settings_with_which_time_or_memory_would_not_do_are_refused(fields: dict[str, Any], flag: str) -> None:
    """A lease that is not a number never ends, and a pool that does not fit ends the process."""
    from disagg.errors import ConfigError

    with pytest.raises(ConfigError) as caught:
        replace(SMALL, **fields).checked()
    assert [p.where for p in caught.value.problems] == [flag]


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_a_pace_that_is_none_is_refused(value: float) -> None:
    """Steps of negative or endless length."""
    from disagg.errors import ConfigError

    with pytest.raises(ConfigError, match=r"(?s)prefill-tokens-per-s.*decode-step"):
        SimplePace(value, value).checked()
