"""The run's figures in Prometheus' text format: names and units after its conventions. docs/watch.md lists them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, cast

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4 as CONTENT_TYPE

from shoal.dashboard.page.state import PageState
from shoal.dashboard.series import StepFigures
from shoal.traffic import KINDS

__all__ = ["CONTENT_TYPE", "text"]

REWARDS = {  # of preference pairs
    "reward_accuracy": "Share of the newest step's pairs whose chosen answer has the larger reward.",
    "reward_margin": "Mean of the chosen answers' rewards less those of the rejected ones, in the newest step.",
    "heldout_reward_accuracy": "The same share of held-out pairs before the newest step.",
    "heldout_reward_margin": "The same mean of held-out pairs before the newest step.",
}


def text(state: PageState, newest: StepFigures | None) -> bytes:
    """One scrape. `newest`: the figures of the newest step."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(cast(Any, _Run(state, newest)))
    answer: bytes = generate_latest(registry)
    return answer


class _Run:
    """A collector of prometheus_client: made for one scrape."""

    def __init__(self, state: PageState, newest: StepFigures | None) -> None:
        self._state, self._newest = state, newest

    def collect(self) -> Iterator[Metric]:
        yield from _run(self._state)
        if self._newest is not None:
            yield from _step(self._newest)
        yield from _peers(self._state)


def _run(state: PageState) -> Iterator[Metric]:
    alive = state.phase in ("starting", "running", "stopped")
    yield _gauge("shoal_up", "1 while the run's launcher lives.", float(alive))
    yield _gauge("shoal_status_age_seconds", "Since the launcher wrote the run's status.", state.age_s)
    yield _counter("shoal_steps", "Committed steps.", state.step)
    yield _gauge("shoal_steps_planned", "Steps after which the run ends.", state.steps)
    yield _counter("shoal_tokens", "Tokens of committed steps.", state.step * state.tokens_per_step)
    yield _gauge("shoal_tokens_per_second", "Over the last 20 steps.", state.tokens_per_s)
    for what, count in state.account.items():
        name = what.replace(" ", "_")
        yield _counter(f"shoal_microbatches_{name}", f"Microbatches {what}, of the whole run.", count)
    sent = CounterMetricFamily("shoal_sent_bytes", "Bytes sent by all peers since they started.", labels=["kind"])
    for kind in KINDS:
        sent.add_metric([kind], getattr(state.sent, kind))
    yield sent


def _step(newest: StepFigures) -> Iterator[Metric]:
    if newest.loss is not None:
        yield _gauge("shoal_loss", "Mean loss of the newest step, in nats per token.", newest.loss)
    if newest.heldout_loss is not None:
        text = "Mean loss of held-out tokens before the newest step, in nats per token."
        yield _gauge("shoal_heldout_loss", text, newest.heldout_loss)
    for field, words in REWARDS.items():
        if (value := getattr(newest, field)) is not None:
            yield _gauge(f"shoal_{field}", words, value)
    if newest.gradient_norm is not None:
        yield _gauge("shoal_gradient_norm", "Of the newest step, before clipping.", newest.gradient_norm)
    yield _gauge("shoal_learning_rate", "Of the newest step.", newest.learning_rate)


def _peers(state: PageState) -> Iterator[Metric]:
    counts = Counter((str(row.stage if row.stage is not None else ""), row.state) for row in state.peers)
    peers = GaugeMetricFamily("shoal_peers", "Peers by stage and state.", labels=["stage", "state"])
    for labels, count in sorted(counts.items()):
        peers.add_metric(labels, count)
    yield peers
    rates = GaugeMetricFamily("shoal_stage_microbatches_per_second", "That a stage passes when busy.", labels=["stage"])
    for number, stage in enumerate(state.stages):
        rates.add_metric([str(number)], stage.rate)
    yield rates
    per_peer: dict[str, CounterMetricFamily | GaugeMetricFamily] = {
        "sent": CounterMetricFamily("shoal_peer_sent_bytes", "Bytes sent since it started.", labels=["peer"]),
        "received": CounterMetricFamily(
            "shoal_peer_received_bytes", "Bytes received since it started.", labels=["peer"]
        ),
        "memory": GaugeMetricFamily("shoal_peer_memory_bytes", "Of its tensors, in memory.", labels=["peer"]),
        "queue_s": GaugeMetricFamily("shoal_peer_queue_seconds", "Work that waits there.", labels=["peer"]),
        "join_s": GaugeMetricFamily("shoal_peer_join_seconds", "From its start until it was ready.", labels=["peer"]),
    }
    for row in state.peers:
        if row.state == "gone" or row.rate is None:  # or on another machine, whose figures are not known here
            continue
        for field, family in per_peer.items():
            if field != "join_s" or row.join_s:
                family.add_metric([row.label], getattr(row, field))
    yield from per_peer.values()


def _gauge(name: str, words: str, value: float) -> Metric:
    return GaugeMetricFamily(name, words, value=value)


def _counter(name: str, words: str, value: float) -> Metric:
    return CounterMetricFamily(name, words, value=value)
