"""The engine as a state machine: waiting and running sequences over a block pool, stepped from outside.

One step is `plan` (what runs now: one token of each running sequence, prompt chunks while the token budget lasts,
new sequences while there is room), the time that it takes, and `commit` (compute, sample, finish). No clock, no
socket: `driver` owns both. A shared scheduler can take the place of `plan` without touching the rest.
"""

from __future__ import annotations

from collections import deque

from disagg.engines.emulated.blocks import BlockPool, Leases, next_key, root_key
from disagg.engines.emulated.handoff import Fetched, LocalSide, RemoteKv, handle
from disagg.engines.emulated.meetings import Meetings, Offer
from disagg.engines.emulated.model import Tokenizer, ToyModel
from disagg.engines.emulated.received import Received
from disagg.engines.emulated.sequence import FinishReason, Sequence, State
from disagg.engines.emulated.settings import EngineSettings
from disagg.engines.emulated.stats import Counters, Stats
from disagg.engines.emulated.step import Plan


class Engine:
    """All sequences and blocks of one engine.

    Attributes:
        to_load: Sequences whose remote KV has to be fetched; the driver takes them and calls `loaded`.
        to_release: Remote KV that will not be read; the driver tells its owner.
        to_forward: Finished sequences whose KV has to be sent ahead before they are answered.
        now: Time of the latest event, in seconds; set from outside.
    """

    def __init__(self, settings: EngineSettings, side: LocalSide) -> None:
        self.settings = settings
        self.side = side
        self.model = ToyModel.named(settings.model, settings.mean_output_tokens)
        self.tokenizer = Tokenizer()
        self.pool = BlockPool(settings.num_blocks, settings.block_size, caching=settings.prefix_caching)
        self.leases = Leases(settings.lease_s)
        self.meetings = Meetings(by_request=settings.dialect == "nixl-push")
        self.received = Received(settings.received_blocks) if settings.dialect == "lmcache" else None
        self.counters = Counters()
        self.stats = Stats()
        self.now = 0.0
        self.waiting: deque[Sequence] = deque()
        self.ready: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.loading: set[Sequence] = set()
        self.to_load: list[Sequence] = []
        self.to_release: list[RemoteKv] = []
        self.to_forward: list[Sequence] = []

    @property
    def queued(self) -> int:
        """Sequences that have arrived and do not run yet."""
        return len(self.waiting) + len(self.ready) + len(self.loading)

    # In and out.

    def add(self, seq: Sequence) -> None:
        """Queue a sequence."""
        seq.arrived = self.now
        if seq.remote is not None and seq.sampling.prompt_logprobs:
            # Log probabilities of the prompt need every position computed here.
            self.to_release.append(seq.remote)
            seq.remote = None
        later = (n for n, other in enumerate(self.waiting) if other.priority > seq.priority)
        at = next(later, None) if self.settings.priorities else None
        self.waiting.insert(len(self.waiting) if at is None else at, seq)

    def abort(self, seq: Sequence) -> None:
        """The client has left: free what the sequence holds; nothing is reported."""
        if seq.state is State.FINISHED:
            return
        if seq.remote is not None and seq.state is State.WAITING and not seq.blocks:
            self.to_release.append(seq.remote)
        self._leave(seq)
        self._end(seq, "abort")

    def loaded(self, seq: Sequence, fetched: Fetched | None) -> None:
        """The remote KV of a sequence is here, or could not be fetched (None)."""
        if seq.state is not State.LOADING:
            return
        self.loading.discard(seq)
        remote = seq.remote
        seq.remote = None
        if fetched is None or remote is None:
            self._load_failed(seq)
            return
        skipped = seq.computed // self.settings.block_size
        self.pool.write_raw(seq.blocks[skipped:], fetched.data, fetched.block_size)
        prompt = len(seq.prompt)
        seq.external_tokens = prompt - seq.computed
        self.counters.loads += 1
        self.counters.loaded_tokens += seq.external_tokens
        cached = remote.prefill_cached_tokens if fetched.cached_tokens is None else fetched.cached_tokens
        seq.cached_tokens = prompt if cached is None else cached
        if self.settings.dialect == "sglang" and fetched.first_token is not None:
            self._first_token_came(seq, fetched.first_token)
            return
        # The last prompt token is computed here, because the first output token is sampled from it.
        seq.computed = prompt - 1
        self._remember(seq, 0, prompt)
        self._make_ready(seq)

    def _first_token_came(self, seq: Sequence, token: int) -> None:
        """Prefill's token is the first of the answer, and counts."""
        prompt, now = len(seq.prompt), self.now
        seq.computed = prompt
        self._remember(seq, 0, prompt)
        seq.scheduled = seq.last_token = now
        self.stats.begun(seq, now)
        self.counters.prompt_tokens += prompt
        self.counters.generation_tokens += 1
        if seq.append(token, self.pool.context(seq.blocks, prompt), self.tokenizer, self.settings.max_model_len):
            self._settle(seq, now)
            seq.on_output(seq)
            return
        self._make_ready(seq)
        if seq.streaming:
            seq.on_output(seq)

    def _make_ready(self, seq: Sequence) -> None:
        # Before all who wait: it holds blocks already, and would keep them from those in front of it.
        seq.state = State.READY
        self.ready.append(seq)

    def _load_failed(self, seq: Sequence) -> None:
        self.counters.failed_loads += 1
        if self.settings.recompute:
            self._make_ready(seq)
            return
        self.free(seq)
        self._end(seq, "error")
        seq.on_output(seq)

    def give_up(self, seq: Sequence) -> None:
        """Its partner has not come in time; it was never queued."""
        self._end(seq, "error")
        seq.on_output(seq)

    def reap(self, now: float) -> None:
        """Free the KV whose lease has ended."""
        self.pool.release(self.leases.reap(now))
        self.pool.release(self.meetings.reap(now))

    # One step.

    def plan(self) -> Plan | None:
        """What to compute next; None if there is nothing."""
        budget = self.settings.max_num_batched_tokens
        work: list[tuple[Sequence, int]] = []
        prefill = decodes = context = 0
        preemptions = self.counters.preemptions
        for seq in tuple(self.running):
            if budget == 0:
                break
            if seq.state is not State.RUNNING:
                continue
            count = min(seq.length - seq.computed, budget)
            if not self._grow(seq, seq.computed + count):
                continue
            work.append((seq, count))
            budget -= count
        while budget and (self.ready or self.waiting) and preemptions == self.counters.preemptions:
            admitted = self._admit(budget)
            if admitted is None:
                break
            if admitted[1]:
                work.append(admitted)
                budget -= admitted[1]
        work = [item for item in work if item[0].state is State.RUNNING]
        if not work and preemptions != self.counters.preemptions:
            # The only one that ran has yielded its blocks: there may be room for it, or another, now.
            return self.plan()
        for seq, count in work:
            context += seq.computed + count
            if seq.computed >= len(seq.prompt):
                decodes += 1
            else:
                prefill += count
        return Plan(work, prefill, decodes, context) if work else None

    def commit(self, plan: Plan, now: float) -> None:
        """Compute what was planned; sequences that have ended meanwhile are passed over."""
        pool, model, size = self.pool, self.model, self.settings.block_size
        self.now = now
        self.stats.step_tokens.observe(plan.prefill_tokens + plan.decode_seqs)
        for seq, count in plan.work:
            if seq.state is not State.RUNNING:
                continue
            start = seq.computed
            before = pool.context(seq.blocks, start)
            sums = (seq.adapter or model).extend(before, seq.tokens(start, count))
            pool.write(seq.blocks, start, before, sums)
            end = seq.computed = start + count
            if start // size != end // size:
                self._remember(seq, start, end)
            if seq.sampling.prompt_logprobs and start < len(seq.prompt):
                seq.prompt_contexts += sums
            if end == seq.length:
                self._sample(seq, sums[-1], now)

    # Admission and room.

    def _admit(self, budget: int) -> tuple[Sequence, int] | None:
        """Let the first waiting sequence in: a number of tokens to compute, or 0 if it goes to load its KV."""
        queue = self.ready or self.waiting
        seq = queue[0]
        if not seq.blocks and not self._place(seq):
            return None
        if seq.state is State.LOADING:
            queue.popleft()
            return seq, 0
        if len(self.running) >= self.settings.max_num_seqs:
            return None
        count = min(seq.length - seq.computed, budget)
        if not self._room(seq, seq.computed + count):
            if seq.state is State.WAITING:
                # Cached blocks are not held by one who waits: those who run may need them to come to an end.
                self.free(seq)
            return None
        queue.popleft()
        if not seq.output:
            seq.scheduled = self.now
        seq.state = State.RUNNING
        self.running.append(seq)
        return seq, count

    def _place(self, seq: Sequence) -> bool:
        """Find cached blocks, and for remote KV take all the blocks that it needs. False if there is no room."""
        settings, counters, pool = self.settings, self.counters, self.pool
        tokens = len(seq.prompt)
        if seq.remote is None and len(self.running) >= settings.max_num_seqs:
            return False
        found: list[int] = []
        if settings.prefix_caching and not seq.sampling.prompt_logprobs:
            # The last token is always computed, so a prompt is never found whole.
            found = pool.find(seq.prompt_keys(settings.block_size)[: (tokens - 1) // settings.block_size])
        pool.share(found)
        seq.blocks, seq.computed = found, len(found) * settings.block_size
        if seq.remote is not None and not self._room(seq, tokens):
            self.free(seq)
            return False
        if self.received is not None and seq.remote is None and not seq.sampling.prompt_logprobs:
            self._take_received(self.received, seq, tokens)
        if not seq.placed:
            seq.placed = True
            counters.placed(seq)
            seq.cached_tokens = seq.computed
        if seq.remote is not None:
            # Counted when the load is planned: as on the real engine, one that fails afterwards has been a hit.
            counters.external_hits += tokens - seq.computed
            seq.state = State.LOADING
            self.loading.add(seq)
            self.to_load.append(seq)
        return True

    def _take_received(self, received: Received, seq: Sequence, tokens: int) -> None:
        """Use KV that was sent ahead, from where this engine's own cache ends."""
        size = self.settings.block_size
        have = len(seq.blocks)
        content = received.find(seq.prompt_keys(size)[have : (tokens - 1) // size])
        if not content or not self._room(seq, (have + len(content)) * size):
            return
        self.pool.write_raw(seq.blocks[have:], b"".join(content), size)
        start, seq.external_tokens = have * size, len(content) * size
        seq.computed = start + seq.external_tokens
        self._remember(seq, start, seq.computed)
        if not seq.placed:
            self.counters.received(seq.external_tokens)

    def _room(self, seq: Sequence, positions: int) -> bool:
        """Give a sequence blocks for so many positions, if they are free."""
        missing = -(-positions // self.settings.block_size) - len(seq.blocks)
        if missing <= 0:
            return True
        taken = self.pool.allocate(missing)
        if taken is None:
            return False
        seq.blocks += taken
        return True

    def _grow(self, seq: Sequence, positions: int) -> bool:
        """Room for a running sequence, if need be taken from the latest. False if it had to yield itself."""
        while not self._room(seq, positions):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is seq:
                return False
        return True

    def _preempt(self, seq: Sequence) -> None:
        """Send a sequence back to the queue; all its KV is computed again, from prompt and output."""
        self.running.remove(seq)
        self.free(seq)
        seq.state = State.WAITING
        seq.prompt_contexts.clear()
        self.waiting.appendleft(seq)
        self.counters.preemptions += 1

    # Results and ends.

    def _sample(self, seq: Sequence, context: int, now: float) -> None:
        counters = self.counters
        if seq.output:
            self.stats.inter_token.observe(now - seq.last_token)
        else:
            self.stats.begun(seq, now)
            counters.prompt_tokens += len(seq.prompt)
            counters.computed_prompt_tokens += max(0, len(seq.prompt) - seq.cached_tokens - seq.external_tokens)
        seq.last_token = now
        token = seq.choose(seq.adapter or self.model, context)
        counters.generation_tokens += 1
        if seq.append(token, context, self.tokenizer, self.settings.max_model_len):
            self.running.remove(seq)
            self._settle(seq, now)
            if seq.forward is None:
                seq.on_output(seq)
        elif seq.streaming:
            seq.on_output(seq)

    def _settle(self, seq: Sequence, now: float) -> None:
        """A sequence has ended by itself: keep its KV for decode if that was asked for, else free it."""
        reason = seq.finish_reason
        if seq.offer_key is not None and seq.blocks:
            self._offer(seq, seq.offer_key, now)
        elif seq.forward is not None:
            # Answered when its KV has arrived at the other engine; the driver frees the blocks then.
            self.to_forward.append(seq)
            if seq.tells_first_token:
                seq.params_out = {"first_tok": seq.output[0]}
        elif seq.keep_for_decode and seq.blocks:
            seq.params_out = handle(self.side, seq.request_id, seq.blocks, seq.computed, seq.cached_tokens)
            self.leases.pin(seq.request_id, seq.blocks, now)
            seq.blocks = []
        else:
            self.free(seq)
        self._end(seq, reason or "stop")
        self.stats.ended(seq, now)

    def _offer(self, seq: Sequence, key: str, now: float) -> None:
        """Hand the KV to the leg that waits for it, or keep it for a while."""
        dialect = self.settings.dialect
        if dialect == "mooncake" and seq.finish_reason != "length":
            # As the real connector: KV of a sequence that stopped is dropped, and the other leg waits in vain.
            self.free(seq)
            return
        if dialect == "nixl-push":
            seq.params_out = handle(self.side, key, seq.blocks, seq.computed, seq.cached_tokens, push=True)
        held = -(-len(seq.prompt) // self.settings.block_size)
        self.pool.release(seq.blocks[held:])
        blocks, seq.blocks = seq.blocks[:held], []
        if self.meetings.offer(key, Offer(blocks, seq.cached_tokens, seq.output[0], now + self.settings.wait_s)):
            self.pool.release(blocks)

    def _end(self, seq: Sequence, reason: FinishReason) -> None:
        seq.state = State.FINISHED
        seq.finish_reason = reason
        self.counters.finished[reason] += 1

    def _leave(self, seq: Sequence) -> None:
        """Take a sequence out of wherever it is and free its blocks."""
        if seq.state is State.WAITING:
            if seq in self.waiting:
                self.waiting.remove(seq)
        elif seq.state is State.READY:
            self.ready.remove(seq)
        elif seq.state is State.RUNNING:
            self.running.remove(seq)
        if seq.state is State.LOADING:
            # The transfer still writes into these blocks: they come back when it has ended (`free`).
            self.loading.discard(seq)
        else:
            self.free(seq)

    def forwarded(self, seq: Sequence) -> None:
        """KV that was sent ahead has arrived, or could not be sent."""
        self.free(seq)
        seq.on_output(seq)

    def free(self, seq: Sequence) -> None:
        """Give back a sequence's blocks: nobody reads them, and no transfer writes into them any more."""
        self.pool.release(seq.blocks)
        seq.blocks = []
        seq.computed = 0

    def _remember(self, seq: Sequence, start: int, end: int) -> None:
        """Make blocks findable that became full between two positions."""
        size = self.settings.block_size
        if not self.settings.prefix_caching:
            return
        keys = seq.prompt_keys(size)
        for index in range(start // size, end // size):
            while len(keys) <= index:
                at = len(keys) * size
                keys.append(next_key(keys[-1] if keys else root_key(seq.salt_key), seq.tokens(at, size)))
            if self.pool.remember(seq.blocks[index], keys[index]) and self.pool.log is not None:
                parent = keys[index - 1] if index else None
                self.pool.log.stored([keys[index]], parent, seq.tokens(index * size, size), seq.adapter_name)
