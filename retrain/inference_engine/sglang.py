"""Servers started with `sglang.launch_server`."""

from __future__ import annotations

from typing import Any

from retrain.inference_engine.http.spec import Adapter, CompletionRequest, CompletionResult, IncompleteReply, ServerSpec
from retrain.types import JsonObject


def _request(model: str, adapter: Adapter | None, request: CompletionRequest) -> JsonObject:
    sampling = request.sampling
    body = {
        "input_ids": request.prompt_ids.tolist(),
        "sampling_params": {
            "n": sampling.n,
            "max_new_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "stop_token_ids": list(request.stop_ids),
            "sampling_seed": sampling.seed % 2**31,
        },
        "return_logprob": True,
    }
    return body | ({"lora_path": adapter.name} if adapter else {})


def _read(reply: Any) -> list[CompletionResult]:
    """An object for one completion, a list for several; each token as [log-prob, id, text]."""
    results = []
    for one in reply if isinstance(reply, list) else [reply]:
        if "output_ids" not in one:
            raise IncompleteReply("token ids")
        tokens = one["meta_info"].get("output_token_logprobs")
        if tokens is None:
            raise IncompleteReply("log-probs")
        results.append(CompletionResult(one["output_ids"], [token[0] for token in tokens]))
    return results


SGLANG = ServerSpec(
    name="sglang",
    port=30000,
    command="python -m sglang.launch_server --model-path {model} --port {port} --enable-lora --max-lora-rank {rank} "
    "--lora-target-modules all",
    request=_request,
    read=_read,
    route="/generate",
    # SGLang's repetition penalty ignores the prompt, ours includes it.
    options=("top_p", "top_k", "min_p"),
    load="/load_lora_adapter",
    unload="/unload_lora_adapter",
    remedies={
        "ids": "Update SGLang.",
        "logprobs": "Update SGLang.",
        "lora": "Start it with --enable-lora --max-lora-rank {rank} --lora-target-modules all.",
        "rank": "Start it with --max-lora-rank {rank}.",
        "context": "Start it with a larger --context-length.",
    },
)
