"""Stages that serve texts and train nothing hold frozen weights with adapters as those do that train them, on one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tests.model.test_adapter_import import an_adapter, importing
from tests.model.test_adapters import based
from tests.model.test_inference import NEW, PROMPT, greedy, longer
from torch import Tensor

from shoal.config import Config
from shoal.executor import create
from shoal.executor.serving import Serving
from shoal.model import stages


def serving(config: Config, **run: object) -> Config:
    return msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, serve=True, **run))


def adapted(family: str, folder: Path, cut: int = 3, **tune: object) -> Config:
    """A model of four blocks with an adapter of PEFT's, trained by nobody, that changes what it says."""
    whole = longer(family, 1)
    config = based(whole, folder / "base", **tune)
    lora = {"use_dora": bool(tune.get("dora")), "use_rslora": bool(tune.get("rslora"))}
    adapter = an_adapter(config, folder / "adapter", **lora)
    run = msgspec.structs.replace(config.run, stages=cut, peers=cut)
    return importing(msgspec.structs.replace(config, run=run), adapter)


def generated(model: Any) -> Tensor:
    """What transformers' own `generate` adds, greedily."""
    mask = torch.ones_like(PROMPT)
    tokens: Tensor = model.generate(
        input_ids=PROMPT, attention_mask=mask, max_new_tokens=NEW, do_sample=False, pad_token_id=0
    )
    return tokens[:, PROMPT.shape[1] :]


def peers(config: Config) -> list[Any]:
    """One of each stage."""
    return [create(serving(config), stage) for stage in range(config.run.stages)]


@pytest.mark.parametrize("family", ["llama", pytest.param("gemma2", marks=pytest.mark.slow), "gpt2"])
@pytest.mark.parametrize("tune", [{}, pytest.param({"rslora": True}, marks=pytest.mark.slow), {"dora": True}])
def test_three_peers_with_an_adapter_add_the_tokens_of_peft(
    tmp_path: Path, family: str, tune: dict[str, object]
) -> None:
    import transformers
    from peft import PeftModel

    config = adapted(family, tmp_path, **tune)
    base = transformers.AutoModelForCausalLM.from_pretrained(config.model.path).eval()
    plain = generated(base)
    expected = generated(PeftModel.from_pretrained(base, config.tune.adapter).eval())
    assert torch.equal(greedy(peers(config), PROMPT, [None] * 3, NEW), expected)
    assert not torch.equal(plain, expected), "the adapter says something"


def test_peers_with_four_bits_add_the_tokens_of_the_whole_model_in_four_bits(tmp_path: Path) -> None:
    config = adapted("llama", tmp_path, quantize="nf4")
    assert torch.equal(greedy(peers(config), PROMPT, [None] * 3, NEW), generated(stages.whole(config)))


@pytest.mark.parametrize("tune", [{}, {"quantize": "nf4"}])
def test_a_serving_peer_has_the_frozen_weights_of_one_that_trains(tmp_path: Path, tune: dict[str, object]) -> None:
    config = adapted("llama", tmp_path, **tune)
    training, here = create(config, 1), create(serving(config), 1)
    assert here.base and here.base == training.base
    assert list(here.state()) == [name for name in training.state() if name.startswith("model/")]
    assert here.digest() == training.digest(), "in float32 its adapters are those that are trained"
    quantize = "none" if tune else "nf4"
    other = create(serving(importing(config, Path(config.tune.adapter), quantize=quantize)), 1)
    assert all(map(torch.equal, other.state().values(), here.state().values()))
    assert other.base != here.base and other.digest() != here.digest(), "the same adapter beside other weights"


def test_weights_that_are_only_computed_with_are_rounded_as_they_are_read(tmp_path: Path) -> None:
    config = longer("llama", 3)
    stages.whole(longer("llama", 1)).save_pretrained(tmp_path)
    config = msgspec.structs.replace(
        config,
        model=msgspec.structs.replace(based(config, tmp_path).model),
        train=msgspec.structs.replace(config.train, dtype="bfloat16"),
    )
    built = stages.build(serving(config), 1)
    rounded = [value.bfloat16() for _, value in stages.build(config, 1).named_parameters()]
    assert all(torch.equal(value, other) for (_, value), other in zip(built.named_parameters(), rounded, strict=True))
    assert Serving(built, serving(config)).base == ""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("tune", [None, {}, {"quantize": "nf4"}])
def test_a_card_holds_the_whole_stage_and_adds_the_tokens_of_the_cpu(
    tmp_path: Path, tune: dict[str, object] | None
) -> None:
    if tune is None:
        stages.whole(longer("llama", 1)).save_pretrained(tmp_path)
        config = msgspec.structs.replace(longer("llama", 3), model=based(longer("llama", 3), tmp_path).model)
    else:
        config = adapted("llama", tmp_path, **tune)

    def on(kind: str) -> list[Serving]:
        return peers(msgspec.structs.replace(config, device=msgspec.structs.replace(config.device, kind=kind)))

    expected = greedy(on("cpu"), PROMPT, [None] * 3, NEW)
    on_card = on("cuda")
    for peer in on_card:
        assert all(value.is_cuda for value in (*peer._stage.model.parameters(), *peer._stage.model.buffers()))
    assert torch.equal(greedy(on_card, PROMPT, [None] * 3, NEW).cpu(), expected)
