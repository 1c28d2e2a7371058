"""`shoal run --plan FILE`: what the plan decides is what the run and each of its peers do."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from shoal import config as configuration
from shoal.cli import main as program
from shoal.core.messages import Committed
from shoal.exit_codes import ExitCode
from shoal.launcher.planning import plan_settings
from shoal.launcher.planning import problem as planning_problem
from shoal.planner.inputs.profile import profile
from shoal.planner.strategy.plan import PeerPlan, Plan, Prediction, StagePlan
from shoal.planner.strategy.plan import save as save_plan
from shoal.planner.strategy.problem import gradient_bytes
from shoal.runtime.records.account import CommittedStep

EVEN = Plan(
    layers=6,
    stages=(StagePlan(0, 3, ("a", "b"), microbatch_s=0.2), StagePlan(3, 6, ("c",), microbatch_s=0.1)),
    predicted=Prediction(2.0, 100.0, 1.5, 0.4, 0.1, 1e6, "compute of stage 0"),
)


def test_a_plan_gives_the_run_its_stages_peers_and_costs() -> None:
    config = configuration.load(None, plan_settings.decided(EVEN, "plan.json"))
    assert (config.run.stages, config.run.peers, config.run.stage_seconds) == (2, 3, (0.2, 0.1))
    assert configuration.settings(config).stage_seconds == (0.2, 0.1)


def test_costs_of_another_number_of_stages_are_refused() -> None:
    with pytest.raises(ValueError, match=r"run\.stage_seconds = \[0\.2, 0\.1\].*run\.stages = 3"):
        configuration.load(None, ["run.stages=3", "run.stage_seconds=[0.2, 0.1]"])


def test_a_plan_of_another_model_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_plan(msgspec.structs.replace(EVEN, layers=8), "plan.json")
    Path("run.toml").write_text("[model]\nlayers = 6\n")
    assert program.main(["run", "run.toml", "--plan", "plan.json"]) == 2
    assert "model of 8 blocks; model.layers = 6" in capsys.readouterr().err
    assert not Path("runs").exists(), "nothing was started"


def test_a_plan_of_a_model_with_as_many_blocks_but_of_another_size_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text("[model]\nlayers = 6\nhidden_size = 64\nheads = 4\nkv_heads = 4\n")
    config = configuration.load("run.toml", [])
    counted = profile(planning_problem.shape(config), planning_problem.work(config))
    cut = (range(3), range(3, 6))
    stages = tuple(
        msgspec.structs.replace(stage, gradient_bytes=gradient_bytes(counted, span, "none"))
        for stage, span in zip(EVEN.stages, cut, strict=True)
    )
    right = msgspec.structs.replace(EVEN, stages=stages)
    planning_problem.refuse_other_size(right, config, "plan.json")
    planning_problem.refuse_other_size(EVEN, config, "plan.json")  # by hand: it does not say how large they are
    save_plan(right, "plan.json")
    settings = ["model.hidden_size=128", "model.heads=8", "model.kv_heads=8"]
    assert program.main(["run", "run.toml", *settings, "--plan", "plan.json"]) == 2
    output = capsys.readouterr().err
    assert "plan.json: stage 0 averages" in output and "the plan is for another model; plan anew" in output
    assert not Path("runs").exists(), "nothing was started"


def test_uneven_blocks_seats_routes_and_sizes_reach_the_run() -> None:
    routes = (((0,), (2,)), ((1,), (2,)), ((0, 1), (2,)))
    stages = (StagePlan(0, 4, ("a", "b")), StagePlan(4, 6, ("c",)))
    uneven = msgspec.structs.replace(EVEN, stages=stages, routes=routes, line_rates=(4, 5, 6), microbatch=8, inflight=2)
    config = configuration.load(None, plan_settings.decided(uneven, "plan.json"))
    assert config.run.layers == (4, 2)
    assert (config.run.placement, config.run.routes) == ({"a": 0, "b": 0, "c": 1}, routes)
    assert (config.train.microbatch, config.run.inflight) == (8, 2)
    assert configuration.settings(config).line_rates == (4, 5, 6)


def test_a_stage_that_must_swap_gets_an_executor_that_does() -> None:
    stages = (StagePlan(0, 4, ("a", "b"), executor="swapping"), StagePlan(4, 6, ("c",)))
    plan = msgspec.structs.replace(EVEN, stages=stages)
    config = configuration.load(None, plan_settings.decided(plan, "plan.json"))
    assert [plan_settings.of_seat(config, plan, n, None).device.executor for n in range(3)] == [
        "swapping",
        "swapping",
        "resident",
    ]
    assert [plan_settings.of_seat(config, plan, n, None).device.machine for n in range(4)] == ["a", "b", "c", ""]


CLUSTER = """
[link]
delay_s = "10 ms"
bandwidth_Bps = "100 Mbit/s"
[[device]]
name = "c"
flops = "1 TFLOP/s"
up_Bps = "80 Mbit/s"
[[device]]
name = "a"
count = 1
flops = "2 TFLOP/s"
[[device]]
name = "b"
flops = "1 TFLOP/s"
[[links]]
from = "a"
to = "c"
one_way = true
bandwidth_Bps = "8 Mbit/s"
delay_s = "90 ms"
"""


def test_a_rehearsal_gives_each_peer_its_machines_lines_seconds_and_sizes(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    peers = (PeerPlan("a", 0.01, 0.03), PeerPlan("b", 0.02, 0.06), PeerPlan("c", 0.1, 0.3))
    stages = (
        StagePlan(0, 3, ("a", "b"), microbatch_s=0.1, gradient_bytes=4000.0),
        StagePlan(3, 6, ("c",), microbatch_s=0.3, gradient_bytes=8000.0),
    )
    plan = msgspec.structs.replace(EVEN, stages=stages, peers=peers, boundary_bytes=400.0)
    lab = ["device.executor=emulated", "device.emulated_s=0"]
    config = configuration.load(None, [*lab, *plan_settings.decided(plan, "plan.json")])
    cluster = plan_settings.read_cluster(str(tmp_path / "cluster.toml"), plan, config)
    a, _, c = (plan_settings.of_seat(config, plan, n, cluster) for n in range(3))
    assert (a.device.emulated_s, a.device.emulated_backward_s) == (0.01, 0.03)
    assert (c.device.emulated_values, c.device.emulated_gradient) == (100, 2000)
    assert a.network.links == {plan_settings.host(1): (0.01, 12.5e6), plan_settings.host(2): (0.09, 1e6)}
    assert c.network.links[plan_settings.host(0)] == (0.01, 12.5e6), "one way only"
    assert (c.network.up_Bps, a.network.up_Bps) == (10e6, 0.0)
    assert len({peer.network.host for peer in (a, c)}) == 2


def test_a_machine_with_several_cards_gets_its_count_and_stays_resident() -> None:
    peers = (PeerPlan("a", 0.1, 0.2, cards=2), PeerPlan("b", 0.1, 0.2), PeerPlan("c", 0.1, 0.2))
    stages = (
        StagePlan(0, 3, ("a", "b"), executor="swapping", kept_activations=3),
        StagePlan(3, 6, ("c",), kept_activations=3),
    )
    plan = msgspec.structs.replace(EVEN, stages=stages, peers=peers)
    config = configuration.load(None, ["device.kind=cpu", *plan_settings.decided(plan, "plan.json")])
    devices = [plan_settings.of_seat(config, plan, number, None).device for number in range(3)]
    assert [(each.count, each.executor, each.kept_activations) for each in devices] == [
        (2, "resident", -1),
        (1, "swapping", 3),
        (1, "resident", 3),
    ]


def test_a_cluster_without_a_planned_machine_or_without_a_plan_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("cluster.toml").write_text(CLUSTER)
    Path("run.toml").write_text("")
    other = msgspec.structs.replace(EVEN, stages=(StagePlan(0, 6, ("z",)),))
    save_plan(other, "plan.json")
    assert program.main(["run", "run.toml", "--plan", "plan.json", "--cluster", "cluster.toml"]) == 2
    assert "does not have z, which the plan names" in capsys.readouterr().err
    assert program.main(["run", "run.toml", "--cluster", "cluster.toml"]) == 2
    assert "name the plan too" in capsys.readouterr().err


def test_the_end_of_a_run_says_what_was_predicted_and_what_was_measured() -> None:
    commits = [CommittedStep(0, Committed(n, n, 1.0, 2.0, (), ()), heard_s=10.0 + 2.5 * n) for n in range(5)]
    assert plan_settings.against(EVEN, tuple(commits)) == (
        "the plan predicted 2.00 s a step; measured 2.50 s (+25%), median of 4"
    )
    assert plan_settings.against(EVEN, tuple(commits[:1])) == ""


@pytest.mark.slow
def test_a_plan_made_for_a_lab_is_run_and_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lab.toml").write_text(
        '[run]\nname = "lab"\nsteps = 6\npeers = 4\nstages = 2\n[train]\nbatch = 8\nmicrobatch = 1\n'
        '[device]\nexecutor = "emulated"\nemulated_s = "50 ms"\nemulated_values = 20000\n'
        '[network]\ndelay_s = "5 ms"\nbandwidth_Bps = "200 Mbit/s"\n'
    )
    assert program.main(["plan", "lab.toml", "--out", "plan.json"]) == 0
    stages = json.loads(Path("plan.json").read_text())["stages"]
    assert program.main(["run", "lab.toml", "--plan", "plan.json"]) == 0
    assert "the plan predicted" in capsys.readouterr().out
    assert configuration.load("runs/lab/config.toml").run.stages == len(stages)


def test_a_run_says_that_its_activation_store_is_too_small_before_it_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_plan(msgspec.structs.replace(EVEN, boundary_bytes=1000.0), "plan.json")
    Path("run.toml").write_text("[model]\nlayers = 6\n[run]\ninflight = 4\n[network]\nactivation_store_bytes = 15999\n")
    for words, wanted_text in (
        (["--plan", "plan.json"], "tensors of 1000 bytes"),
        (["run.stages=2"], "tensors of 262144 bytes"),
    ):
        assert program.main(["run", "run.toml", *words, "--here", "99"]) == ExitCode.USER_ERROR, "nothing is started"
        err = capsys.readouterr().err
        assert "warning: network.activation_store_bytes = 15999 holds" in err and wanted_text in err
    assert (
        program.main(["run", "run.toml", "--plan", "plan.json", "network.activation_store_bytes=16000", "--here", "99"])
        != 0
    )
    assert "warning" not in capsys.readouterr().err


def test_what_the_plan_chose_beside_places_reaches_the_run() -> None:
    coded = msgspec.structs.replace(EVEN, activations="int4", gradients="int8", averaging="bf16")
    network = configuration.load(None, plan_settings.decided(coded, "plan.json")).network
    assert (network.activations, network.gradients, network.averaging) == ("int4", "int8", "bf16")
    kept = configuration.load(None, ["network.activations=int8", *plan_settings.decided(EVEN, "plan.json")])
    assert kept.network.activations == "int8"


def test_local_steps_of_a_plan_keep_the_run_as_long() -> None:
    stages = (StagePlan(0, 6, ("a", "b")),)
    local = msgspec.structs.replace(EVEN, stages=stages, predicted=None, local_steps=8)
    settings = ["run.steps=100", "checkpoint.every=20", "train.batch=64", "train.microbatch=4"]
    train = plan_settings.load(None, settings, local, "plan.json")
    assert (train.train.local_steps, train.run.steps, train.checkpoint.every) == (8, 13, 3)
    same = plan_settings.load(None, [*settings, "train.local_steps=8"], local, "plan.json")
    assert (same.train.local_steps, same.run.steps, same.checkpoint.every) == (8, 100, 20)


def test_a_rehearsal_encodes_tensors_of_the_planned_number_of_values() -> None:
    """2,000 values as int8 are what the plan counted; the peer makes them whole and encodes them itself."""
    peers = tuple(PeerPlan(name, 0.1, 0.2) for name in ("a", "b", "c"))
    plan = msgspec.structs.replace(
        EVEN, peers=peers, boundary_bytes=2000 * (1 + 4 / 1024), activations="int8", gradients="int8"
    )
    words = ["device.executor=emulated", "device.emulated_s=0"]
    config = plan_settings.load(None, words, plan, "plan.json")
    assert plan_settings.of_seat(config, plan, 0, None).device.emulated_values == 2000
