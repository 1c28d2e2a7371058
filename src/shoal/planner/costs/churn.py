"""What losing machines is expected to cost a plan, from how often each is taken away (`losses_per_h` in the cluster file).

A machine that goes costs, as this program is built: the patience after which it is removed (run.heartbeat_timeout_s), in which its stage
does without it; what it had booked in the step, on average half of its share, which the others of its stage compute again; and the
step with one replica less. The last replica of a stage costs more: everyone goes back to the newest checkpoint, half of
checkpoint.every steps on average. Losses are taken to be independent and rare: two in one step are not priced.
"""

from __future__ import annotations

import msgspec

from shoal.planner.inputs.cluster import Cluster
from shoal.planner.strategy.plan import Plan


class Churn(msgspec.Struct, frozen=True):
    """Of a plan, per hour of training."""

    losses_per_h: float
    lost_s: float  # seconds of the run that losses cost, per hour of it
    fatal_per_h: float  # losses that empty a stage and undo steps
    worst: str = ""  # the stage that contributes most, in words

    @property
    def share(self) -> float:
        """Of the time."""
        return min(self.lost_s / 3600.0, 1.0)


def expected(plan: Plan, cluster: Cluster, heartbeat_timeout_s: float, checkpoint_steps: int) -> Churn:
    """`checkpoint_steps`: between two checkpoints; 0 = none before the end, and then an hour is at stake."""
    predicted = plan.predicted
    assert predicted is not None, "a plan that was just made has its numbers"
    rate_of = {device.name: device.losses_per_h for device in cluster.devices}
    undone_s = checkpoint_steps / 2 * predicted.step_s if checkpoint_steps else 3600.0
    losses, fatal, lost_s = 0.0, 0.0, 0.0
    worst: tuple[float, int, str] = (0.0, 0, "")
    for number, stage in enumerate(plan.stages):
        rate = sum(rate_of.get(peer, 0.0) for peer in stage.peers)
        if not rate:
            continue
        others = len(stage.peers) - 1
        if others:
            each_s = (
                heartbeat_timeout_s
                + 0.5 * predicted.microbatches_s / others
                + predicted.microbatches_s / len(stage.peers)
            )
        else:
            each_s = heartbeat_timeout_s + undone_s
            fatal += rate
        losses += rate
        lost_s += rate * each_s
        what = "whose only replica's loss undoes steps" if not others else f"of {len(stage.peers)} replicas"
        worst = max(worst, (rate * each_s, -number, f"stage {number}, {what}"))
    return Churn(losses, lost_s, fatal, worst[2])
