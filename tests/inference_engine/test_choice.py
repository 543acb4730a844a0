from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import slow
from e2e.tiny import (
    CONTEXT,
    PlainTokenizer,
    config_for,
    datums_of,
    learner_for,
    policy_for,
    random_prompts,
    write_model,
)
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from retrain.capacity import sampling as sampling_rules
from retrain.config.schema import Inference
from retrain.errors import ConfigError
from retrain.inference_engine.pytorch import PyTorchEngine, choice
from retrain.inference_engine.pytorch.cache import FP8
from retrain.inference_engine.pytorch.decoder import Row
from retrain.inference_engine.pytorch.native import NativeForward
from retrain.inference_engine.pytorch.products import Fp8Product, Part, to_fp8
from retrain.inference_engine.pytorch.weights import SamplingModel
from retrain.modeling.attention import ATTENTION_NAME, PackedAttention, register
from retrain.modeling.policy import Policy
from retrain.types import Sampling

from .conftest import Rig
from .plain import plain_distributions, plain_model

LENGTHS = (4, 11, 7, 1)


def engine_with(policy: Policy, **options: object) -> PyTorchEngine:
    return PyTorchEngine(policy, Inference(**options), PlainTokenizer(), lambda *_: None)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("attention_kernel", "triton", "needs a CUDA GPU and Triton, but: no CUDA GPU, but cpu"),
        ("dtype", "fp8", r"compute capability 8\.9 or newer .*, this is the CPU"),
    ],
)
def test_what_is_not_available_is_rejected_with_the_reason(llama: Rig, key: str, value: str, reason: str) -> None:
    with pytest.raises(
        ConfigError, match=rf'\[inference\] {key} = "{value}" is not supported by the pytorch engine here: .*{reason}'
    ):
        engine_with(llama.policy, **{key: value})


def test_an_older_gpu_is_rejected_with_what_8_bit_floats_need(llama: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama.policy, "device", torch.device("cuda"))
    monkeypatch.setattr(choice, "free_memory", lambda device: 1 << 40)
    monkeypatch.setattr(choice, "runs_triton", lambda device: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    for options in ({"dtype": "fp8"}, {"kv_cache_dtype": "fp8"}):
        with pytest.raises(
            ConfigError, match=r"needs a GPU of compute capability 8\.9 .*, this is compute capability 8\.0"
        ):
            choice.choose(llama.policy, Inference(**options))


def test_the_line_at_the_start_says_what_was_chosen(llama: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    assert llama.engine.description == "pytorch on cpu, eager, sdpa attention, fp32 weights, fp32 cache"
    small = engine_with(llama.policy, dtype="bf16", kv_cache_dtype="int8")
    flash = choice.choose(llama.policy, Inference(attention_kernel="flash")).description
    assert 'sdpa attention (attention_kernel = "flash" on the CPU)' in flash
    assert small.description == "pytorch on cpu, eager, sdpa attention, bf16 weights, int8 cache"
    monkeypatch.setattr(choice, "free_memory", lambda device: 1 << 40)
    monkeypatch.setattr(llama.policy, "device", torch.device("cuda"))
    lacking = choice.choose(llama.policy, Inference()).description
    assert lacking.startswith("pytorch on cuda, eager (Triton is not installed), sdpa attention") or lacking.startswith(
        "pytorch on cuda, CUDA graphs, triton attention"
    )
    monkeypatch.setattr(choice, "runs_triton", lambda device: True)
    best = choice.choose(llama.policy, Inference(dtype="bf16")).description
    assert best == "pytorch on cuda, CUDA graphs, triton attention, bf16 weights, bf16 cache"
    flash = choice.choose(llama.policy, Inference(attention_kernel="flash")).description
    assert flash.startswith('pytorch on cuda, eager (attention_kernel = "flash"), sdpa attention')


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bf16 instructions takes a slower path
@pytest.mark.parametrize(
    ("options", "worst"),
    [
        ({"dtype": "bf16", "kv_cache_dtype": "int8"}, 0.3),
        *slow(({"kv_cache_dtype": "fp8"}, 0.5)),
        *slow(({"kv_cache_dtype": "bf16"}, 0.05), ({"kv_cache_dtype": "int8"}, 0.05), ({"dtype": "bf16"}, 0.3)),
    ],
    ids=str,
)
def test_less_precision_changes_logprobs_a_little(rig: Rig, options: dict[str, str], worst: float) -> None:
    """The reported log-prob is of what was sampled; against full precision it is off by no more than rounding."""
    prompts, sampling = random_prompts(LENGTHS), Sampling(max_tokens=16, n=2, temperature=1.0, seed=3)
    errors = []
    for prompt, group in zip(prompts, engine_with(rig.policy, **options).generate(prompts, sampling), strict=True):
        for completion in group:
            expected = plain_distributions(rig.plain, prompt, completion.token_ids_T, sampling)
            chosen = [one[token] for one, token in zip(expected, completion.token_ids_T, strict=True)]
            errors.append(completion.logprobs_T - np.log(chosen))
    found = np.concatenate(errors)
    assert np.abs(found).mean() < worst
    assert np.abs(found).max() > 0, "the option does something"


def test_linear_layers_that_share_an_input_are_one_product(llama: Rig) -> None:
    model = SamplingModel(llama.policy)
    block = model.causal_lm.model.layers[0]
    parts = [block.self_attn.q_proj, block.self_attn.k_proj, block.self_attn.v_proj]
    assert all(isinstance(part, Part) for part in parts)
    assert len({id(part.product) for part in parts}) == 1
    assert block.mlp.gate_proj.product is block.mlp.up_proj.product
    assert block.self_attn.o_proj.product is not parts[0].product
    inputs = torch.randn(2, 3, 32)
    adapted = [model.adapted[f"model.layers.0.self_attn.{name}_proj"] for name in "qkv"]
    # Whatever the order and however often they are called.
    for at in (2, 0, 0, 1, 2):
        torch.testing.assert_close(parts[at](inputs), adapted[at](inputs), atol=1e-5, rtol=1e-4)
    assert torch.equal(parts[1](inputs * 2), parts[1](inputs * 2))


def test_merged_in_place_the_same_is_drawn_and_the_policy_is_as_before(llama: Rig) -> None:
    before = {name: tensor.clone() for name, tensor in llama.policy.adapted.state_dict().items()}
    prompts, sampling = random_prompts(LENGTHS), Sampling(max_tokens=8, n=2, seed=3)
    expected = llama.engine.generate(prompts, sampling)
    engine = engine_with(llama.policy)
    engine.model = SamplingModel(llama.policy, merging="in-place")
    engine.decoder = choice.make_decoder(llama.policy, engine.model, choice.choose(llama.policy, Inference()), True)
    found = engine.generate(prompts, sampling)
    for one, other in zip(found, expected, strict=True):
        for mine, its in zip(one, other, strict=True):
            assert mine.token_ids_T.tolist() == its.token_ids_T.tolist()
            np.testing.assert_allclose(mine.logprobs_T, its.logprobs_T, atol=1e-5)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    engine.progress = interrupt
    with pytest.raises(KeyboardInterrupt):
        engine.generate(prompts, sampling)
    after = llama.policy.adapted.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize(("free", "training", "in_place"), [(10**9, 0, False), (30_000, 0, True), (10**9, 10**9, True)])
def test_adapters_are_merged_in_place_where_copies_would_take_too_much(
    llama: Rig, monkeypatch: pytest.MonkeyPatch, free: int, training: int, in_place: bool
) -> None:
    assert choice.choose(llama.policy, Inference()).merging == "copies"
    monkeypatch.setattr(choice, "free_memory", lambda device: free)
    monkeypatch.setattr(choice, "runs_triton", lambda device: True)
    on_gpu = replace(llama.policy, device=torch.device("cuda"), training_bytes=training)
    chosen = choice.choose(on_gpu, Inference())
    assert (chosen.merging == "in-place") == in_place
    assert ("merged-in-place" in chosen.description) == in_place
    assert choice.choose(replace(on_gpu, is_trained_while_sampled=True), Inference()).merging == "copies"


def test_an_engine_that_samples_during_training_merges_nothing_into_the_trained_weights(llama: Rig) -> None:
    engine = engine_with(replace(llama.policy, is_trained_while_sampled=True))
    assert not engine.restore_sizes(engine.sizes() | {"in_place": 1})
    assert engine.sizes()["in_place"] == 0 and engine.model is not None and engine.model.merging == "copies"


def test_a_resumed_engine_merges_as_the_earlier_one_did(llama: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, sampling = random_prompts(LENGTHS), Sampling(max_tokens=8, n=2, seed=3)
    engine = engine_with(llama.policy)
    assert engine.sizes()["in_place"] == 0
    before = engine.generate(prompts, sampling)
    for in_place in (1, 0):
        assert engine.restore_sizes(engine.sizes() | {"in_place": in_place})
        assert engine.sizes()["in_place"] == in_place
        assert engine.model is not None and (engine.model.merging == "in-place") == bool(in_place)
        assert ("merged-in-place" in engine.description) == bool(in_place)
        found = engine.generate(prompts, sampling)
        assert [c.token_ids_T.tolist() for g in found for c in g] == [c.token_ids_T.tolist() for g in before for c in g]

    def run_out(policy: Policy, chosen: choice.Choice) -> SamplingModel | None:
        if chosen.merging == "copies":
            raise torch.OutOfMemoryError
        return choice.make_model(policy, chosen)

    assert engine.restore_sizes(engine.sizes() | {"in_place": 1})
    monkeypatch.setattr("retrain.inference_engine.pytorch.engine.make_model", run_out)
    assert not engine.restore_sizes(engine.sizes() | {"in_place": 0})
    assert engine.sizes()["in_place"] == 1


def test_in_small_bf16_models_small_updates_reach_the_sampler(tmp_path: Path) -> None:
    policy = policy_for(config_for(write_model(tmp_path), model__dtype="bf16"))
    with torch.no_grad():
        for name, parameter in policy.adapted.named_parameters():
            if "lora_B" in name:
                # Well below the rounding of the matrices it is added to.
                parameter.fill_(1e-5)
    prompts, sampling = random_prompts(LENGTHS), Sampling(max_tokens=6, n=2, seed=1)
    ids = torch.arange(3, 20)[None]
    attend = PackedAttention([17], policy.device)
    with torch.inference_mode():
        expected = policy.hidden(ids, ids, attend)
        gaps = {
            option: float((model.hidden(ids, ids, attend) - expected).abs().max())
            for option in ("auto", "never", "always")
            if (model := engine_with(policy, merge_adapter=option).model) is not None
        }
    assert gaps["auto"] == gaps["never"] == 0.0
    assert gaps["always"] > 0
    assert engine_with(policy).description.endswith("bf16 unmerged weights, bf16 cache")
    assert sum(map(len, engine_with(policy).generate(prompts, sampling))) == 8


@pytest.mark.parametrize(("dtype", "merging"), [("fp32", "copies"), ("bf16", "never")])
def test_adapters_are_merged_in_float32_and_into_large_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, merging: str
) -> None:
    policy = policy_for(config_for(write_model(tmp_path), model__dtype=dtype))
    assert choice.choose(policy, Inference()).merging == merging
    monkeypatch.setattr(sampling_rules, "LARGE_MODEL", 10)
    assert choice.choose(policy, Inference()).merging == "copies"


def test_layers_that_are_not_all_adapted_are_left_alone(llama: Rig) -> None:
    policy = policy_for(config_for(llama.folder, lora__target_modules="q_proj,v_proj"))
    model = SamplingModel(policy)
    assert not any(isinstance(module, Part) for module in model.causal_lm.modules())


def test_biases_go_along_with_their_layers(tmp_path: Path) -> None:
    from .conftest import build_rig_from

    torch.manual_seed(0)
    settings = Qwen2Config(
        vocab_size=128, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, max_position_embeddings=CONTEXT, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(settings).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(tmp_path / "model")
    rig = build_rig_from(tmp_path / "model", tmp_path)
    assert any(isinstance(module, Part) for module in rig.engine.model.causal_lm.modules())  # type: ignore[union-attr]
    check_logprobs(rig.engine, rig.plain)


def check_logprobs(engine: PyTorchEngine, plain: torch.nn.Module) -> None:
    prompts, sampling = random_prompts(LENGTHS), Sampling(max_tokens=16, n=2, temperature=1.0, seed=3)
    for prompt, group in zip(prompts, engine.generate(prompts, sampling), strict=True):
        for completion in group:
            expected = plain_distributions(plain, prompt, completion.token_ids_T, sampling)
            chosen = [one[token] for one, token in zip(expected, completion.token_ids_T, strict=True)]
            np.testing.assert_allclose(completion.logprobs_T, np.log(chosen), atol=1e-4)


def test_a_matrix_in_fp8_is_scaled_for_each_output() -> None:
    weight = torch.randn(48, 32, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 48)[:, None]
    product = Fp8Product(torch.empty(48, 32, dtype=FP8), None, [16, 32])
    product.store(0, weight[:16])
    product.store(1, weight[16:])
    restored = product.weight.float() * product.scales[:, None]
    # Three bits of mantissa: no number is off by more than a sixteenth, or by the least step near zero.
    close = (restored - weight).abs() <= weight.abs() / 16 + weight.abs().amax(1, keepdim=True) * 2**-15
    assert bool(close.all())
    values, scales = to_fp8(torch.zeros(2, 16))
    assert torch.isfinite(values.float() * scales[:, None]).all()


ENDS = {"vocab_size": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WIDE = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT, "rotary_dim": 4} | ENDS
USUAL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT,
} | ENDS
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
OWN: dict[str, dict[str, Any]] = {
    "codegen": WIDE,
    "gptj": WIDE,
    # Learned positions, which padding on the left must not shift.
    "gpt_neo": {
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 2,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 16,
        "max_position_embeddings": CONTEXT,
    }
    | ENDS,
    # No positions; other names of the context length.
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 2, "seq_length": CONTEXT} | ENDS,
    "mpt": {"d_model": 32, "n_layers": 2, "n_heads": 2, "max_seq_len": CONTEXT} | ENDS,
    # Recurrent states in some layers.
    "lfm2": USUAL | {"layer_types": ["conv", "full_attention"]},
    "qwen3_5_text": USUAL
    | LINEAR
    | {"linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"]},
}


def write_own(family: str, folder: Path) -> Path:
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {family}")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **OWN[family])).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0 if family in ("codegen", "gptj") else 1.5)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", OWN)
def test_a_model_we_cannot_plug_into_samples_and_trains_with_its_own_attention(family: str, tmp_path: Path) -> None:
    config = config_for(write_own(family, tmp_path / "model"))
    policy = policy_for(config)
    engine = engine_with(policy)
    assert "the model's own attention" in engine.description
    assert "does not use transformers' attention interface" in engine.description
    check_logprobs(engine, plain_model(tmp_path / "model", policy, tmp_path / "adapter"))
    learner = learner_for(policy, config)
    learner.sampling = Sampling(max_tokens=9, n=2, seed=1)
    prompts = random_prompts(LENGTHS)
    datums = datums_of(prompts, engine.generate(prompts, learner.sampling))
    with torch.no_grad():
        packed = learner.pack(datums)
        ratios = (learner.logprobs(packed) - packed.sampled_logprobs).exp()
    assert (ratios - 1).abs().max() < 1e-4
    assert learner.step(datums)["skipped"] == 0
    with pytest.raises(ConfigError, match="has no effect on this model, which samples with its own attention"):
        engine_with(policy, kv_cache_dtype="int8")


@pytest.mark.parametrize("family", OWN)
@torch.no_grad()
def test_rows_that_are_dropped_do_not_change_the_others(family: str, tmp_path: Path) -> None:
    policy = policy_for(config_for(write_own(family, tmp_path / "model")))
    rows = [Row(prompt, 0, number, 9) for number, prompt in enumerate(random_prompts(LENGTHS))]
    kept, tokens = torch.tensor([1, 3]), torch.tensor([[5, 9, 7, 30], [8, 6, 40, 11], [20, 21, 22, 23]])
    whole, shrunk = NativeForward(policy), NativeForward(policy)
    torch.testing.assert_close(whole.begin(rows), shrunk.begin(rows))
    whole.advance(tokens[0]), shrunk.advance(tokens[0])
    shrunk.keep(kept)
    for each in tokens[1:]:
        torch.testing.assert_close(whole.advance(each)[kept], shrunk.advance(each[kept]), atol=1e-4, rtol=1e-4)


def test_biases_that_were_trained_are_sampled_with() -> None:
    config = Qwen2Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, attn_implementation=ATTENTION_NAME,
    )  # fmt: skip
    register()
    policy = Policy(Qwen2ForCausalLM(config).eval(), torch.device("cpu"), 64, ())
    model = SamplingModel(policy)
    with torch.no_grad():
        for name, parameter in policy.adapted.named_parameters():
            if name.endswith("bias"):
                parameter += torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    model.refresh()
    ids = torch.arange(6)[None]
    attend = PackedAttention([6], policy.device)
    with torch.no_grad():
        torch.testing.assert_close(
            model.hidden(ids, ids, attend), policy.hidden(ids, ids, attend), rtol=1e-4, atol=1e-5
        )
