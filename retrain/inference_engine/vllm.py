"""Servers started with `vllm serve`."""

from __future__ import annotations

from retrain.inference_engine.http.spec import Adapter, CompletionRequest, ServerSpec, completions_request, read_choices
from retrain.types import JsonObject


def _request(model: str, adapter: Adapter | None, request: CompletionRequest) -> JsonObject:
    sampling = request.sampling
    return completions_request(model, adapter, request) | {
        "logprobs": 0,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "stop_token_ids": list(request.stop_ids),
    }


VLLM = ServerSpec(
    name="vllm",
    port=8000,
    command="VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve {model} --port {port} --enable-lora "
    "--max-lora-rank {rank} --logprobs-mode processed_logprobs",
    request=_request,
    read=read_choices,
    tokenize="/tokenize",
    # It applies min_p before top_p; retrain applies top_p first.
    exclusive=("top_p", "min_p"),
    # 0.32 takes 1 as well, earlier versions do not.
    ranks=(8, 16, 32, 64, 128, 256, 320, 512),
    remedies={
        "ids": "vLLM sends token ids from 0.10.2 on; update it.",
        "logprobs": "Start it without --max-logprobs 0.",
        "lora": "Start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its environment.",
        "rank": "Start it with --max-lora-rank {rank}.",
        "context": "Start it with a larger --max-model-len.",
        "processed": "--logprobs-mode processed_logprobs",
    },
)
