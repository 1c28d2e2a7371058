"""LoRA adapters in a cut model: those of the whole, beside frozen weights, and what PEFT reads of them."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest
import torch
from tests.chats import END, IDS, TURN, a_tokenizer
from tests.runtime.test_node import TINY
from torch import Tensor

import shoal
from shoal import config as configuration
from shoal.cli import export
from shoal.cli import main as program
from shoal.config import Config, Model, Tune
from shoal.core.messages import Import
from shoal.executor import create, fit
from shoal.launcher.files import saved
from shoal.model import analysis, stages
from shoal.model.layers import adapters, nf4
from shoal.runtime.checkpoints import checkpoint, marker
from shoal.runtime.tasks.seat import Copy, Download, _note, _whole

TOKENS = torch.randint(0, 256, (2, 9), generator=torch.Generator().manual_seed(1))


def based(config: Config, base: Path, **tune: object) -> Config:
    if not base.exists():
        stages.whole(config).save_pretrained(base)
    lora = msgspec.structs.replace(Tune(method="lora", rank=2, alpha=64.0), **tune)
    return msgspec.structs.replace(config, model=Model(path=str(base)), tune=lora)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return based(TINY, tmp_path / "base")


def same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.detach().view(torch.uint8), other.detach().view(torch.uint8))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tune", [{}, {"rslora": True}, {"dora": True}, {"targets": ("q_proj", "down_proj")}])
def test_stages_train_the_adapters_of_the_whole_and_hold_the_weights_of_the_base(
    config: Config, dtype: str, tune: dict[str, object]
) -> None:
    config = msgspec.structs.replace(
        config,
        train=msgspec.structs.replace(config.train, dtype=dtype),
        tune=msgspec.structs.replace(config.tune, **tune),
    )
    whole = dict(stages.whole(config).named_parameters())
    names = []
    for stage in range(2):
        built, hollow = stages.build(config, stage), stages.hollow(config, stage)
        assert [name for name, _ in hollow.named_parameters()] == [name for name, _ in built.named_parameters()]
        for name, value in built.named_parameters():
            assert value.dtype == torch.float32 and same(value, whole[name])
            names.append(name)
        assert all(str(value.dtype) == f"torch.{dtype}" for value in built.frozen())
        assert fit.stage_bytes(hollow, config) == fit.stage_bytes(built, config) > fit.frozen_bytes(built)
    assert names == [name for name, value in whole.items() if value.requires_grad]
    assert all("lora_" in name for name in names)
    targets = config.tune.targets
    assert not targets or all(any(target in name for target in targets) for name in names)


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_frozen_weights_in_four_bits_compute_what_bitsandbytes_and_peft_compute(config: Config, dtype: str) -> None:
    torch.manual_seed(3)
    bnb, peft = pytest.importorskip("bitsandbytes"), pytest.importorskip("peft")
    train = msgspec.structs.replace(config.train, dtype=dtype)
    plain = msgspec.structs.replace(config, train=train)
    config = based(plain, Path(config.model.path), quantize="nf4")
    whole, reference = stages.whole(config), stages.whole(msgspec.structs.replace(plain, tune=Tune()))
    kind = torch.float32 if dtype == "float32" else torch.bfloat16
    reference.to(kind)
    encoded = 0
    for name, module in list(reference.named_modules()):
        if type(module) is torch.nn.Linear and name != "lm_head":
            theirs = bnb.nn.Linear4bit(
                module.in_features, module.out_features, False, kind, compress_statistics=False, quant_type="nf4"
            )
            theirs.load_state_dict(module.state_dict())
            owner, _, leaf = name.rpartition(".")
            setattr(reference.get_submodule(owner), leaf, theirs.to("cpu"))
            encoded += module.weight.numel()
    lora = adapters.settings(config.tune)
    reference = peft.inject_adapter_in_model(
        lora, reference.train()
    )  # in eval bitsandbytes packs the weights otherwise
    reference.enable_input_require_grads()  # else bitsandbytes computes the first layer otherwise
    trained = dict(whole.named_parameters())
    for name, value in reference.named_parameters():
        if value.requires_grad:
            value.data = trained[name].data.clone().uniform_(-0.1, 0.1)
            trained[name].data = value.data.clone()
    ours = whole(input_ids=TOKENS, labels=TOKENS).loss
    loss = reference(input_ids=TOKENS, labels=TOKENS).loss
    assert abs(float(ours) / float(loss) - 1) < (1e-6 if dtype == "float32" else 1e-4)  # sums of layers round elsewhere
    ours.backward()
    loss.backward()
    for name, value in reference.named_parameters():
        if value.requires_grad:
            error = (value.grad - trained[name].grad).norm() / value.grad.norm()
            # bfloat16 has 8 bits, and each kind of CPU adds in an order of its own: 0.051 was seen; a wrong one is near 1
            assert error < (1e-5 if dtype == "float32" else 0.1), (name, error)
    stage = stages.build(config, 1)
    plain_bytes = fit.frozen_bytes(stages.build(plain, 1))
    last = stages.build(config, 1).model.lm_head.weight.nbytes
    assert fit.frozen_bytes(stage) == fit.frozen_bytes(stages.hollow(config, 1)) < (plain_bytes - last) * 0.32 + last
    assert sum(part.frozen_bytes for part in analysis.count(config).parts) == sum(
        value.nbytes for value in adapters.frozen(whole)
    )
    assert encoded and create(config, 0).base != create(plain, 0).base


def test_weights_in_four_bits_need_a_library(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    config = based(config, Path(config.model.path), quantize="nf4")
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", None)
    nf4.library.cache_clear()
    with pytest.raises(ValueError, match="needs bitsandbytes"):
        stages.hollow(config, 0)
    nf4.library.cache_clear()


def test_a_frozen_matrix_is_tied_across_stages(tmp_path: Path) -> None:
    model = msgspec.structs.replace(TINY.model, tied_embeddings=True)
    one = msgspec.structs.replace(TINY, model=model, run=msgspec.structs.replace(TINY.run, stages=1))
    tied = msgspec.structs.replace(based(one, tmp_path / "tied"), run=TINY.run)
    whole, x = stages.whole(tied), TOKENS[:, :8]
    assert whole.lm_head.weight is whole.model.embed_tokens.weight
    first, last = (stages.build(tied, stage) for stage in range(2))
    assert torch.equal(last.forward(first.forward(x)), whole(x).logits)
    for stages_, spans in ((2, [range(1), range(1, 2)]), (1, [range(2)])):
        config = msgspec.structs.replace(tied, run=msgspec.structs.replace(TINY.run, stages=stages_))
        for stage, span in enumerate(spans):
            assert analysis.count(config).stage(span).frozen_bytes == fit.frozen_bytes(stages.build(config, stage))


def test_at_first_adapters_change_nothing(config: Config) -> None:
    x = TOKENS[:, :8]
    assert torch.equal(stages.whole(TINY)(x).logits, stages.whole(config)(x).logits)


def test_a_step_changes_the_adapters_alone(config: Config) -> None:
    first, last = (create(config, stage) for stage in range(2))
    before = [dict(stage._stage.model.named_parameters()) for stage in (first, last)]  # type: ignore[attr-defined]
    before = [{name: value.detach().clone() for name, value in values.items()} for values in before]
    x = TOKENS[:, :8]
    for step in range(2):  # at first the outer matrices are zero, so the inner ones get no gradient
        gradient, loss = last.backward(first.forward(x), None, TOKENS)
        assert loss is not None and first.backward(x, gradient, None) == (None, None)
        for stage in (first, last):
            stage.apply(stage.contribution(), 1.0, step)
            stage.zero(step + 1)
    for stage, values in zip((first, last), before, strict=True):
        for name, value in stage._stage.model.named_parameters():  # type: ignore[attr-defined]
            assert same(value, values[name]) != ("lora_" in name), name


def test_averaging_and_state_take_the_size_of_the_adapters(config: Config) -> None:
    stage, rank = create(config, 0), config.tune.rank
    width, inner, kv = TINY.model.hidden_size, TINY.model.intermediate_size, TINY.model.hidden_size // 2
    attention, mlp = 2 * (width + width) + 2 * (width + kv), 3 * (width + inner)
    assert stage.length == rank * (attention + mlp) < create(TINY, 0).length / 2
    assert sum(value.numel() for value in stage.state().values()) == 3 * stage.length


def test_the_planner_counts_frozen_weights_apart(config: Config) -> None:
    counted, plain = analysis.count(config), analysis.count(TINY)
    built = [stages.build(config, stage) for stage in range(2)]
    for stage, span in zip(built, (range(1), range(1, 2)), strict=True):
        profile = counted.stage(span)
        assert profile.parameters == sum(value.numel() for _, value in stage.named_parameters())
        assert profile.frozen_bytes == fit.frozen_bytes(stage)
        assert 0 < profile.back_flops < plain.stage(span).back_flops


def test_a_layer_that_no_stage_has_is_refused_with_what_was_named(config: Config) -> None:
    wrong = msgspec.structs.replace(config, tune=msgspec.structs.replace(config.tune, targets=("nosuch",)))
    with pytest.raises(ValueError, match=r"tune\.targets has 'nosuch', and the family 'llama' has no such layer"):
        stages.build(wrong, 0)


def test_experts_in_one_tensor_get_no_adapters(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="several experts in one tensor"):
        stages.build(based(mixed(2), tmp_path / "experts"), 0)
    assert list(stages.build(based(mixed(2), tmp_path / "experts", targets=("q_proj",)), 0).named_parameters())


def test_a_target_that_is_no_layer_is_refused_though_others_are(config: Config, tmp_path: Path) -> None:
    """PEFT leaves it out in silence where it finds another."""
    wrong = msgspec.structs.replace(config, tune=msgspec.structs.replace(config.tune, targets=("q_proj", "qq_proj")))
    with pytest.raises(ValueError, match=r"'qq_proj'.* 'llama' has no such layer; .* q_proj, k_proj, .*lm_head"):
        stages.hollow(wrong, 0)
    experts = based(mixed(4), tmp_path / "experts", targets=("q_proj", "gate_up_proj"))
    with pytest.raises(ValueError, match="'gate_up_proj', which is a tensor of several experts"):
        stages.hollow(experts, 0)


def test_experts_in_one_tensor_are_not_left_out_of_four_bits_in_silence(tmp_path: Path) -> None:
    config = based(mixed(4), tmp_path / "experts", targets=("q_proj",), quantize="nf4")
    with pytest.raises(
        ValueError,
        match=r"\d+% of the values in this model's blocks are elsewhere, such as model.layers.0.mlp.experts.",
    ):
        stages.hollow(config, 0)


def mixed(experts: int) -> Config:
    """Of a family that keeps the experts of a block in one tensor."""
    extra = {"num_local_experts": experts, "num_experts_per_tok": 1}
    return msgspec.structs.replace(TINY, model=msgspec.structs.replace(TINY.model, family="mixtral", extra=extra))


def test_adapters_of_another_base_are_not_loaded(config: Config, tmp_path: Path) -> None:
    other = msgspec.structs.replace(TINY, run=msgspec.structs.replace(TINY.run, seed=4))
    other = msgspec.structs.replace(based(other, tmp_path / "other"), run=config.run)
    here, there = create(config, 0), create(other, 0)
    assert here.base and here.base != there.base
    assert all(map(same, here.state().values(), there.state().values())) == (TINY.run.seed == other.run.seed)
    assert here.digest() != there.digest()
    for mine, fits in ((create(config, 0), True), (there, False)):
        copy, download = Copy(_whole(here), 3, _note(0, 3, here.base)), Download()
        manifest = copy.manifest()
        for chunk in range(copy.chunks):
            download._chunks[chunk] = torch.frombuffer(copy.read(chunk), dtype=torch.uint8)
        task = Import("s/i", 0, 3, len(manifest.hashes))
        if fits:
            download.load(mine, task)
        else:
            with pytest.raises(ValueError, match="belong to other frozen weights"):
                download.load(mine, task)


def test_peft_and_transformers_read_what_is_exported(config: Config, tmp_path: Path) -> None:
    import transformers
    from peft import PeftModel

    stage = [create(config, number) for number in range(2)]
    x = TOKENS[:, :8]
    for step in range(3):
        gradient, _ = stage[1].backward(stage[0].forward(x), None, TOKENS)
        stage[0].backward(x, gradient, None)
        for each in stage:
            each.apply(each.contribution(), 1.0, step)
            each.zero(step + 1)
    store = checkpoint.Store(str(tmp_path / "checkpoints"))
    records = [store.write_shard(3, number, 2, each.state()) for number, each in enumerate(stage)]
    path = Path(store.publish(3, records, checkpoint.about(config, "", "")))
    whole = stages.whole(saved.adapted(path), str(path))
    assert not torch.equal(whole(x).logits, stages.whole(config)(x).logits)
    assert torch.equal(shoal.Checkpoint(path).model()(x).logits, whole(x).logits)
    export.write_adapter(path, config, tmp_path / "adapter")
    base = transformers.AutoModelForCausalLM.from_pretrained(config.model.path)
    with_peft = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    torch.testing.assert_close(with_peft(x).logits, whole(x).logits)
    export.merge(path, config, tmp_path / "merged")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(merged(x).logits, whole(x).logits, rtol=1e-4, atol=1e-4)


def test_adapters_are_exported_to_any_storage_that_fsspec_knows(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import fsspec

    store = checkpoint.Store(str(tmp_path / "checkpoints"))
    records = [store.write_shard(1, number, 2, create(config, number).state()) for number in range(2)]
    path = store.publish(1, records, checkpoint.about(config, "", ""))
    assert program.main(["export", path, "--adapter", "memory://exported/adapter"]) == 0
    assert program.main(["export", path, "--adapter", str(tmp_path / "adapter")]) == 0
    memory = fsspec.filesystem("memory")
    names = {name.rpartition("/")[2] for name in memory.ls("/exported/adapter", detail=False)}
    assert names == {file.name for file in (tmp_path / "adapter").iterdir()} >= {"adapter_model.safetensors"}
    for name in names:
        assert memory.cat(f"/exported/adapter/{name}") == (tmp_path / "adapter" / name).read_bytes()
    capsys.readouterr()
    for target, says in (
        ("memory://exported/adapter", "is there already and not empty"),
        (str(tmp_path / "adapter"), "is there already and not empty"),
        ("nosuch://exported", "nosuch://exported: Protocol not known: nosuch"),
    ):
        assert program.main(["export", path, "--adapter", target]) == 2
        assert says in capsys.readouterr().err


def test_what_is_exported_holds_the_tokenizer_with_its_chat_template(tmp_path: Path) -> None:
    """transformers reads it from a file of its own: a merged model without it could not be talked to."""
    import transformers

    wide = msgspec.structs.replace(TINY, model=msgspec.structs.replace(TINY.model, vocab_size=IDS))
    config = based(wide, tmp_path / "base")
    data = msgspec.structs.replace(config.data, tokenizer=a_tokenizer(tmp_path / "base"))
    config = msgspec.structs.replace(config, data=data)
    store = checkpoint.Store(str(tmp_path / "checkpoints"))
    records = [store.write_shard(1, number, 2, create(config, number).state()) for number in range(2)]
    path = store.publish(1, records, checkpoint.about(config, "", ""))
    chat = [{"role": "user", "content": "hello"}]
    for option in ("--adapter", "--merge"):
        place = tmp_path / option
        assert program.main(["export", path, option, str(place)]) == 0
        tokenizer = transformers.AutoTokenizer.from_pretrained(place)
        assert tokenizer.apply_chat_template(chat, tokenize=False) == f"{TURN}user\nhello{END}"


def test_export_says_what_it_cannot_write(config: Config, tmp_path: Path) -> None:
    store = checkpoint.Store(str(tmp_path / "checkpoints"))
    path = Path(store.publish(1, [store.write_shard(1, 0, 1, {})], checkpoint.about(TINY, "", "")))
    with pytest.raises(ValueError, match="all weights were trained"):
        saved.adapted(path)
    (path / marker.MARKER).unlink()
    with pytest.raises(ValueError, match="was not written by shoal"):
        saved.adapted(path)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["tune.method=lora"], "name its directory with model.path"),
        (["tune.method=lora", "device.count=2"], "shares out all of a stage's weights"),
        (["tune.method=lora", "tune.dora=true", "tune.quantize=nf4"], "try tune.dora=false"),
        (["tune.rank=4"], "tune.rank = 4 has no effect: tune.method = 'full' trains all weights"),
        (["tune.method=lora", "tune.rank=0"], "tune.rank"),
        (["tune.method=lora", "model.boundary=maxout-2x", "run.stages=2"], "is trained with the whole model"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: list[str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        configuration.load(None, settings)
