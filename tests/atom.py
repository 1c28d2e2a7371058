"""For tests: when a swap hides behind compute, what fits, and where pipelines, swapping and local steps cross over.

Paper: ATOM (arXiv 2403.10504). Claim: when the whole model sits in one host's memory and groups of layers visit the
device in turn, peers need exchange only gradients, which beats pipelines on poor networks. The formulas are derived
from the mechanism; the paper has no such table.

    `swap_tokens`        T*: tokens per pass from which loading a block hides behind computing the one before
    `pass_utilisation`   a whole pass, groups forward and back: compute issued over time taken
    `swap_bytes`         device memory of a swapping peer
    `blocks_most`        k_max: blocks that stay on a device, weights and gradients, the optimizer elsewhere
    `pipeline_Bps`       link from which a resident stage of k blocks hides its boundary tensors
    `averaging_s`, `sync_tokens`, `crossover_tokens`, `moved_bytes`, `best_stages`, `utilisation`, `best_utilisation`

Conventions: FLOP = 2 per multiply and add, full attention, one sequence per microbatch, a pass costs 4 f per block (recompute
included) and 6 V d for the head; weights in 2 bytes; links full duplex.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

WEIGHT_BYTES = 2
GRADIENT_BYTES = 2  # stored once per pass
RESERVED_BYTES = 3e9  # what a resident stage needs besides weights and gradients
RESIDENT_BYTES = 6  # per parameter: a 2-byte weight and an fp32 gradient
ADAM_HOST_BYTES = 18  # per parameter: master, two moments, 2-byte copy, fp32 gradient


class Gpt(msgspec.Struct, frozen=True):
    """A GPT-3 of the paper's kind: learned positions, tied head."""

    hidden: int
    layers: int
    batch_tokens: float  # of one optimizer step, all peers together
    tokens: int = 2048  # per sequence
    vocabulary: int = 50257

    @property
    def block_parameters(self) -> int:
        return 12 * self.hidden**2 + 13 * self.hidden

    @property
    def embedding_parameters(self) -> int:
        return (self.vocabulary + self.tokens) * self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.block_parameters + self.embedding_parameters + 2 * self.hidden

    @property
    def block_flops(self) -> float:
        """f: forward of one block, per token."""
        return 24.0 * self.hidden**2 + 4.0 * self.tokens * self.hidden

    @property
    def step_flops(self) -> float:
        """Of one token through everything, forward, recompute and backward."""
        return 4 * self.layers * self.block_flops + 6.0 * self.vocabulary * self.hidden


class Gpu(msgspec.Struct, frozen=True):
    """A device with its host."""

    flops: float  # sustained, per second
    host_Bps: float  # one way
    memory_bytes: float


class Swarm(msgspec.Struct, frozen=True):
    """So many equal peers on equal lines, averaging every `local_steps`."""

    peers: int
    line_Bps: float
    local_steps: int = 1
    activation_bytes: float = 1  # a: per boundary value
    gradient_bytes: float = 1  # q: per value averaged


def swap_tokens(model: Gpt, gpu: Gpu) -> float:
    """T*."""
    load_s = model.block_parameters * WEIGHT_BYTES / gpu.host_Bps
    return load_s * gpu.flops / model.block_flops


def swap_bytes(model: Gpt, blocks: int = 1, microbatches: int | None = None) -> float:
    """Device memory with groups of `blocks`; boundaries on the host, or on the device when `microbatches` says how many."""
    values = model.hidden * model.tokens
    kept = 8.0 * values if microbatches is None else 2.0 * values * microbatches * math.ceil(model.layers / blocks)
    weights = (2 * blocks * model.block_parameters + model.embedding_parameters) * (WEIGHT_BYTES + 4.0)
    return weights + 36.0 * values * blocks + kept + 0.75 * model.tokens * model.vocabulary + 1e9


def blocks_most(model: Gpt, gpu: Gpu) -> int:
    """k_max. The embedding is not counted: `borderline` says where that matters."""
    room = gpu.memory_bytes - RESERVED_BYTES
    return max(0, min(model.layers, math.floor(room / (RESIDENT_BYTES * model.block_parameters))))


def borderline(model: Gpt, gpu: Gpu) -> bool:
    """k_max blocks fit, but not with the embedding in 6 bytes per parameter... counted as the end stages hold it."""
    blocks = blocks_most(model, gpu)
    needed = RESIDENT_BYTES * (blocks * model.block_parameters + model.embedding_parameters) + RESERVED_BYTES
    return blocks == model.layers and needed > gpu.memory_bytes


def swapping_helps(model: Gpt, gpu: Gpu, host_bytes: float) -> bool:
    """The model is too large to stay on the device with its gradients, yet the host can hold it with fp32 Adam."""
    too_large = RESIDENT_BYTES * model.parameters + RESERVED_BYTES > gpu.memory_bytes
    return too_large and ADAM_HOST_BYTES * model.parameters <= host_bytes


def pipeline_Bps(model: Gpt, gpu: Gpu, blocks: int, activation_bytes: float = 1) -> float:
    """W: each boundary value travels twice each way per microbatch while `blocks` compute 4 f."""
    return activation_bytes * model.hidden * gpu.flops / (2 * blocks * model.block_flops)


def averaging_s(model: Gpt, replicas: float, line_Bps: float, gradient_bytes: float = 1) -> float:
    return 2 * model.parameters * gradient_bytes * (replicas - 1) / replicas / line_Bps


def refuse_timeout(model: Gpt, replicas: int, line_Bps: float, timeout_s: float) -> str:
    """Why averaging cannot end within that timeout; '' when it can."""
    needed_s = averaging_s(model, replicas, line_Bps)
    if needed_s <= timeout_s:
        return ""
    return (
        f"averaging takes {needed_s:.1f} s, more than its timeout of {timeout_s:g} s; try {math.ceil(2 * needed_s)} s"
    )


def sync_tokens(model: Gpt, gpu: Gpu, replicas: int, line_Bps: float) -> float:
    """T_sync: tokens per peer between averagings from which averaging hides behind them."""
    return averaging_s(model, replicas, line_Bps) / (model.step_flops / gpu.flops)


def crossover_tokens(model: Gpt, stages: int, activation_bytes: float = 1, gradient_bytes: float = 1) -> float:
    """H T from which whole models move fewer bytes than a pipeline of that many stages, many replicas each."""
    return model.parameters * gradient_bytes / (stages * model.hidden * activation_bytes)


def moved_bytes(model: Gpt, stages: float, tokens: float, swarm: Swarm, replicas: float = math.inf) -> float:
    """V(S): bytes per direction, peer and inner step. `tokens` per peer and step."""
    hops = 2 * tokens * (stages - 1) * model.hidden * swarm.activation_bytes
    if replicas <= 1:
        return hops
    shared = 1.0 if math.isinf(replicas) else (replicas - 1) / replicas
    return hops + 2 * model.parameters / stages * swarm.gradient_bytes * shared / swarm.local_steps


def best_stages(model: Gpt, tokens: float, swarm: Swarm) -> float:
    """S*, at which V(S) is least."""
    moved = swarm.local_steps * tokens * model.hidden * swarm.activation_bytes
    return math.sqrt(model.parameters * swarm.gradient_bytes / moved)


# ------------------------------------------------------------------------------------------------------- utilisation


def pass_utilisation(model: Gpt, gpu: Gpu, microbatches: float, blocks: int = 1) -> float:
    """One pass in groups of `blocks`: two streams, the next group loads while this one computes, the last one stays."""
    groups = [min(blocks, model.layers - first) for first in range(0, model.layers, blocks)]
    forward_s = [microbatches * model.tokens * k * model.block_flops / gpu.flops for k in groups]
    load_s = [k * model.block_parameters * WEIGHT_BYTES / gpu.host_Bps for k in groups]
    store_s = [k * model.block_parameters * GRADIENT_BYTES / gpu.host_Bps for k in groups]
    head_s = microbatches * model.tokens * 6.0 * model.vocabulary * model.hidden / gpu.flops
    last = len(groups) - 1
    turn_s = forward_s[last] * 3 + head_s  # the last group needs no recompute
    time_s = load_s[0] + sum(max(forward_s[j], load_s[j + 1]) for j in range(last))
    time_s += max(turn_s, load_s[last - 1]) if last else turn_s
    for j in range(last - 1, -1, -1):
        time_s += max(3 * forward_s[j], load_s[j - 1] if j else 0.0, store_s[j + 1])
    time_s += store_s[0]
    issued_s = 4 * sum(forward_s[:last]) + turn_s
    return issued_s / time_s


def utilisation(model: Gpt, gpu: Gpu, swarm: Swarm, stages: int) -> float:
    """U(S): compute over the longer of compute (swapped, when a stage is too large to stay) and the line."""
    if stages > swarm.peers:
        return 0.0
    tokens = model.batch_tokens / swarm.peers
    compute_s = tokens * model.step_flops / gpu.flops
    issued = 1.0
    if math.ceil(model.layers / stages) > blocks_most(model, gpu):
        issued = pass_utilisation(model, gpu, max(tokens * stages, model.tokens) / model.tokens)
    line_s = moved_bytes(model, stages, tokens, swarm, swarm.peers / stages) / swarm.line_Bps
    return compute_s / max(compute_s / issued, line_s)


def best_utilisation(model: Gpt, gpu: Gpu, swarm: Swarm, resident: bool) -> tuple[float, int]:
    """The best U and its number of stages, the smaller one on ties; (0, 1) when no stage stays on the device."""
    counts = sorted({math.ceil(model.layers / blocks) for blocks in range(1, model.layers + 1)})
    fits: Callable[[int], bool] = lambda s: math.ceil(model.layers / s) <= blocks_most(model, gpu)  # noqa: E731
    priced = [(utilisation(model, gpu, swarm, s), s) for s in counts if not resident or fits(s)]
    best = max((u for u, _ in priced), default=0.0)
    return (best, min(s for u, s in priced if u == best)) if best > 0 else (0.0, 1)
