"""A quantized base in 8 bits; tests/real has 4 bits, which need bitsandbytes."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest
import torch
from e2e.tiny import config_for, policy_for
from torch import nn

from retrain.checks.preflight import find_obstacles
from retrain.checks.unsupported import find_unsupported
from retrain.errors import MissingExtraError
from retrain.modeling.quantization import QuantizedLinear

from . import quantized


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_sampler_and_trainer_agree(family: str, tmp_path: Path) -> None:
    quantized.check_sampler_and_trainer_agree(tmp_path, "int8", family)


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_gradients_are_those_of_the_dequantized_model(family: str, tmp_path: Path) -> None:
    quantized.check_it_is_the_model_with_the_dequantized_matrices(tmp_path, "int8", family)


def test_it_learns_and_resumes_to_the_bit(tiny: Path, tmp_path: Path) -> None:
    quantized.check_learning_and_an_exact_resume(tiny, tmp_path, "int8")


def test_the_adapter_loads_with_plain_peft(tiny: Path, tmp_path: Path) -> None:
    quantized.check_the_adapter_loads_with_plain_peft(tiny, tmp_path, "int8")


def test_copies_share_the_quantized_matrices(tiny: Path) -> None:
    quantized.check_copies_share_the_quantized_matrices(tiny, "int8")


def test_a_fresh_adapter_has_the_precision_of_the_model(tiny: Path) -> None:
    quantized.check_a_fresh_adapter_is_the_first_one(tiny, "int8")


@pytest.mark.slow
def test_compiled_layers_keep_only_the_quantized_matrix() -> None:
    quantized.check_compiled_layers_keep_only_the_quantized_matrix("int8")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_layers_have_the_same_gradients(dtype: torch.dtype) -> None:
    # torch 2.11 compiled a gradient of zero for float32.
    torch.manual_seed(0)
    layer = QuantizedLinear(
        nn.Linear(64, 32, bias=False, dtype=dtype).requires_grad_(False), "int8", torch.device("cpu")
    )
    found = []
    for call in (layer, torch.compile(layer, backend="eager")):
        inputs = torch.linspace(-1, 1, 640, dtype=dtype).view(10, 64).requires_grad_()
        call(inputs).square().sum().backward()
        found.append(inputs.grad)
    assert found[0] is not None and found[0].abs().max() > 0
    torch.testing.assert_close(found[1], found[0])


def test_a_row_of_127_values_is_kept_exactly() -> None:
    layer = nn.Linear(4, 2)
    layer.weight.data = torch.tensor([[1.27, -0.5, 0.0, 0.01], [2.54, 0.02, -2.54, 1.0]])
    made = QuantizedLinear(layer, "int8", torch.device("cpu"))
    assert made.weight.tolist() == [[127, -50, 0, 1], [127, 1, -127, 50]]
    torch.testing.assert_close(made.scales, torch.tensor([0.01, 0.02]), rtol=1e-3, atol=0)
    torch.testing.assert_close(made(torch.eye(4)) - layer.bias, layer.weight.T, rtol=0, atol=2e-3)


def test_the_parameters_of_quantized_matrices_are_counted(tiny: Path) -> None:
    lines: list[list[str]] = []
    for kind in ("none", "int8"):
        config = config_for(tiny, model__quantization=kind)
        lines.append([])
        quantized.load_policy_and_log(config, lines[-1])
    assert lines[0] == lines[1]


@pytest.fixture
def without_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setattr("retrain.checks.preflight._is_importable", lambda name: name != "bitsandbytes")


@pytest.mark.usefixtures("without_package")
def test_8_bits_need_no_package(tiny: Path) -> None:
    config = config_for(tiny, model__quantization="int8")
    assert not list(find_obstacles(config))
    assert policy_for(config).quantization == "int8"


@pytest.mark.usefixtures("without_package")
def test_a_missing_package_is_answered_with_the_command_that_installs_it(tiny: Path) -> None:
    config = config_for(tiny, model__quantization="nf4")
    (issue,) = find_obstacles(config)
    assert issue.where == '[model] quantization = "nf4"'
    assert issue.text == "needs the package bitsandbytes, which is not installed."
    assert "pip install" in issue.hint
    with pytest.raises(MissingExtraError, match=r"needs the package bitsandbytes, which is not installed\..*pip"):
        policy_for(config)


def test_the_package_is_an_extra() -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert [line.split(">=")[0] for line in project["optional-dependencies"]["quant"]] == ["bitsandbytes"]


def test_a_model_that_is_already_quantized_is_rejected_before_it_is_loaded(tiny: Path, tmp_path: Path) -> None:
    settings = '{"model_type": "llama", "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": true}}'
    for name, text in (("config.json", settings), ("tokenizer.json", "{}"), ("pytorch_model.bin", "")):
        (tmp_path / name).write_text(text)
    (issue,) = find_obstacles(config_for(tmp_path))
    assert "has quantized weights; retrain quantizes the original as it loads it." in issue.text
    assert not list(find_obstacles(config_for(tiny)))


def test_a_service_loads_the_model_by_itself(tiny: Path) -> None:
    config = config_for(tiny, model__quantization="nf4", backend__backend="tinker")
    assert [issue.where for issue in find_unsupported(config)] == ["[model] quantization"]
