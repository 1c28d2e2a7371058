"""The choice of a plan for a configuration, with the seed and budget of the search. For `shoal plan` and `shoal.plan`."""

from __future__ import annotations

import numpy as np

from shoal.config import Config
from shoal.planner.strategy import choices, strategy
from shoal.planner.strategy.plan import Plan
from shoal.planner.strategy.problem import Problem

SEED, BUDGET = 0, 400  # of the search; evaluations


def decide(
    tree: Config, problem: Problem, stages: int | None = None, sizes: bool = False, known: Plan | None = None
) -> Plan:
    """`stages`: consider this number only; `sizes`: choose train.microbatch, too; `known`: a plan that these machines can run, to
    search from as well. ValueError: nothing fits."""

    def decide_one(given: Problem) -> Plan:
        if sizes:
            return strategy.decide_sizes(given, lambda: np.random.default_rng(SEED), BUDGET, stages, known)
        return strategy.decide(given, np.random.default_rng(SEED), BUDGET, stages, known)

    return choices.choose(problem, tree.plan.allow, decide_one, lambda peers: _shares_out(tree, peers))


def _shares_out(tree: Config, peers: int) -> bool:
    """Are a local step's sequences whole microbatches, with so many peers?"""
    train = tree.train
    return bool(train.local_batch) or (train.batch % peers == 0 and train.batch // peers % train.microbatch == 0)
