"""`shoal plan`: what it prints, writes, checks and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from shoal.cli import main as program
from shoal.config import load
from shoal.exit_codes import ExitCode
from shoal.launcher.planning import problem as planning_problem
from shoal.model import analysis
from shoal.planner.strategy.plan import load as load_plan

CLUSTER = """
[link]
delay_s = "20 ms"
bandwidth_Bps = "200 Mbit/s"
[[device]]
name = "gpu"
count = 4
flops = "10 TFLOP/s"
memory_bytes = "24 GB"
price_per_h = 0.25
"""
CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture
def cluster(tmp_path: Path) -> str:
    file = tmp_path / "cluster.toml"
    file.write_text(CLUSTER)
    return str(file)


def call(*words: str) -> int:
    return program.main(["plan", *words])


def test_the_plan_is_a_table_marked_as_predicted(cluster: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(str(CONFIGS / "four-machines.toml"), "--cluster", cluster) == 0
    words = capsys.readouterr().out
    for word in ("predicted", "step ", "tokens ", "24.00 a day", "bottleneck", "next best", "run.stages="):
        assert word in words


def test_a_model_is_planned_by_the_configuration_in_its_directory_alone(
    cluster: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its weights are not needed, which `shoal run` refuses to do without."""
    fields = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 96,
        "vocab_size": 256,
    }
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 128, **fields}))
    assert call(f"model.path={tmp_path}", "tune.method=lora", "tune.rank=4", "run.stages=2", "--cluster", cluster) == 0
    adapters = 2 * 4 * (4 * (64 + 64) + 3 * (64 + 96))
    assert f"quickstart: {adapters:,} parameters, 2 blocks" in capsys.readouterr().out
    assert program.main(["train", f"model.path={tmp_path}"]) == 2
    assert "has no model.safetensors" in capsys.readouterr().err


def test_who_owns_what_of_a_round_is_told_where_it_follows_the_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = {"one": 50, "two": 100, "three": 100, "four": 200}  # Mbit/s
    machine = '[[device]]\nname = "{}"\nup_Bps = "{} Mbit/s"\ndown_Bps = "{} Mbit/s"\nflops = "10 GFLOP/s"\n'
    text = '[link]\ndelay_s = "20 ms"\nbandwidth_Bps = "1 Gbit/s"\n'
    file = tmp_path / "unlike.toml"
    file.write_text(text + "".join(machine.format(name, width, width) for name, width in lines.items()))
    words = [str(CONFIGS / "quickstart.toml"), "--cluster", str(file), "--stages", "1"]
    assert call(*words) == 0
    output = capsys.readouterr().out
    assert "owners        of stage 0's rounds, by their lines: one 0%, two 12%, three 12%, four 75%" in output


def test_the_model_is_counted_and_where_it_cannot_be_the_plan_says_so(
    cluster: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    quickstart = str(CONFIGS / "quickstart.toml")
    assert call(quickstart, "--cluster", cluster) == 0
    assert "counted on the meta device; FLOP/s stated" in capsys.readouterr().out

    def cannot(_: object) -> object:
        raise ValueError("block 3 cannot be counted without values")

    monkeypatch.setattr(analysis, "count", cannot)
    assert call(quickstart, "--cluster", cluster) == 0
    words = capsys.readouterr()
    assert "by formula for a plain decoder; FLOP/s stated" in words.out
    assert "block 3 cannot be counted without values" in words.err


def test_a_counted_microbatch_of_another_size_is_what_counting_it_says() -> None:
    tree = load(CONFIGS / "quickstart.toml")
    small, large = analysis.count(tree), analysis.count(load(CONFIGS / "quickstart.toml", ["train.microbatch=8"]))
    grown = small.of_size(8 / tree.train.microbatch)
    assert grown.boundary_bytes == large.boundary_bytes and grown.tokens_bytes == large.tokens_bytes
    for one, other in zip(grown.parts, large.parts, strict=True):
        assert (one.parameters, one.flops) == (other.parameters, other.flops)
        assert one.activation_bytes == pytest.approx(other.activation_bytes, rel=0.01)


def test_a_plan_is_written_checked_and_found_wrong_for_another_model(
    cluster: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, out = str(CONFIGS / "four-machines.toml"), str(tmp_path / "plan.json")
    assert call(config, "--cluster", cluster, "--out", out, "--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert record["predicted"]["tokens_per_s"] > 0
    assert json.loads(Path(out).read_text())["stages"] == record["stages"]
    assert call(config, "--cluster", cluster, "--check", out) == 0
    assert "the plan can run" in capsys.readouterr().out
    assert call(config, "model.layers=12", "--cluster", cluster, "--check", out) == 1
    assert "for a model of 16 blocks, this one has 12" in capsys.readouterr().out


def test_a_lab_needs_no_cluster_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(str(CONFIGS / "lab.toml"), "--stages", "3", "--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert [len(stage["peers"]) for stage in record["stages"]] == [2, 2, 2]


def test_the_lines_of_a_lab_carry_no_more_than_they_can_and_little_less(capsys: pytest.CaptureFixture[str]) -> None:
    """8 MB over 3 stages of 2 at 200 Mbit/s: at best 25/8 microbatches per second."""
    words = ["train.batch=64", "device.emulated_values=2000000", "network.bandwidth_Bps=200 Mbit/s"]
    assert call(str(CONFIGS / "lab.toml"), *words, "--stages", "3", "--json") == 0
    rate = 64 / json.loads(capsys.readouterr().out)["predicted"]["microbatches_s"]
    assert 0.8 * 25 / 8 < rate <= 25 / 8


def test_what_if_and_sensitivity_compare_with_the_plan(cluster: str, capsys: pytest.CaptureFixture[str]) -> None:
    change = "bandwidth=2x, delay=5 ms, peers=6, speed=20 TFLOP/s, memory=2x, inflight=8, microbatches=2x"
    assert call(str(CONFIGS / "quickstart.toml"), "--cluster", cluster, "--what-if", change, "--sensitivity") == 0
    words = capsys.readouterr().out
    assert "what if" in words and "x the tokens" in words and "bandwidth x2" in words


@pytest.mark.parametrize(
    ("words", "output"),
    [
        (["--what-if", "luck=2x"], "'luck=2x' is no change; bandwidth, delay"),
        (["--what-if", "bandwidth=5 MHz"], "--what-if bandwidth: '5 MHz' has a unit that does not fit"),
        (["--what-if", "peers=0"], "--what-if peers: 0 must be at least 1"),
        (["--what-if", "bandwidth=0x"], "must be above 0"),
        (["--stages", "9"], "9 stages of a model"),
    ],
)
def test_what_cannot_be_asked_is_refused_in_one_line(
    cluster: str, capsys: pytest.CaptureFixture[str], words: list[str], output: str
) -> None:
    assert call(str(CONFIGS / "quickstart.toml"), "--cluster", cluster, *words) == ExitCode.USER_ERROR
    assert output in capsys.readouterr().err


def test_without_machines_it_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(str(CONFIGS / "quickstart.toml")) == ExitCode.USER_ERROR
    assert "name them with --cluster FILE" in capsys.readouterr().err


@pytest.mark.parametrize("search", ["anneal", "dtfm", "random", "greedy"])
def test_dtfms_own_problem_is_searched_and_told(search: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--dtfm", "spot", "--stages", "8", "--replicas", "8", "evaluations=40", "seed=3", "--search", search]
    assert call(*words, "--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert record["total_s"] == pytest.approx(record["data_parallel_s"] + record["pipeline_s"])
    assert record["total_s"] >= record["lower_bound_s"] == pytest.approx(31.6342, abs=1e-4)
    assert sorted(record["order"]) == list(range(8)) and record["evaluations"] <= 40
    assert call(*words) == 0
    assert "s an iteration" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "output"),
    [
        (["--dtfm", "nowhere"], "comes along: aws10"),
        (["--dtfm", "spot", "--stages", "7"], "64 devices do not divide into 7 stages of equal size; try 1, 2, 4, 8"),
        (["--dtfm", "spot", "--replicas", "9"], "8 stages of 9 are not the network's 64 devices"),
        (["--dtfm", "spot", "luck=9"], "'luck=9' does not go with --dtfm"),
    ],
)
def test_a_search_that_cannot_be_is_refused(capsys: pytest.CaptureFixture[str], words: list[str], output: str) -> None:
    assert call(*words) == ExitCode.USER_ERROR
    assert output in capsys.readouterr().err


def test_the_shape_of_a_model_directory_is_read_from_its_config(tmp_path: Path) -> None:
    fields = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 96,
        "vocab_size": 99,
    }
    (tmp_path / "config.json").write_text(json.dumps(fields))
    read_shape = planning_problem.shape(load(None, [f"model.path={tmp_path}"]))
    assert (read_shape.hidden, read_shape.layers, read_shape.kv_heads, read_shape.head_dim, read_shape.tied) == (
        64,
        2,
        4,
        16,
        False,
    )
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 64}))
    with pytest.raises(ValueError, match="lacks 'num_attention_heads'"):
        planning_problem.shape(load(None, [f"model.path={tmp_path}"]))


def test_dtfms_own_problem_wants_a_link_for_every_pair(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bandwidth = np.ones((4, 4))
    bandwidth[1, 2] = 0
    np.savez(tmp_path / "holes.npz", delay_ms=np.ones((4, 4)), bandwidth_gbps=bandwidth)
    assert call("--dtfm", str(tmp_path / "holes.npz"), "--stages", "2") == 2
    assert "no bandwidth from 1 to 2; every pair must be connected" in capsys.readouterr().err


def test_machines_that_are_taken_away_show_in_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "spot.toml"
    file.write_text(CLUSTER + "losses_per_h = 0.5\n")
    assert call(str(CONFIGS / "four-machines.toml"), "--cluster", str(file)) == 0
    assert "churn         2 losses an hour cost" in capsys.readouterr().out


def test_an_activation_store_too_small_for_the_planned_stages_is_told(
    cluster: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(CONFIGS / "quickstart.toml"), "--cluster", cluster, "--stages", "2", "run.inflight=4"]
    assert call(*words) == 0
    output = capsys.readouterr()
    assert "warning" not in output.err and "kept of a step" in output.out
    tensor_bytes = 4 * 4 * 128 * 128  # microbatch, sequence, hidden size, fp32
    assert call(*words, f"network.activation_store_bytes={16 * tensor_bytes - 1}") == 0
    output = capsys.readouterr()
    assert f"holds 15 boundary tensors of {tensor_bytes} bytes" in output.err
    assert f"try network.activation_store_bytes={16 * tensor_bytes}" in output.err, "2 * stages * inflight"
    assert call(*words, f"network.activation_store_bytes={16 * tensor_bytes}") == 0
    assert "warning" not in capsys.readouterr().err


def test_with_local_steps_a_step_of_the_run_has_the_microbatches_of_all_of_them() -> None:
    tree = load(CONFIGS / "quickstart.toml", ["run.stages=1", "train.local_steps=6", "run.peers=4"])
    assert planning_problem.work(tree).microbatches == 6 * tree.train.batch // tree.train.microbatch


@pytest.mark.slow
def test_what_is_allowed_is_priced_printed_and_written_and_nothing_else_is_chosen(
    cluster: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    words = [str(CONFIGS / "four-machines.toml"), "--cluster", cluster, "--stages", "2", "--out", str(out)]
    assert call(*words) == 0
    assert "none there, none back; averaging every step, none: as configured" in capsys.readouterr().out
    assert call(*words, 'plan.allow=["int8"]') == 0
    output = capsys.readouterr().out
    assert "boundary    int8 there, int8 back: " in output and "averaging   int8: " in output and "(taken)" in output
    assert load_plan(out).averaging == "int8"
    assert call(*words, 'plan.allow=["int2"]') == ExitCode.USER_ERROR
    assert "must be a list of 'bf16', 'int8', 'int4', 'local_steps'" in capsys.readouterr().err
