"""The operator's override on virtual time: survivors of a lost majority go on, and a side that was given up by mistake comes back."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.core import messages as m
from shoal.core.consensus.override import AHEAD, decide
from shoal.sim.node import Node
from shoal.sim.scenarios.drawing import draw
from shoal.sim.scenarios.scenario import Scenario
from shoal.sim.swarm import Swarm

STEPS = 8
SCENARIO = Scenario(name="override", peers=(5, 7), stages=(1, 2), steps=(STEPS, STEPS))
# The side that was given up must still train when it hears of it: many steps, and nothing heals by itself.
CUT = Scenario(name="cut", peers=(5, 7), stages=(1, 2), steps=(40, 40), faults_s=200.0)
WAIT_S = 30.0  # without a majority, before the operator acts
CUT_S = 12.0  # the same for those cut off, and again before the network heals
DESK = "operator.0"


class Lost(Swarm):
    """After some commits most peers are gone (killed, or cut off from the others); later the operator names the others."""

    cut_off = False
    lost_s: float | None = None
    waited: int | None = None
    overridden: m.View | None = None
    survivors: tuple[Node, ...] = ()

    def agreed(self, peer: m.Peer, view: m.View) -> None:
        super().agreed(peer, view)
        if self.lost_s is None and view.started and view.step == 3 and not view.joining:
            self.lost_s = self.kernel.now
            self.kernel.after(0.1, self._lose)

    def _lose(self, _: Any) -> None:
        view = self.watch.newest
        assert view is not None
        kept: list[Node] = []
        for stage in range(self.case.settings.stages):  # one of each stage at least, so that nobody else need come
            kept.append(next(self.nodes[one.peer] for one in view.members if one.stage == stage))
        assert 2 * len(kept) <= len(view.voters)
        self.survivors = tuple(kept)
        others = [node for node in self.nodes.values() if node not in kept]
        if self.cut_off:
            here, there = tuple(node.name for node in kept), tuple(node.name for node in others)
            self.network.part((here, there), both=True)
        else:
            for node in others:
                self.kill(node)
        self.kernel.after(CUT_S if self.cut_off else WAIT_S, self._override)

    def _override(self, _: Any) -> None:
        held = [node.machine.view for node in self.survivors]
        newest = max((view for view in held if view is not None), key=lambda view: view.number)
        self.waited = newest.step
        standings = {}
        for node in self.survivors:
            assert node.machine.view is not None
            standings[node.name] = m.Standing(term=node.machine.register.term, view=node.machine.view)
        silent = frozenset(one.peer for one in newest.members + newest.joining) - standings.keys()
        saved = max((step for step in self.world.storage.published), default=0)
        if saved > newest.step:  # the other side has gone on, on the same storage: the command refuses
            saved = max((step for step in self.world.storage.published if step <= newest.step), default=0)
        view, term = decide(standings, silent, saved, self.case.settings.microbatches)
        self.overridden = view
        self.survivors[0].deliver(DESK, m.Override(view=view, term=term), ())  # it passes it on
        if self.cut_off:
            self.kernel.after(CUT_S, lambda _: self.network.heal())


class Cut(Lost):
    cut_off = True


@pytest.mark.parametrize("seed", [0, 2])
def test_survivors_without_a_majority_wait_for_the_operator_and_then_train_to_the_end(seed: int) -> None:
    swarm = Lost(draw(SCENARIO, seed))
    swarm.context.notes = []
    outcome = swarm.run()
    assert not outcome.violations, outcome.violations[0]
    assert swarm.overridden is not None and swarm.waited is not None
    assert swarm.waited <= 4, "nothing was committed without a majority"
    assert any("nothing is committed until a majority" in note for note in swarm.context.notes)
    newest = swarm.watch.newest
    assert newest is not None and newest.finished and newest.step == STEPS
    assert newest.epoch == swarm.overridden.epoch
    steps = [step for epoch, step in swarm.watch.commits.known if epoch >= AHEAD]
    assert steps == list(range(swarm.overridden.step, STEPS))
    assert newest.account.committed == STEPS * swarm.case.settings.microbatches
    assert newest.account.undone == (swarm.waited - swarm.overridden.step) * swarm.case.settings.microbatches


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_side_that_was_given_up_but_lives_is_void_as_soon_as_it_hears_and_its_peers_join_the_other(seed: int) -> None:
    """Both sides train, which is the danger; what the run consists of is settled all the same."""
    swarm = Cut(draw(CUT, seed))
    outcome = swarm.run()
    assert not outcome.violations, outcome.violations[0]
    assert swarm.overridden is not None
    newest = swarm.watch.newest
    assert newest is not None and newest.finished and newest.epoch == swarm.overridden.epoch
    void = [step for epoch, step in swarm.watch.commits.known if epoch == 0]
    assert max(void) > swarm.overridden.step, "the other side went on"
    assert {node.machine.view.epoch for node in swarm.liveness.veterans if node.machine.view} == {newest.epoch}
