"""What follows from several sections: the machines' Settings, sizes of batches, and whether the activation store is wide enough."""

from __future__ import annotations

import math

from shoal import codec
from shoal.config.sections import data, device, train
from shoal.config.sections.run import Run
from shoal.config.sections.train import microbatches
from shoal.config.tree import Config
from shoal.core.messages import Settings
from shoal.core.trainer.window import LEAST

# Of a piece's fp32 values, while a round runs: my own copy; the others' parts of my chunk, or the sums; parts of the next piece that
# came early. My sums of this and the last piece are 1/n each, with parts and sums of n - 1 others: 3 together. In rows
# (core/allreduce/layout.py) the last piece's are a row's chunk of it: 3.2 at most.
ROUND_COPIES = 3
# Of a hop's result, by which honest machines may differ (benchmarks/spot_checks.py): float32 with TF32 on a card 0.3 % through int8, and
# through int4, whose steps are coarse, 1 %; bfloat16 rounds every product to 8 bits. Of a sum of gradients of weights: less.
FLOAT32, BFLOAT16, INT4 = 0.02, 0.1, 0.1
PART = 0.5


def local_batch(config: Config) -> int:
    """Sequences per local step of one peer."""
    return train.local_sequences(config.train, config.run)


def tokens_per_step(config: Config) -> int:
    """Tokens of one step, all peers together."""
    return config.train.batch * config.train.local_steps * config.data.sequence * data.token_rows(config.data)


def slices(config: Config) -> int:
    """Parts of a microbatch that are on the device one after another."""
    return device.slices(config.device, config.train)


def paired(config: Config) -> bool:
    """Whether samples are preference pairs."""
    return data.paired(config.data)


def token_rows(config: Config) -> int:
    """Rows of tokens in a microbatch: two of each preference pair."""
    return config.train.microbatch * data.token_rows(config.data)


def boundary_rows(config: Config) -> int:
    """Rows of a boundary tensor: of preference pairs, the reference's follow those that are trained."""
    return config.train.microbatch * data.boundary_rows(config.data)


def counts(config: Config) -> int:
    """What counts in a microbatch, at most: tokens, or preference pairs."""
    return config.train.microbatch * (1 if paired(config) else config.data.sequence)


def masked(config: Config) -> bool:
    """Whether the loss of some tokens does not count."""
    return config.data.format != "text"


def narrow_store(config: Config, tensor_bytes: float, stages: int, inflight: int) -> str:
    """What is wrong with network.activation_store_bytes for boundary tensors of that size, in words; '' when it is wide enough.

    Below 2 * stages * inflight tensors servers answer Busy while they wait for one another, and a run is slow and right
    without saying why (docs/design/2026-11-21-direct-hops.md). A step that keeps fewer needs no more."""
    inflight = inflight or LEAST
    wanted = min(2 * stages * inflight, 3 * microbatches(config.train))
    store_bytes = config.network.activation_store_bytes
    if stages == 1 or store_bytes >= wanted * tensor_bytes:
        return ""
    return (
        f"network.activation_store_bytes = {store_bytes} holds {int(store_bytes / tensor_bytes)} boundary tensors of"
        f" {math.ceil(tensor_bytes)} bytes; with {stages} stages and {inflight} microbatches in flight fewer than"
        f" {wanted} make the run slow; try network.activation_store_bytes={math.ceil(wanted * tensor_bytes)}"
    )


def spot_tolerance(config: Config) -> float:
    """Largest distance of two results of one hop that is taken for rounding, as a share of the norm."""
    least = BFLOAT16 if _coarse(config) else FLOAT32
    return max(least, INT4 if "int4" in (config.network.activations, config.network.gradients) else 0.0)


def part_tolerance(config: Config) -> float:
    """The same of what a replica brings into a round, before encoding."""
    return PART * (BFLOAT16 if _coarse(config) else FLOAT32)


def _coarse(config: Config) -> bool:
    return config.train.dtype == "bfloat16" or config.tune.quantize != "none"


def inflight(run: Run) -> int:
    """Microbatches that an owner drives at once; 0: as many as fill the lines (core/trainer/window.py)."""
    return 0 if run.inflight == "auto" else run.inflight


def settings(config: Config, first_step: int = 0) -> Settings:
    """What the machines need to know."""
    run, train = config.run, config.train
    return Settings(
        stages=run.stages,
        microbatches=microbatches(train),
        steps=run.steps,
        first_step=first_step,
        peers=run.peers,
        inflight=inflight(run),
        queue_limit=run.queue_limit,
        save_every=config.checkpoint.every,
        save_last=config.checkpoint.at_end,
        copies=config.checkpoint.copies,
        keep=config.checkpoint.keep,
        robust=run.robust,
        undo=run.undo,
        probation=run.probation,
        heartbeat_s=run.heartbeat_s,
        heartbeat_timeout_s=run.heartbeat_timeout_s,
        min_request_timeout_s=run.min_request_timeout_s,
        ready_timeout_s=run.ready_timeout_s,
        lost_stage=run.lost_stage,
        lost_stage_wait_s=run.lost_stage_wait_s,
        staleness=config.train.staleness,
        activation_store_bytes=config.network.activation_store_bytes,
        nonfinite=config.train.on_nonfinite,
        stage_seconds=run.stage_seconds,
        spot_checks=run.spot_checks,
        spot_tolerance=spot_tolerance(config),
        part_tolerance=part_tolerance(config),
        averaging_bytes=codec.bytes_per_value(config.network.averaging, 4.0),
        join_slowdown=run.join_slowdown,
        averaging_error=codec.LOST[config.network.averaging],
        piece_values=min(run.averaging_memory_bytes // ROUND_COPIES, config.network.max_tensor_bytes) // 4,
        home=run.stages == 1 and not run.routes,
        seat=list(run.placement).index(config.device.machine) if config.device.machine else -1,
        seats=tuple(run.placement.values()),
        routes=run.routes,
        line_rates=run.line_rates,
        serve=run.serve,
        cache_bytes=config.device.cache_bytes,
        tokens=counts(config) if masked(config) else 0,
        heldout=-(-config.eval.samples // train.microbatch) if config.eval.path else 0,
        heldout_every=config.eval.every if config.eval.path else 0,
        patience=config.eval.patience,
        save_measured=config.eval.keep_best,
        heldout_tokens=counts(config),
    )
