"""Other servers with the API of vLLM."""

from __future__ import annotations

from retrain.inference_engine.http.spec import ServerSpec, completions_request, read_choices

OPENAI = ServerSpec(
    name="openai",
    port=8000,
    command="a server with /v1/completions, token ids, log-probs and /v1/load_lora_adapter",
    request=completions_request,
    read=read_choices,
    health="/v1/models",
    options=("top_p",),
    remedies={
        "ids": "It must support return_token_ids, as vLLM does; a server that returns text only cannot be used.",
        "logprobs": "It must return the log-prob of every sampled token.",
        "lora": "It must load adapters at runtime with POST /v1/load_lora_adapter, as vLLM does.",
        "rank": "Raise its limit to {rank}.",
        "context": "Give it a longer context.",
    },
)
