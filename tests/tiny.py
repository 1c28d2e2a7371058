"""The configuration of a run so small that its processes start faster than they train. For tests and benchmarks that need one."""

from __future__ import annotations

DATA = bytes(32 + (i * i) % 90 for i in range(5000))  # of a.txt, which it names


def tiny(
    name: str = "tiny", *, peers: int = 2, stages: int = 2, steps: int = 6, every: int = 2, request_s: float = 60.0
) -> str:
    """`every`: steps between checkpoints. `request_s` is long: on a busy machine nothing may be called slow. Silence stays short enough
    to notice a kill. The last section is [network], for more of its settings."""
    return f"""
[run]
name = "{name}"
peers = {peers}
stages = {stages}
steps = {steps}
min_request_timeout_s = {request_s}
[model]
hidden_size = 16
layers = {stages}
heads = 2
kv_heads = 1
intermediate_size = 24
[data]
source = "text"
path = "a.txt"
sequence = 16
[train]
batch = 8
microbatch = 2
warmup = 0
schedule = "constant"
[checkpoint]
every = {every}
[network]
discovery = "gossip"
"""
