"""Specifications of the supported kinds of servers, and their request formats.

The meaning of a server's log-probs is not declared here but measured at start-up, since it depends on server flags.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from retrain.types import IntArray, JsonObject, Sampling

OPTIONS = ("top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class Adapter:
    """An adapter on disk, with its unique name on the servers."""

    name: str
    path: Path


@dataclass(frozen=True)
class CompletionRequest:
    """A request for `sampling.n` completions of a prompt."""

    prompt_ids: IntArray
    prompt_text: str
    """The same prompt, for servers that take text only."""
    sampling: Sampling
    stop_ids: tuple[int, ...]


@dataclass(frozen=True)
class CompletionResult:
    """One completion from a server."""

    token_ids: list[int]
    logprobs: list[float]
    prompt_ids: list[int] | None = None
    """Token ids of its prompt, if the server returns them."""


class IncompleteReply(Exception):
    """An answer without something that training needs: `what` is "token ids" or "log-probs"."""

    def __init__(self, what: str) -> None:
        super().__init__(f"the answer has no {what}")
        self.what = what


@dataclass(frozen=True)
class ServerSpec:
    """One kind of server."""

    name: str
    port: int
    command: str
    """Start command for messages, with {model} and {port}."""
    request: Callable[[str, Adapter | None, CompletionRequest], JsonObject]
    read: Callable[[Any], list[CompletionResult]]
    route: str = "/v1/completions"
    health: str = "/health"
    models: str = "/v1/models"
    """Endpoint that lists models; empty where it is useless, and requests use the trainer's model name."""
    tokenize: str = ""
    takes_ids: bool = True
    takes_n: bool = True
    options: tuple[str, ...] = OPTIONS
    """Sampling options that this server applies like retrain, besides temperature."""
    exclusive: tuple[str, ...] = ()
    """Options that work like retrain only one at a time; together they are applied in another order."""
    load: str = "/v1/load_lora_adapter"
    unload: str = "/v1/unload_lora_adapter"
    mlx_adapters: bool = False
    """Whether each request names an adapter folder in MLX's layout; nothing is loaded beforehand."""
    remedies: Mapping[str, str] = field(default_factory=dict)
    """Fix for each missing capability: ids, logprobs, lora, rank, context, processed."""


def _completions(model: str, adapter: Adapter | None, request: CompletionRequest) -> JsonObject:
    """Request body of vLLM, MAX and similar servers; an adapter is a model name."""
    sampling = request.sampling
    return {
        "model": adapter.name if adapter else model,
        "prompt": request.prompt_ids.tolist(),
        "n": sampling.n,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": sampling.seed,
        "logprobs": 1,
        "return_token_ids": True,
    }


def _vllm(model: str, adapter: Adapter | None, request: CompletionRequest) -> JsonObject:
    sampling = request.sampling
    return _completions(model, adapter, request) | {
        "logprobs": 0,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "stop_token_ids": list(request.stop_ids),
    }


def _max(model: str, adapter: Adapter | None, request: CompletionRequest) -> JsonObject:
    sampling = request.sampling
    # With logprobs = 0 MAX sends an empty list, so it stays 1.
    return _completions(model, adapter, request) | {
        "top_k": sampling.top_k or -1,
        "stop_token_ids": list(request.stop_ids),
    }


def _mlx(model: str, adapter: Adapter | None, request: CompletionRequest) -> JsonObject:
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


def _sglang(model: str, adapter: Adapter | None, request: CompletionRequest) -> JsonObject:
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


def _read_choices(reply: Any) -> list[CompletionResult]:
    """OpenAI's completion shape with token ids, as vLLM and MAX send it."""
    results = []
    for choice in sorted(reply["choices"], key=lambda choice: int(choice["index"])):
        ids, logprobs = choice.get("token_ids"), choice.get("logprobs")
        if ids is None:
            raise IncompleteReply("token ids")
        if not logprobs or not logprobs.get("token_logprobs"):
            raise IncompleteReply("log-probs")
        results.append(CompletionResult(ids, logprobs["token_logprobs"], choice.get("prompt_token_ids")))
    return results


def _read_mlx(reply: Any) -> list[CompletionResult]:
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


def _read_sglang(reply: Any) -> list[CompletionResult]:
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


VLLM = ServerSpec(
    name="vllm",
    port=8000,
    command="VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve {model} --port {port} --enable-lora",
    request=_vllm,
    read=_read_choices,
    tokenize="/tokenize",
    # It applies min_p before top_p; retrain applies top_p first.
    exclusive=("top_p", "min_p"),
    remedies={
        "ids": "vLLM sends token ids from 0.10.2 on; update it.",
        "logprobs": "Start it without --max-logprobs 0.",
        "lora": "Start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its environment.",
        "rank": "Start it with --max-lora-rank {rank}.",
        "context": "Start it with a larger --max-model-len.",
        "processed": "--logprobs-mode processed_logprobs",
    },
)
SGLANG = ServerSpec(
    name="sglang",
    port=30000,
    command="python -m sglang.launch_server --model-path {model} --port {port} --enable-lora --max-lora-rank RANK "
    "--lora-target-modules all",
    request=_sglang,
    read=_read_sglang,
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
MLX = ServerSpec(
    name="mlx",
    port=8080,
    command="mlx_lm.server --model {model} --port {port}",
    request=_mlx,
    read=_read_mlx,
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
MAX = ServerSpec(
    name="max",
    port=8000,
    command="max serve --model {model} --port {port} --enable-lora --no-enable-prefix-caching --prefer-module-v3",
    request=_max,
    read=_read_choices,
    takes_n=False,
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
OPENAI = ServerSpec(
    name="openai",
    port=8000,
    command="a server with /v1/completions, token ids, log-probs and /v1/load_lora_adapter",
    request=_completions,
    read=_read_choices,
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
