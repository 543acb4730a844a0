"""A linear layer with its adapter as one operator: PEFT's results, compiled and not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from e2e.tiny import config_for, learner_for, policy_for, random_datums
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import Linear
from torch import Tensor, nn

from retrain.modeling.lora import FusedLoraLinear, fuse_adapters


def adapted(bias: bool = True, **options: object) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 20, bias=bias), nn.SiLU(), nn.Linear(20, 6, bias=bias)).requires_grad_(False)
    config = LoraConfig(r=3, lora_alpha=6, target_modules=["0", "2"], init_lora_weights=False, **options)
    return get_peft_model(model, config, autocast_adapter_dtype=False)


def results(model: nn.Module, run: Callable[[Tensor], Tensor]) -> list[Tensor]:
    inputs = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(1), requires_grad=True)
    outputs = run(inputs)
    outputs.square().sum().backward()
    return [outputs.detach(), inputs.grad, *(p.grad for p in model.parameters() if p.requires_grad)]  # type: ignore[list-item]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("compiled", [False, True])
def test_outputs_and_gradients_are_those_of_peft(bias: bool, compiled: bool) -> None:
    plain, fused = adapted(bias), adapted(bias)
    expected = results(plain, plain)
    fuse_adapters(fused)
    assert sum(type(module) is FusedLoraLinear for module in fused.modules()) == 2
    run = torch.compile(fused, backend="aot_eager", fullgraph=True) if compiled else fused
    found = results(fused, run)
    assert len(found) == len(expected) == 6
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_names_and_state_stay_those_of_peft() -> None:
    plain, fused = adapted(), adapted()
    fuse_adapters(fused)
    assert plain.state_dict().keys() == fused.state_dict().keys()
    with plain.disable_adapter(), fused.disable_adapter():
        inputs = torch.randn(4, 12)
        torch.testing.assert_close(fused(inputs), plain(inputs))
    fused.merge_adapter()
    torch.testing.assert_close(fused(inputs), plain(inputs))


@pytest.mark.parametrize("options", [{"lora_dropout": 0.1}, {"use_dora": True}, {"lora_bias": True}])
def test_what_is_not_computed_the_plain_way_stays_peft_s(options: dict[str, object]) -> None:
    model = adapted(**options)
    fuse_adapters(model)
    assert sum(type(module) is Linear for module in model.modules()) == 2


def test_gradients_pass_the_check_of_finite_differences() -> None:
    model = adapted().double()
    fuse_adapters(model)
    layer = next(module for module in model.modules() if type(module) is FusedLoraLinear)
    inputs = torch.randn(3, 12, dtype=torch.float64, requires_grad=True)
    down, up = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    assert torch.autograd.gradcheck(lambda x, *_: layer(x), (inputs, down, up))


def test_a_step_with_fused_adapters_is_the_plain_step(tiny: Path) -> None:
    config = config_for(tiny, loss__ratio_cap=0.0)
    datums = random_datums(4 * [(6, 9)])
    found = []
    for is_fused in (False, True):
        learner = learner_for(policy_for(config), config)
        if is_fused:
            fuse_adapters(learner.policy.adapted)
            assert any(type(module) is FusedLoraLinear for module in learner.policy.adapted.modules())
            for layer in learner.layers:
                layer.compile(backend="aot_eager")
        metrics = learner.step(datums)
        found.append((metrics, learner.policy.adapter_state()))
    (one, weights), (other, same) = found
    assert other["loss"] == pytest.approx(one["loss"], rel=1e-4)
    assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
    for name, tensor in weights.items():
        torch.testing.assert_close(same[name], tensor, rtol=1e-3, atol=1e-5)
