"""Each supported family: cut into stages it is the whole, and a published checkpoint of it is read by every stage.

Bits of logits and gradients, mixtures of experts with their load-balancing loss. test_stages.py tries all cuts of a few families.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tests.model.test_stages import a_config, some_tokens
from torch import Tensor

from shoal.config import Config, Train
from shoal.executor.base import boundary
from shoal.executor.resident import Resident
from shoal.executor.swap.swapping import Swapping
from shoal.model import stages
from shoal.model.cut import inputs, next_token_loss, targets

# Experts: two of four, in layers of 24 values.
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "router_aux_loss_coef": 0.5}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "mistral": {"extra": {"sliding_window": 4}},
    "gemma2": {"extra": {"sliding_window": 4, "query_pre_attn_scalar": 16}},
    "gemma3_text": {"extra": {"sliding_window": 4}},
    "phi3": {"extra": {"sliding_window": 4}},
    "olmo2": {},
    "smollm3": {},
    "gpt2": {"kv_heads": 4, "extra": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}},
    "opt": {"kv_heads": 4, "extra": {"dropout": 0.0, "word_embed_proj_dim": 24}},
    "falcon": {"kv_heads": 4, "extra": {"alibi": True}},
    "bloom": {"kv_heads": 4, "intermediate_size": 384},
    "gpt_neox": {"kv_heads": 4},
    "mixtral": {"extra": {"num_local_experts": 4, "router_aux_loss_coef": 0.5}},
    "qwen3_moe": {"extra": EXPERTS},
}
MIXTURES = ["mixtral", "qwen3_moe"]
TWICE = Train(batch=2, microbatch=2)  # one microbatch: gradients are not divided


def of_family(family: str, cut: int = 1, **fields: Any) -> Config:
    return msgspec.structs.replace(a_config(family, cut=cut, **(FAMILIES[family] | fields)), train=TWICE)


def whole_gradients(family: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits and gradients of the uncut model, with the balance of its experts by transformers' function, layer by layer."""
    model = stages.whole(of_family(family, **without_balance(family)))
    logits = model(inputs(some_tokens()), use_cache=False).logits
    loss = next_token_loss(logits, targets(some_tokens()))
    if family in MIXTURES:
        loss = loss + 0.5 * mean_balance(model)
    loss.backward()
    return logits.detach(), {name: value.grad for name, value in model.named_parameters()}


def without_balance(family: str) -> dict[str, Any]:
    return {"extra": FAMILIES[family]["extra"] | {"router_aux_loss_coef": 0.0}} if family in MIXTURES else {}


def mean_balance(model: Any) -> Tensor:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    layers = model(inputs(some_tokens()), use_cache=False, output_router_logits=True).router_logits
    assert len(layers) == 4
    return torch.stack([load_balancing_loss_func((layer,), 4, 2) for layer in layers]).mean()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_in_three_stages_has_the_logits_and_gradients_of_the_whole(family: str) -> None:
    config, tokens = of_family(family, 3), some_tokens()
    logits, gradients = whole_gradients(family)
    stages.check(config)
    parts = [stages.build(config, stage) for stage in range(3)]
    xs = [inputs(tokens)]
    for part in parts[:-1]:
        xs.append(part.forward(xs[-1]).detach())
    assert torch.equal(parts[-1].forward(xs[-1]), logits)

    grad: Tensor | None = None
    collected: dict[str, Tensor] = {}
    for stage in (2, 1, 0):
        executor = Resident(parts[stage], config)
        grad, loss = executor.backward(xs[stage], grad, tokens if stage == 2 else None)
        if stage == 2:
            assert loss == float(next_token_loss(logits, targets(tokens))), "the cross entropy alone"
        values = [value for _, value in parts[stage].named_parameters()]
        sums = executor.sum.split([value.numel() for value in values])
        names = [name for name, _ in parts[stage].named_parameters()]
        collected |= {name: part.view_as(value) for name, part, value in zip(names, sums, values, strict=True)}
    assert collected.keys() == gradients.keys()
    for name, value in collected.items():
        if family in MIXTURES:  # the two losses' gradients are added in another order
            assert torch.allclose(value, gradients[name], rtol=1e-4, atol=1e-7), name
        else:
            assert torch.equal(value, gradients[name]), name


@pytest.mark.parametrize("family", FAMILIES)
def test_stages_read_a_published_checkpoint_of_the_family(family: str, tmp_path: Path) -> None:
    """As transformers writes it: experts one by one, the names of the first release, a head that is not the embedding."""
    import transformers

    published = transformers.AutoModelForCausalLM.from_config(stages.hf_config(of_family(family))).eval()
    published.save_pretrained(tmp_path)
    config = a_config(family, cut=2, path=str(tmp_path), extra={})
    stages.check(config)
    assert boundary(config).shape[-1] == 32
    x = inputs(some_tokens())
    with torch.no_grad():
        for stage in range(2):
            x = stages.build(config, stage).forward(x)
        assert torch.equal(x, published(inputs(some_tokens()), use_cache=False).logits)


@pytest.mark.parametrize("family", MIXTURES)
def test_the_balance_of_the_experts_reaches_the_routers_and_not_the_reported_loss(family: str) -> None:
    tokens = some_tokens()
    sums = []
    for extra in (FAMILIES[family]["extra"], without_balance(family)["extra"]):
        executor = Resident(stages.build(of_family(family, extra=extra), 0), of_family(family, extra=extra))
        loss = executor.backward(inputs(tokens), None, tokens)[1]
        sums.append((loss, executor.sum.clone()))
    assert sums[0][0] == sums[1][0]
    assert not torch.equal(sums[0][1], sums[1][1])


def test_a_mixture_that_swaps_has_the_resident_ones_bits() -> None:
    config, tokens = of_family("mixtral"), some_tokens()
    least = Swapping(stages.build(config, 0), config).plan.device_bytes
    tight = msgspec.structs.replace(config, device=msgspec.structs.replace(config.device, memory_bytes=least * 3 // 4))
    swapping, plain = Swapping(stages.build(tight, 0), tight), Resident(stages.build(config, 0), config)
    assert swapping.plan.count > 1
    assert swapping.backward(inputs(tokens), None, tokens) == plain.backward(inputs(tokens), None, tokens)
    assert torch.equal(swapping.sum, plain.sum)


def test_experts_whose_routers_are_not_known_are_refused() -> None:
    with pytest.raises(ValueError, match=r"routers are not known here; set model\.extra\.router_aux_loss_coef=0\.0"):
        stages.check(a_config("doge"))
