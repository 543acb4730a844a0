"""What must hold of a quantized model, whoever quantizes it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from e2e.tiny import (
    PlainTokenizer,
    config_for,
    datums_of,
    gradients,
    learner_for,
    policy_for,
    random_datums,
    random_prompts,
    write_model,
)
from peft import PeftModel
from torch import nn
from transformers import AutoModelForCausalLM

from retrain.backends.local.frozen import without_adapter
from retrain.backends.local.learner import Learner
from retrain.inference_engine.pytorch import PyTorchEngine
from retrain.modeling.policy import Policy, fresh_adapter, load_policy
from retrain.modeling.quantization import QuantizedLinear, dequantize, quantized_layers
from retrain.types import Sampling

SIZES = ((3, 9), (11, 2), (1, 17), (6, 6))
SAMPLING = Sampling(max_tokens=12, n=4, temperature=0.9, seed=1)


def learner(model: Path, kind: str, **overrides: Any) -> Learner:
    config = config_for(model, model__quantization=kind, **overrides)
    return learner_for(policy_for(config), config)


def engine_of(policy: Policy, made: Learner) -> PyTorchEngine:
    return PyTorchEngine(policy, made.config.inference, PlainTokenizer(), lambda *_: None)


def matrix_of(layer: QuantizedLinear) -> torch.Tensor:
    return dequantize(layer.weight, layer.scales, (layer.out_features, layer.in_features), torch.float32)


def restore(policy: Policy) -> Policy:
    """A copy of the policy whose matrices are plain ones with the dequantized values."""
    adapted = copy.deepcopy(policy.adapted)
    for name, layer in list(adapted.named_modules()):
        if isinstance(layer, QuantizedLinear):
            plain = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None).requires_grad_(False)
            plain.weight.data = matrix_of(layer)
            plain.bias = layer.bias
            adapted.set_submodule(name, plain)
    return Policy(adapted, policy.device, policy.context_length, policy.stop_ids)


def check_sampler_and_trainer_agree(folder: Path, kind: str, family: str) -> None:
    made = learner(write_model(folder, family), kind, training__lr=0.02)
    engine, prompts = engine_of(made.policy, made), random_prompts((5, 9, 3))
    assert f"{kind} weights" in engine.description
    for step in range(3):
        engine.sync(made.policy)
        datums = datums_of(prompts, engine.generate(prompts, SAMPLING), seed=step)
        metrics = made.step(datums, step)
        assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-4)
        assert metrics["kl_sample_train"] == pytest.approx(0.0, abs=1e-7)


def check_it_is_the_model_with_the_dequantized_matrices(folder: Path, kind: str, family: str) -> None:
    made = learner(write_model(folder, family), kind)
    plain = learner_for(restore(made.policy), made.config)
    assert made.policy.quantization == kind
    assert plain.policy.quantization == "none"
    for each in (made, plain):
        each._backward(each.split(random_datums(SIZES)))
    found, expected = gradients(made.policy), gradients(plain.policy)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-4 * float(gradient.abs().max()))


def check_learning_and_an_exact_resume(model: Path, folder: Path, kind: str) -> None:
    made, other = learner(model, kind), learner(model, kind)
    datums = random_datums(SIZES)
    losses = [float(made.step(datums, step)["loss"] or 0.0) for step in range(4)]
    assert losses[-1] < losses[0]
    made.save(folder)
    other.load(folder)
    assert made.step(datums, 4) == other.step(datums, 4)
    pairs = zip(made.policy.adapter_state().values(), other.policy.adapter_state().values(), strict=True)
    assert all(torch.equal(tensor, restored) for tensor, restored in pairs)


def check_the_adapter_loads_with_plain_peft(model: Path, folder: Path, kind: str) -> None:
    made = learner(model, kind)
    made.policy.save_adapter(folder)
    plain: Any = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager").eval()
    for name, module in plain.named_modules():
        if isinstance(module, nn.Linear) and not name.endswith("lm_head"):
            layer: Any = made.policy.causal_lm
            module.weight.data = matrix_of(layer.get_submodule(name).get_base_layer())
    adapted = PeftModel.from_pretrained(plain, str(folder)).eval()
    (datum,) = random_datums(SIZES[:1])
    ids = torch.as_tensor(np.concatenate([datum.prompt_ids, datum.completion_ids_T]))
    with torch.no_grad():
        logits = adapted(ids[None]).logits[0] / made.sampling.temperature
        expected = logits.log_softmax(1)[len(datum.prompt_ids) - 1 : -1]
        found = made.logprobs(made.pack([datum]))
    chosen = expected.gather(1, torch.as_tensor(datum.completion_ids_T)[:, None]).squeeze(1)
    torch.testing.assert_close(found, chosen, rtol=0, atol=5e-5)


def check_copies_share_the_quantized_matrices(model: Path, kind: str) -> None:
    made = learner(model, kind)
    held = {layer.weight.data_ptr() for layer in quantized_layers(made.policy.adapted)}
    base = without_adapter(made.policy)
    for copied in (made.policy.clone_with_new_adapter(), base):
        assert {layer.weight.data_ptr() for layer in quantized_layers(copied.adapted)} == held
    # The student samples from the quantized base without an adapter.
    prompts = random_prompts((5, 9))
    untrained = policy_for(made.config, trained=False)
    drawn = [engine_of(policy, made).generate(prompts, SAMPLING) for policy in (base, untrained)]
    first, second = ([one.token_ids_T.tolist() for group in groups for one in group] for groups in drawn)
    assert first == second


def check_a_fresh_adapter_is_the_first_one(model: Path, kind: str) -> None:
    config = config_for(model, model__quantization=kind, model__dtype="bf16")
    policy = policy_for(config, trained=False)
    state = list(policy.adapter_state().values())
    assert {tensor.dtype for tensor in state} == {torch.bfloat16}
    fresh = fresh_adapter(policy, config.training.seed)
    assert all(torch.equal(*pair) for pair in zip(state, fresh, strict=True))


def load_policy_and_log(config: Any, lines: list[str]) -> Policy:
    return load_policy(config.model, config.lora, config.training.seed, torch.device("cpu"), lines.append)


def check_compiled_layers_keep_only_the_quantized_matrix(kind: str) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = QuantizedLinear(nn.Linear(64, 96), kind, torch.device("cpu"))
            self.adapter = nn.Parameter(torch.ones(96, 64))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return F.silu(self.base(inputs) + F.linear(inputs, self.adapter))

    layer = Layer()
    layer.adapter.data = layer.adapter.data.bfloat16()
    # The backend that splits the graph as on a GPU, without compiling it.
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    inputs = torch.randn(5, 64, dtype=torch.bfloat16, requires_grad=True)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        outputs = compiled(inputs)
    outputs.sum().backward()
    matrices = [tensor for tensor in kept if tensor.numel() == 96 * 64 and tensor.dtype == torch.bfloat16]
    assert [tensor.data_ptr() for tensor in matrices] == [layer.adapter.data_ptr()]
    assert any(tensor.data_ptr() == layer.base.weight.data_ptr() for tensor in kept)
