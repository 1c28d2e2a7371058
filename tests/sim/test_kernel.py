"""The simulator's own ground: virtual time, the network's contract, task runners that compute in symbols."""

from __future__ import annotations

import gc
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from shoal.core import messages as m
from shoal.kept import Kept
from shoal.sim.kernel import THRESHOLDS, Kernel
from shoal.sim.network import CLEAN, Network
from shoal.sim.scenarios import catalogue, drawing, scenario
from shoal.sim.tasks.pace import Pace
from shoal.sim.tasks.task_runner import BAD, TaskRunner, World


def test_actions_run_in_order_of_time_and_ties_in_order_of_asking() -> None:
    kernel, seen = Kernel(), []
    for time, word in ((2.0, "c"), (1.0, "a"), (2.0, "d"), (1.0, "b")):
        kernel.at(time, seen.append, word)
    kernel.run(until=10.0, events=100)
    assert seen == ["a", "b", "c", "d"]


def test_a_time_gone_by_means_now() -> None:
    kernel, seen = Kernel(), []
    kernel.at(5.0, lambda _: kernel.at(1.0, lambda _: seen.append(kernel.now)))
    kernel.run(until=10.0, events=100)
    assert seen == [5.0]


def test_the_kernel_stops_at_its_bounds_and_when_told() -> None:
    kernel = Kernel()

    def again(_: Any) -> None:
        kernel.after(1.0, again)

    kernel.at(0.0, again)
    kernel.run(until=4.5, events=100)
    assert (kernel.now, kernel.events) == (4.5, 5)
    kernel.run(until=1e9, events=50)
    assert kernel.events == 50
    kernel.stop()
    kernel.run(until=1e9, events=100)
    assert kernel.events == 50


def a_network(**faults: float) -> Network:
    network = Network(scenario.Scenario(), Random(7))
    network.faults = scenario.Messages(**faults) if faults else CLEAN
    return network


@pytest.mark.parametrize("faults", [{}, {"delay": 0.5, "drop": 0.2}])
@pytest.mark.parametrize("nbytes", [0, 300_000])
def test_messages_of_one_class_between_two_peers_stay_in_order(faults: dict[str, float], nbytes: int) -> None:
    network = a_network(**faults)
    arrivals = [at for number in range(300) for at in network.arrivals("a", "b", nbytes, number * 0.01)]
    assert arrivals == sorted(arrivals)
    assert len(arrivals) == 300 if not faults else 150 < len(arrivals) < 300


def test_control_does_not_wait_behind_bulk() -> None:
    network = a_network()
    (bulk,) = network.arrivals("a", "b", 10**9, 0.0)
    (control,) = network.arrivals("a", "b", 0, 0.1)
    assert control < 1.0 < bulk


def test_bulk_of_a_higher_rank_goes_first_and_each_rank_stays_in_order() -> None:
    network = a_network()
    state = [network.arrivals("a", "b", 10**8, 0.0, rank=3)[0] for _ in range(3)]
    backward = [network.arrivals("a", "b", 10**6, 0.1, rank=0)[0] for _ in range(3)]
    assert backward == sorted(backward) and backward[-1] < state[0]
    assert state == sorted(state)
    assert network.arrivals("a", "b", 10**6, 0.2, rank=3)[0] > state[-1], "what was overtaken lost no time"


def test_an_uplink_passes_one_blob_after_the_other() -> None:
    network = a_network()
    first = network.arrivals("a", "b", 10**8, 0.0)[0]
    second = network.arrivals("a", "c", 10**8, 0.0)[0]
    assert second > first * 1.5


def test_only_scenarios_that_ask_for_it_break_the_contract() -> None:
    network = a_network(duplicate=0.5, reorder=0.5)
    each = [network.arrivals("a", "b", 0, number * 0.01) for number in range(300)]
    assert any(len(one) == 2 for one in each)
    firsts = [one[0] for one in each]
    assert firsts != sorted(firsts)


def test_a_cut_lets_nothing_pass_until_it_is_joined() -> None:
    network = a_network()
    pairs = network.part((("a",), ("b", "c")), both=False)
    assert network.arrivals("a", "b", 0, 0.0) == ()
    assert network.arrivals("b", "a", 0, 0.0)
    network.join(pairs)
    assert network.arrivals("a", "b", 0, 0.0)


def test_a_case_is_the_same_for_the_same_seed_and_kinds_of_faults_vary() -> None:
    chaos = catalogue.SCENARIOS["chaos"]
    assert drawing.draw(chaos, 3) == drawing.draw(chaos, 3)
    cases = [drawing.draw(chaos, seed) for seed in range(40)]
    assert {case.happenings.pauses > 0 for case in cases} == {True, False}
    assert {case.messages.drop > 0 for case in cases} == {True, False}


def test_a_scenario_file_is_refused_with_its_name_and_what_is_wrong(tmp_path: Any) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("pears = [2, 3]\n")
    with pytest.raises(ValueError, match=r"mine\.toml.*pears"):
        catalogue.load(str(path))
    path.write_text('name = "mine"\npeers = [2, 3]\n[messages]\ndrop = 0.5\n')
    assert catalogue.load(str(path)).messages.drop == 0.5
    with pytest.raises(ValueError, match="neither a file nor one of"):
        catalogue.load("nonsense")


class Bench:
    """TaskRunner on a kernel of their own."""

    def __init__(self, stages: int = 2) -> None:
        self.kernel = Kernel()
        self.world = World(stages, 100)
        self.results: dict[str, m.Done | m.Failed] = {}

    def runner(self) -> TaskRunner:
        return TaskRunner(self.world, self.kernel.after, lambda: self.kernel.now)

    def do(self, runner: TaskRunner, task: m.Task) -> m.Done | m.Failed:
        runner.submit(task, self._note)
        self.kernel.run(until=1e9, events=10**6)
        return self.results[task.id]

    def _note(self, result: m.Done | m.Failed) -> None:
        self.results[result.id] = result


def trained(bench: Bench, runner: TaskRunner, indices: tuple[int, ...]) -> None:
    """Stage 0's part of these microbatches; the gradients from above are made up."""
    for index in indices:
        runner.blobs[f"x{index}"] = ("x", 0, index, 0, "")
        runner.blobs[f"g{index}"] = ("g", 0, index, 0, "above")
        bench.do(runner, m.RunBackward(f"b{index}", 0, index, 0, f"x{index}", f"g{index}", ""))


def averaged(bench: Bench, runner: list[TaskRunner]) -> list[m.Done | m.Failed]:
    """Cut, add and gather in one chunk."""
    for number, one in enumerate(runner):
        bench.do(one, m.Cut(f"c{number}", 0, (0, 100), ("part",)))
    for one in runner:
        for number, other in enumerate(runner):
            one.blobs[f"part{number}"] = other.blobs["part"]
    results = []
    for number, one in enumerate(runner):
        bench.do(one, m.Add(f"a{number}", tuple(f"part{k}" for k in range(len(runner))), "sum"))
        results.append(bench.do(one, m.Gather(f"r{number}", 0, 1, ("sum",))))
    return results


def test_two_replicas_that_average_hold_the_same_parameters() -> None:
    bench = Bench()
    pair = [bench.runner(), bench.runner()]
    for number, one in enumerate(pair):
        bench.do(one, m.Init(f"i{number}", 0, 0))
    trained(bench, pair[0], (0, 2))
    trained(bench, pair[1], (1,))
    first, second = averaged(bench, pair)
    assert isinstance(first, m.Done) and isinstance(second, m.Done)
    assert first.result.digest == second.result.digest
    applied = [bench.do(one, m.Apply(f"p{number}", 0, 1, 1.0, False)) for number, one in enumerate(pair)]
    assert isinstance(applied[0], m.Done) and applied[0].result == applied[1].result  # type: ignore[union-attr]
    assert not bench.world.faults


def test_a_digest_tells_one_microbatch_more_and_another_norm_apart() -> None:
    digests = set()
    for indices, norm in (((0, 1), 1.0), ((0, 1, 1), 1.0), ((0,), 1.0), ((0, 1), 2.0)):
        bench = Bench()
        runner = bench.runner()
        bench.do(runner, m.Init("i", 0, 0))
        trained(bench, runner, indices)
        averaged(bench, [runner])
        done = bench.do(runner, m.Apply("p", 0, 1, norm, False))
        assert isinstance(done, m.Done)
        digests.add(done.result.digest)
    assert len(digests) == 4


def test_hops_pass_a_state_that_is_copied_and_a_step_waits_for_it() -> None:
    pace = Pace(None, 1)
    export, hop, step = m.Export("e", 0), m.Cut("c", 0, (0, 1), ("p",)), m.Apply("a", 0, 0, 1.0, False)
    assert pace.wait_s(export, 9.0, now=1.0) == 9.0
    waited_s = pace.wait_s(hop, 1.0, now=1.0)
    assert 1.0 < waited_s < 2.0
    assert pace.wait_s(step, 1.0, now=1.0) == 10.0
    assert pace.wait_s(hop, 1.0, now=11.0) == 1.0


def test_a_downloaded_state_is_the_donors_and_a_damaged_chunk_is_refused() -> None:
    bench = Bench()
    donor, joiner = bench.runner(), bench.runner()
    init = bench.do(donor, m.Init("i", 1, 0))
    export = bench.do(donor, m.Export("e", 0))
    assert isinstance(init, m.Done) and isinstance(export, m.Done) and export.result.manifest is not None
    for chunk, digest in enumerate(export.result.manifest.hashes):
        bench.do(donor, m.ReadChunk(f"r{chunk}", 0, chunk, f"chunk{chunk}"))
        joiner.blobs["c"] = BAD
        assert isinstance(bench.do(joiner, m.CheckChunk(f"d{chunk}", chunk, digest, "c")), m.Failed)
        joiner.blobs["c"] = donor.blobs[f"chunk{chunk}"]
        assert isinstance(bench.do(joiner, m.CheckChunk(f"k{chunk}", chunk, digest, "c")), m.Done)
    done = bench.do(joiner, m.Import("m", 1, 0, 3))
    assert isinstance(done, m.Done) and done.result == init.result


@pytest.mark.parametrize(
    "break_it",
    [
        lambda bench, runner: bench.do(runner, m.Apply("p", 0, 9, 1.0, False)),
        lambda bench, runner: bench.do(runner, m.RunForward("f", 3, 0, 0, "x0", "y")),
        lambda bench, runner: bench.do(runner, m.Gather("g", 0, 1, ("nothing",))),
        lambda bench, runner: trained(bench, runner, (0,)) or bench.do(runner, m.Cut("c", 5, (0, 100), ("z",))),
    ],
)
def test_what_no_machine_may_ask_for_is_noted(break_it: Callable[[Bench, TaskRunner], Any]) -> None:
    bench = Bench()
    runner = bench.runner()
    bench.do(runner, m.Init("i", 0, 0))
    runner.blobs["x0"] = ("x", 3, 0, 0, "")
    break_it(bench, runner)
    assert bench.world.faults


def test_computing_is_one_after_the_other_and_reading_beside_it() -> None:
    bench = Bench()
    runner = bench.runner()
    runner.pace.forward_s = 1.0
    bench.do(runner, m.Init("i", 0, 0))
    began = bench.kernel.now
    ends: list[tuple[str, float]] = []
    runner.blobs["x"] = ("x", 0, 0, 0, "")
    for number in range(2):
        runner.submit(
            m.RunForward(f"f{number}", 0, 0, 0, "x", f"y{number}"), lambda r: ends.append((r.id, bench.kernel.now))
        )
    runner.submit(m.Fetch("t", 0, 1, "z"), lambda r: ends.append((r.id, bench.kernel.now)))
    bench.kernel.run(until=1e9, events=100)
    assert [(name, pytest.approx(at - began)) for name, at in ends] == [("t", 0.01), ("f0", 1.0), ("f1", 2.0)]


def test_a_backward_whose_activations_are_kept_takes_one_forward_less() -> None:
    bench = Bench()
    runner = bench.runner()
    runner.pace.forward_s, runner.pace.backward, runner.pace.kept = 1.0, 3.0, Kept(1, 1.0)
    bench.do(runner, m.Init("i", 0, 0))
    taken_s = []
    for index in range(3):
        runner.blobs[f"x{index}"] = ("x", 0, index, 0, "")
        runner.blobs[f"g{index}"] = ("g", 0, index, 0, "")
    bench.do(runner, m.RunForward("f0", 0, 0, 0, "x0", "y0"))
    bench.do(runner, m.RunForward("f1", 0, 1, 0, "x1", "y1"))
    for index in range(2):
        began = bench.kernel.now
        bench.do(runner, m.RunBackward(f"b{index}", 0, index, 0, f"x{index}", f"g{index}", ""))
        taken_s.append(bench.kernel.now - began)
    bench.do(runner, m.RunForward("f2", 0, 2, 0, "x2", "y2"))
    bench.do(runner, m.Reset("r"))
    began = bench.kernel.now
    bench.do(runner, m.RunBackward("b2", 0, 2, 0, "x2", "g2", ""))
    assert [*taken_s, bench.kernel.now - began] == [pytest.approx(seconds) for seconds in (2.0, 3.0, 3.0)]


def test_garbage_is_collected_as_before_once_a_simulation_ends() -> None:
    def fails(_: object) -> None:
        seen.append(gc.get_threshold())
        raise ValueError("a simulation that breaks")

    kernel, before, seen = Kernel(), gc.get_threshold(), list[tuple[int, int, int]]()
    kernel.at(1.0, fails)
    with pytest.raises(ValueError, match="breaks"):
        kernel.run(until=10.0, events=100)
    assert gc.get_threshold() == before and seen == [THRESHOLDS]
