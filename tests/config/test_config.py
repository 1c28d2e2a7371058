"""The configuration: what is read, what is refused and in which words, and that what is printed reads back."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal import config
from shoal.config import Config, Run, Train
from shoal.config.describe import Key, keys

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))


def refusal(*overrides: str) -> str:
    with pytest.raises(ValueError) as caught:
        config.load(None, overrides)
    return str(caught.value)


def test_the_defaults_are_a_run_that_can_be_started() -> None:
    assert config.load() == Config()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_of_the_project_loads(path: Path) -> None:
    assert config.load(path).run.name == path.stem


def test_the_project_has_configs() -> None:
    assert len(CONFIGS) >= 3


def test_arguments_win_over_the_file_and_the_file_over_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text('[run]\nsteps = 7\nseed = 3\n[network]\nbandwidth_Bps = "200 Mbit/s"\n')
    tree = config.load(path, ["run.steps=9", "network.delay_s=80 ms", "network.max_tensor_bytes=64 MiB"])
    assert (tree.run.steps, tree.run.seed, tree.run.stages) == (9, 3, 3)
    assert (tree.network.bandwidth_Bps, tree.network.delay_s) == (25e6, 0.08)
    assert tree.network.max_tensor_bytes == 64 << 20
    assert isinstance(tree.network.max_tensor_bytes, int)


def test_an_argument_is_read_as_its_field_says() -> None:
    tree = config.load(
        None, ["run.name=7", "train.betas=[0.8, 0.9]", "checkpoint.at_end=false", "train.clip=1", "model.extra.rope_theta=1e4"]
    )  # fmt: skip
    assert tree.run.name == "7"
    assert tree.train.betas == (0.8, 0.9)
    assert tree.checkpoint.at_end is False
    assert tree.train.clip == 1.0
    assert tree.model.extra == {"rope_theta": 1e4}


def test_an_unknown_key_is_refused_with_its_path_and_a_suggestion() -> None:
    assert refusal("train.microbach=4") == "train.microbach is not a setting; did you mean train.microbatch?"
    assert refusal("learning_rate=1") == "learning_rate is not a setting; did you mean train.learning_rate?"
    assert refusal("rum.steps=1") == "rum is not a setting; did you mean run?"
    assert "has run, model, data" in refusal("zzz.steps=1")


def test_a_complaint_about_a_file_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text("[train]\nbatsh = 3\n")
    with pytest.raises(ValueError, match=r"my\.toml: train\.batsh is not a setting; did you mean train\.batch\?"):
        config.load(path)
    path.write_text("[train\n")
    with pytest.raises(ValueError, match=r"my\.toml is not TOML"):
        config.load(path)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("run.steps=many", "run.steps = 'many' must be a whole number"),
        ("run.steps=1.5", "run.steps = 1.5 must be a whole number"),
        ("run.steps=true", "run.steps = True must be a whole number"),
        ("train.clip=true", "train.clip = True must be a number"),
        ("train.clip=nan", "train.clip = nan is not a finite number"),
        ("train.clip=inf", "train.clip = inf is not a finite number"),
        ("train.betas=[0.9]", "train.betas = [0.9] must be a list of 2 numbers, such as [0.9, 0.95]"),
        ("checkpoint.at_end=1", "checkpoint.at_end = 1 must be true or false"),
        ("train.schedule=cosin", "train.schedule = 'cosin' must be 'cosine' or 'linear' or 'constant'; did you mean 'cosine'?"),
        ("run.heartbeat_s=80 MB", "run.heartbeat_s: '80 MB' has a unit that does not fit here; try \"80 ms\" or \"2 min\""),
        ("run=5", "run = 5 is a value; it must be a section [run]"),
        ("run.steps", "'run.steps' is not a setting; write section.field=value, such as run.steps=100"),
    ],
)  # fmt: skip
def test_a_wrong_type_is_refused_saying_where_what_and_what_would_do(override: str, words: str) -> None:
    assert refusal(override) == words


@pytest.mark.parametrize("name", ["float16", "fp16", "half"])
def test_float16_is_refused_with_what_to_use_on_which_card_and_what_it_costs(name: str) -> None:
    words = refusal(f"train.dtype={name}")
    assert words.startswith(f"train.dtype = {name!r} is not there: its gradients vanish without loss scaling")
    assert "train.dtype=float32 on a T4 or V100: products at an eighth of their float16 rate" in words


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.microbatch=5", "train.microbatch = 5 does not divide train.batch = 64; try 4"),
        ("run.layers=[2, 4]", "run.layers = [2, 4] must be one number for each of run.stages = 3; try run.layers=[]"),
        (
            "run.layers=[2, 2, 1]",
            "run.layers = [2, 2, 1] is 5 blocks together, but model.layers = 6; try run.layers=[]",
        ),
        ("run.stages=9", "run.stages = 9 is more than model.layers = 6; try 6 or fewer"),
        ("run.peers=2", "run.peers = 2 cannot serve run.stages = 3; try 3 peers or more"),
        ("model.heads=5", "model.heads = 5 does not divide model.hidden_size = 128; try 4"),
        ("model.kv_heads=3", "model.kv_heads = 3 does not divide model.heads = 4; try 2"),
        ("model.vocab_size=100", "model.vocab_size = 100 does not cover data.tokenizer = 'bytes'; try 256"),
        ("run.name=../x", "run.name = '../x' cannot name a directory; try letters, digits, '-', '_' and '.'"),
        ("run.heartbeat_timeout_s=1 s", "run.heartbeat_timeout_s = 1.0 is under three times run.heartbeat_s = 0.5; try 4.0"),
        ("data.source=text", "data.path is empty, but data.source = 'text' reads it; name a file, directory or glob"),
        ("network.port=70000", "network.port = 70000 is out of range; try 0 to 65_535"),
        ("train.learning_rate=0", "train.learning_rate = 0 is out of range; try above 0 to 100"),
        ("network.max_tensor_bytes=1 KiB", "network.max_tensor_bytes = 1024 refuses boundary tensors of 264192 bytes; try 264192 or more"),
        ("train.betas=[1, 0.9]", "train.betas[0] = 1 is out of range; try 0 to below 1"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_together_are_refused_with_one_that_would(override: str, words: str) -> None:
    assert refusal(override).startswith(words), "what follows from it may be said too"


@pytest.mark.parametrize(
    ("settings", "ignored"),
    [
        (["model.path=there", "model.layers=12"], "model.layers = 12"),
        (["model.path=there", "model.family=qwen3"], "model.family = 'qwen3'"),
        (["model.path=there", "model.vocab_size=512"], "model.vocab_size = 512"),
        (["data.path=texts"], "data.path = 'texts'"),
        (["data.source=text", "data.path=texts", "data.field=body"], "data.field = 'body'"),
        (["data.source=jsonl", "data.path=texts", "data.split=test"], "data.split = 'test'"),
        (["train.schedule=constant", "train.final_ratio=0.5"], "train.final_ratio = 0.5"),
        (["train.outer_learning_rate=0.5"], "train.outer_learning_rate = 0.5"),
        (["train.local_batch=4"], "train.local_batch = 4"),
        (["run.lost_stage=wait", "run.lost_stage_wait_s=9"], "run.lost_stage_wait_s = 9.0"),
        (["device.emulated_s=1"], "device.emulated_s = 1.0"),
        (["device.executor=emulated", "device.memory_bytes=1"], "device.memory_bytes = 1"),
        (["network.up_Bps=1e6", "network.down_Bps=1e6", "network.bandwidth_Bps=1e7"], "network.bandwidth_Bps = 1"),
        (["checkpoint.every=0", "checkpoint.at_end=false", "checkpoint.keep=5"], "checkpoint.keep = 5"),
    ],
)  # fmt: skip
def test_a_setting_without_effect_is_refused_with_the_reason(settings: list[str], ignored: str) -> None:
    said = refusal(*settings)
    path = ignored.partition(" ")[0]
    assert said.startswith(ignored)
    assert " has no effect: " in said
    assert said.endswith(f"; leave {path} out")
    config.load(None, [word for word in settings if not word.startswith(f"{path}=")])


@pytest.mark.parametrize("form", ["chat", "prompt", "preference"])
def test_rows_are_read_from_json_lines_unless_another_source_is_named(form: str) -> None:
    words = [f"data.format={form}", "data.path=rows.jsonl", "model.path=llama", "tune.method=lora"]
    assert config.load(None, words).data.source == "jsonl"
    assert config.load(None, [*words, "data.source=huggingface"]).data.source == "huggingface"
    with pytest.raises(ValueError, match=r"reads rows, and data\.source = 'text' has none"):
        config.load(None, [*words, "data.source=text"])


def test_a_chat_is_written_by_the_tokenizer_of_the_model_that_is_tuned_unless_another_is_named() -> None:
    words = ["data.format=chat", "data.path=rows.jsonl"]
    assert config.load(None, [*words, "model.path=llama"]).data.tokenizer == "llama"
    assert config.load(None, [*words, "model.path=llama", "data.tokenizer=qwen"]).data.tokenizer == "qwen"
    for rest in ([], ["model.path=llama", "data.tokenizer=bytes"]):
        with pytest.raises(ValueError, match="needs a tokenizer with a chat template"):
            config.load(None, [*words, *rest])
    assert config.load(None, ["model.path=llama"]).data.tokenizer == "bytes"


def test_a_size_is_set_in_one_place() -> None:
    said = refusal("model.extra.num_hidden_layers=12")
    assert said == "model.extra.num_hidden_layers = 12 has a setting of its own; write model.layers = 12 instead"
    config.load(None, ["model.path=there", "model.extra.num_hidden_layers=12"])


def test_what_a_planner_may_still_decide_is_not_without_effect() -> None:
    config.load(None, ["train.outer_learning_rate=0.5", 'plan.allow=["local_steps"]'])
    config.load(None, ["run.stages=1", "network.activations=int8"])


def test_an_emulated_tensor_must_pass_the_limit_too() -> None:
    lab = ("device.executor=emulated", "device.emulated_values=1000")
    assert config.load(None, [*lab, "network.max_tensor_bytes=4000"]).network.max_tensor_bytes == 4000
    assert refusal(*lab, "network.max_tensor_bytes=3999").endswith(
        "refuses boundary tensors of 4000 bytes; try 4000 or more"
    )


def test_a_tree_made_in_python_is_checked_like_any_other() -> None:
    config.validate(Config(run=Run(steps=3)))
    with pytest.raises(ValueError, match="does not divide"):
        config.validate(Config(train=Train(microbatch=5)))
    wrong: Any = "3"
    with pytest.raises(ValueError, match=r"run\.steps = '3' must be a whole number"):
        config.validate(Config(run=Run(steps=wrong)))


def test_the_printed_tree_reads_back_as_the_same_configuration() -> None:
    tree = config.load(
        None,
        ['data.tokenizer=a "quoted" \\ path', "model.extra.a=true", "model.extra.b='x y'", "run.heartbeat_s=80 ms", "train.epsilon=1e-12"],
    )  # fmt: skip
    assert config.from_tree(tomllib.loads(config.text(tree))) == tree


def test_every_setting_is_printed_below_its_description_and_beside_what_it_takes() -> None:
    lines = config.text(Config()).splitlines()
    assert "stages = 3  # 1 to 4_096" in lines
    assert 'schedule = "cosine"  # cosine | linear | constant' in lines
    assert 'trace_bytes = "256 MiB"  # 0 B to 1024 TiB' in lines
    for section in config.to_tree(Config()):
        assert f"[{section}]" in lines
    for key in keys().values():
        place = next(at for at, line in enumerate(lines) if line == f"# {key.description}")
        assert lines[place + 1].startswith(f"{key.name} = ")


def test_plain_dictionaries_carry_a_configuration_from_peer_to_peer() -> None:
    tree = config.load(None, ["run.seed=5", "train.betas=[0.8, 0.9]"])
    assert config.from_tree(msgspec.json.decode(msgspec.json.encode(config.to_tree(tree)))) == tree


def test_the_machines_are_told_what_the_tree_says() -> None:
    tree = config.load(
        None, ["run.steps=50", "run.ready_timeout_s=9 s", "checkpoint.every=5", "checkpoint.at_end=false"]
    )
    settings = config.settings(tree, first_step=10)
    assert (settings.stages, settings.microbatches, settings.steps, settings.first_step, settings.peers) == (
        3,
        16,
        50,
        10,
        6,
    )
    assert (settings.save_every, settings.save_last, settings.ready_timeout_s) == (5, False, 9.0)


@pytest.mark.parametrize("key", [key for key in keys().values() if key.choices], ids=lambda key: key.path)
def test_every_choice_is_accepted(key: Key) -> None:
    for choice in key.choices:
        name = {"python": [], "dataset": ["data.factory=there:samples"]}.get(choice, ["data.path=there"])
        beside = name if key.path == "data.source" else []
        beside += ["model.path=there"] if choice == "lora" else []
        beside += ["tune.method=lora", "model.path=there"] if choice == "nf4" else []
        if key.path == "data.format" and choice != "text":
            beside = ["data.path=there", "data.source=jsonl", "data.tokenizer=there"]
            beside += ["tune.method=lora", "model.path=there"] if choice == "preference" else []
        beside += ["run.peers=9"] if choice == "clip" else []
        config.load(None, [f"{key.path}={choice}", *beside])


SEATED = ("run.stages=2", "run.peers=3", "run.placement={a = 0, b = 1, c = 1}")


def test_a_plans_seats_and_routes_reach_the_machines() -> None:
    tree = config.load(None, [*SEATED, "run.routes=[[[0], [1, 2]], [[0], [1]], [[0], [2]]]", "device.machine=c"])
    settings = config.settings(tree)
    assert (settings.seat, settings.seats) == (2, (0, 1, 1))
    one = ["run.stages=1", "run.peers=2", "run.placement={a = 0, b = 0}"]
    assert config.settings(config.load(None, one)).home
    assert not config.settings(config.load(None, [*one, "run.routes=[[[0]], [[0, 1]]]"])).home, "the plan shares it out"
    assert settings.routes == (((0,), (1, 2)), ((0,), (1,)), ((0,), (2,)))
    assert config.settings(config.load(None, SEATED)).seat == -1
    assert config.from_tree(tomllib.loads(config.text(tree))) == tree


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("device.machine=d", "device.machine = 'd' is no machine of run.placement; try "),
        ("run.placement={a = 0, b = 2}", "must serve all stages from 0 to 1 and no other"),
        ("run.routes=[[[0], [0]], [[0], [1]], [[0], [2]]]", "run.routes[0] = [[0], [0]] must name seats 0 to 2"),
        ("run.routes=[[[0], [1]]]", "there is one entry for each seat"),
        ("run.routes=[[[0], []], [[0], [1]], [[0], [2]]]", "run.routes[0] = [[0], []]"),
        ("run.routes=[[[0], [7]], [[0], [1]], [[0], [2]]]", "run.routes[0] = [[0], [7]]"),
        ("run.line_rates=[100, 100]", "run.line_rates = [100, 100] must be one number for each of 3 run.placement"),
        ("run.line_rates=[100, 100, -1]", "run.line_rates[2] = -1 is out of range; try 0 to"),
    ],
)
def test_a_plan_that_does_not_fit_its_run_is_refused(override: str, words: str) -> None:
    assert words in refusal(*SEATED, override)


def test_routes_without_seats_and_links_by_host_over_libp2p_are_refused() -> None:
    assert "run.routes without run.placement" in refusal("run.routes=[[[0]]]")
    assert "run.line_rates without run.placement" in refusal("run.line_rates=[100]")
    links = 'network.links={"127.0.0.2" = [0.1, 1e6]}'
    assert "try network.transport=tls" in refusal(links, "network.transport=libp2p")
    assert config.load(None, [links]).network.links == {"127.0.0.2": (0.1, 1e6)}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            ["train.staleness=1"],
            "which train.staleness = 1 has not; try train.staleness=0, or `shoal eval` on checkpoints",
        ),
        (
            ["train.local_steps=4", "run.stages=1"],
            "and in train.local_steps = 4 each replica has its own; try `shoal eval` on checkpoints",
        ),
        (["device.executor=swapping"], "and device.executor = 'swapping'; try `shoal eval` on checkpoints"),
        (["device.count=2"], "and device.count = 2; try `shoal eval` on checkpoints"),
    ],
)
def test_held_out_text_that_could_not_be_measured_is_refused_before_the_start(settings: list[str], words: str) -> None:
    assert words in refusal("eval.path=held.txt", *settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            ["run.peers=8"],
            "run.robust = 'clip' compares 3 replicas or more of each stage, and run.peers = 8 are 2 for each of run.stages = 3;"
            " try run.peers=9 or run.robust=none",
        ),
        (["run.peers=49"], "bounds the parts of 16 replicas of a stage at most, and run.peers = 49 are more for each of run.stages = 3"),
        (
            ["run.peers=9", 'run.placement={"a"=0,"b"=0,"c"=0,"d"=1,"e"=1,"f"=2,"g"=2,"h"=2,"i"=2}'],
            "and run.placement gives stage 1 only 2; try another plan or run.robust=none",
        ),
        (["run.peers=4", "run.stages=1", "train.local_steps=4"], "which train.local_steps = 4 has none of; try run.robust=none"),
    ],
)  # fmt: skip
def test_bounds_of_parts_that_nobody_could_hold_are_refused(settings: list[str], words: str) -> None:
    assert words in refusal("run.robust=clip", *settings)


def test_bounds_of_parts_are_taken_where_every_stage_has_three_replicas() -> None:
    tree = config.load(None, ["run.robust=clip", "run.peers=9"])
    assert config.settings(tree).robust == "clip"
    assert "'trim'" in refusal("run.robust=trim")


def test_a_swapping_stage_is_not_asked_to_serve_texts() -> None:
    assert "device.executor = 'swapping' serves no texts" in refusal("run.serve=true", "device.executor=swapping")
    assert "device.executor = 'swapping'; try `shoal generate`" in refusal(
        'eval.prompts=["a"]', "device.executor=swapping"
    )
