"""An engine of ours that computes no model but behaves like vLLM with NIXL pull, for tests and for trying a topology.

``model`` (toy tokens, toy KV) and ``blocks`` (pool, leases, prefix cache) are pure; ``engine`` is the pure state
machine of running and waiting requests; ``driver`` gives it time; ``transfer`` moves KV between processes; ``server``
speaks HTTP; ``adapter`` tells the launcher how to start it.
"""
