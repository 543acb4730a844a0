"""Servers started with `max serve`.

MAX cannot be used for training in this process. In 26.7.0 offline inference is one private class, LLM in
max._entrypoints.llm: its generate() takes text and a length, gives text, and has no seed, temperature or adapter.
"""

from __future__ import annotations

from retrain.inference_engine.http.spec import Adapter, CompletionRequest, ServerSpec, completions_request, read_choices
from retrain.types import JsonObject


def _request(model: str, adapter: Adapter | None, request: CompletionRequest) -> JsonObject:
    sampling = request.sampling
    # With logprobs = 0 MAX sends an empty list, so it stays 1.
    return completions_request(model, adapter, request) | {
        "top_k": sampling.top_k or -1,
        "stop_token_ids": list(request.stop_ids),
    }


MAX = ServerSpec(
    name="max",
    port=8000,
    command="max serve --model {model} --port {port} --enable-lora --no-enable-prefix-caching --prefer-module-v3",
    request=_request,
    read=read_choices,
    takes_n=False,
    url_required="in this process, MAX (checked in 26.7.0) takes and returns text, without token ids or log-probs.",
    # Unknown whether it filters before or after the temperature.
    options=("top_k",),
    remedies={
        "ids": "Update MAX; 26.7 sends them.",
        "logprobs": "Update MAX; 26.7 sends them.",
        "lora": "Start it with --enable-lora --no-enable-prefix-caching --prefer-module-v3, on a GPU: MAX's adapter "
        "kernels (SGMV) do not run on a CPU.",
        "rank": "Start it with --max-lora-rank {rank}.",
        "context": "Start it with a larger --max-length.",
    },
)
