"""Servers started with `mlx_lm.server`."""

from __future__ import annotations

from typing import Any

from retrain.inference_engine.http.spec import Adapter, CompletionRequest, CompletionResult, IncompleteReply, ServerSpec
from retrain.types import JsonObject


def _request(model: str, adapter: Adapter | None, request: CompletionRequest) -> JsonObject:
    sampling = request.sampling
    body = {
        "model": model,
        "prompt": request.prompt_text,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "seed": sampling.seed,
        # A bool, and never top_logprobs: with it the server sends the likeliest token in place of the sampled one.
        "logprobs": True,
    }
    return body | ({"adapters": str(adapter.path)} if adapter else {})


def _read(reply: Any) -> list[CompletionResult]:
    results = []
    for choice in reply["choices"]:
        logprobs = choice.get("logprobs")
        if not logprobs or not logprobs.get("content"):
            raise IncompleteReply("log-probs")
        if any("id" not in token for token in logprobs["content"]):
            raise IncompleteReply("token ids")
        results.append(
            CompletionResult([t["id"] for t in logprobs["content"]], [t["logprob"] for t in logprobs["content"]])
        )
    return results


MLX = ServerSpec(
    name="mlx",
    port=8080,
    command="mlx_lm.server --model {model} --port {port}",
    request=_request,
    read=_read,
    # The list is empty without a hub cache, and with the name "default_model" it ignores the adapter.
    models="",
    takes_ids=False,
    takes_n=False,
    # It applies top_p and min_p before the temperature, we after it; its repetition penalty covers 20 tokens.
    options=("top_k",),
    load="",
    unload="",
    mlx_adapters=True,
    remedies={
        "ids": "Start mlx_lm.server 0.32.2 or newer with --model {model}.",
        "logprobs": "Start mlx_lm.server 0.32.2 or newer.",
        "lora": "The adapter folder must be readable where the server runs: see [inference] adapter_dir.",
    },
)
