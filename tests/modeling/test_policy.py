from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from retrain.builtin import resolve_model
from retrain.config.schema import Lora, Model
from retrain.errors import BackendError, ConfigError
from retrain.modeling.causal_lm import is_projection
from retrain.modeling.files import count_trainable, find_model, read_facts
from retrain.modeling.policy import check_architecture, load_policy
from retrain.modeling.quantization import QuantizedLinear

CPU = torch.device("cpu")


@pytest.mark.parametrize("rank", [0, 4])
def test_an_adapter_is_not_taken_for_a_model(tmp_path: Path, rank: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(resolve_model("builtin:tiny"))
    get_peft_model(model, LoraConfig(r=2, target_modules="all-linear")).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="is an adapter, not a model"):
        load_policy(Model(model=str(tmp_path), lora_rank=rank), Lora(), 0, CPU, print)


def test_an_adapter_that_memory_cannot_hold_is_refused_in_a_sentence() -> None:
    with pytest.raises(
        BackendError, match=r"an adapter of rank 1000000000000 does not fit .*smaller \[model\] lora_rank"
    ):
        load_policy(Model(model="builtin:tiny", lora_rank=10**12), Lora(), 0, CPU, print)


def test_a_model_without_some_of_its_weights_is_refused(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(resolve_model("builtin:tiny"))
    weights = model.state_dict()
    lacking = next(name for name in weights if name.endswith("q_proj.weight"))
    del weights[lacking]
    model.save_pretrained(tmp_path, state_dict=weights)
    with pytest.raises(ConfigError, match=f"lacks 1 weight of a causal language model: {lacking}"):
        load_policy(Model(model=str(tmp_path)), Lora(), 0, CPU, print)


def test_a_classifier_is_not_taken_for_a_language_model(tmp_path: Path) -> None:
    settings = AutoConfig.from_pretrained(resolve_model("builtin:tiny"), num_labels=2, tie_word_embeddings=False)
    AutoModelForSequenceClassification.from_config(settings).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"lacks 1 weight of a causal language model: lm_head\.weight"):
        load_policy(Model(model=str(tmp_path)), Lora(), 0, CPU, print)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_model_with_weights_that_are_not_finite_is_refused_as_such(tmp_path: Path, value: float) -> None:
    model = AutoModelForCausalLM.from_pretrained(resolve_model("builtin:tiny"))
    weights = model.state_dict()
    next(weight for name, weight in weights.items() if name.endswith("up_proj.weight"))[0, 0] = value
    model.save_pretrained(tmp_path)
    with pytest.raises(BackendError, match="its weights give logits that are not finite"):
        load_policy(Model(model=str(tmp_path)), Lora(), 0, CPU, print)


EXPERTS = {
    "qwen3_moe": (
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1},
        "k_proj,o_proj,q_proj,v_proj",
    ),
    "deepseek_v3": (
        {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32}
        | {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
        | {"first_k_dense_replace": 1},
        "kv_a_proj_with_mqa,kv_b_proj,o_proj,q_a_proj,q_b_proj",
    ),
}


@pytest.mark.parametrize("family", EXPERTS)
def test_experts_in_one_tensor_are_refused_before_the_weights_are_read(tmp_path: Path, family: str) -> None:
    own, advised = EXPERTS[family]
    usual = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 256}
    AutoConfig.for_model(family, **usual, **heads, **own).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f'experts in one tensor.*target_modules = "{advised}"'):
        load_policy(Model(model=str(tmp_path)), Lora(), 0, CPU, print)
    check_architecture(Model(model=str(tmp_path)), Lora(target_modules=advised))
    check_architecture(Model(model=str(tmp_path), lora_rank=0), Lora())


@pytest.mark.parametrize("family", ["rwkv", "mamba", "recurrent_gemma"])
def test_a_model_that_cannot_be_sampled_from_is_refused_in_a_sentence(tmp_path: Path, family: str) -> None:
    sizes = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 256}
    own = {"rwkv": {"attention_hidden_size": 32}, "mamba": {"state_size": 8}}.get(family, heads)
    settings = AutoConfig.for_model(family, **sizes, **own, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    AutoModelForCausalLM.from_config(settings).save_pretrained(tmp_path)
    for refuse in (
        lambda m: load_policy(m, Lora(), 0, CPU, lambda line: None),
        lambda m: check_architecture(m, Lora()),
    ):
        with pytest.raises(BackendError, match="cannot be trained here: "):
            refuse(Model(model=str(tmp_path)))


def test_a_model_without_a_context_length_is_refused_with_what_to_add(tmp_path: Path) -> None:
    AutoConfig.for_model("bloom", vocab_size=128, hidden_size=32, n_layer=2, n_head=2).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r'does not state its context length\. .*add "max_position_embeddings"'):
        check_architecture(Model(model=str(tmp_path)), Lora())


def test_routers_that_are_linear_layers_are_not_adapted(tmp_path: Path) -> None:
    sizes = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 256}
    settings = AutoConfig.for_model("phimoe", **sizes, **heads, num_local_experts=4, num_experts_per_tok=2)
    AutoModelForCausalLM.from_config(settings).save_pretrained(tmp_path)
    policy = load_policy(Model(model=str(tmp_path)), Lora(), 0, CPU, lambda line: None)
    adapted = {name.partition(".lora_")[0].rpartition(".")[2] for name in policy.adapter_state()}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_a_model_that_reads_images_is_refused_in_a_sentence(tmp_path: Path) -> None:
    AutoConfig.for_model("qwen2_5_vl").save_pretrained(tmp_path)
    for refuse in (lambda m: load_policy(m, Lora(), 0, CPU, print), lambda m: check_architecture(m, Lora())):
        with pytest.raises(ConfigError, match=r"\(qwen2_5_vl\) is not a model that .* Try: a text model"):
            refuse(Model(model=str(tmp_path)))


SIZES = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256}
KINDS = {"layer_types": ["linear_attention", "full_attention"]}


@pytest.mark.parametrize(
    ("family", "own", "planned"),
    [
        ("gpt2", {}, True),
        ("phi3", {}, True),
        ("falcon", {"multi_query": True}, True),
        ("qwen3_5_text", KINDS, False),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, False),
        ("ernie4_5_moe", {"moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 0}, False),
    ],
)
def test_trainable_parameters_are_those_of_the_run_or_unknown(
    tmp_path: Path, family: str, own: dict[str, object], planned: bool
) -> None:
    settings = AutoConfig.for_model(family, **SIZES | HEADS | {"pad_token_id": 0}, **own)
    AutoModelForCausalLM.from_config(settings).save_pretrained(tmp_path)
    facts = read_facts(find_model(str(tmp_path)))
    assert (facts.shape is not None) == planned
    counted = count_trainable(facts, 4, "all-linear")
    if "experts" in str(own):
        assert counted is None
    else:
        policy = load_policy(Model(model=str(tmp_path), lora_rank=4), Lora(), 0, CPU, lambda line: None)
        assert counted == sum(tensor.numel() for tensor in policy.adapter_state().values())


@pytest.mark.parametrize("family", ["falcon", "gpt2", "phi3"])
def test_a_quantized_model_has_no_other_projections(tmp_path: Path, family: str) -> None:
    settings = AutoConfig.for_model(family, **SIZES | HEADS | {"pad_token_id": 0})
    AutoModelForCausalLM.from_config(settings).save_pretrained(tmp_path)
    model = Model(model=str(tmp_path), quantization="int8", lora_rank=4)
    policy = load_policy(model, Lora(), 0, CPU, lambda line: None)
    assert policy.quantization == "int8"
    head, layers = policy.causal_lm.get_output_embeddings(), [m for m in policy.adapted.modules() if is_projection(m)]
    assert {type(layer) for layer in layers if layer is not head and layer.in_features > 4 < layer.out_features} == {
        QuantizedLinear
    }
