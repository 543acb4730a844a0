"""How each kind of server is spoken to: one table a server, and the few functions they share.

What a server's log-probs mean is not written here: it is measured when a run starts, for some of it is a server's flag.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from retrain.types import IntArray, Sampling

OPTIONS = ("top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class Adapter:
    """An adapter on disk, under the name that servers know it by. The name is never used twice."""

    name: str
    path: Path


@dataclass(frozen=True)
class Ask:
    """A prompt, and how `sampling.n` completions of it are drawn by one request."""

    prompt_ids: IntArray
    prompt_text: str
    """The same prompt, for servers that take text alone."""
    sampling: Sampling
    stop_ids: tuple[int, ...]


@dataclass(frozen=True)
class Answer:
    """One completion as a server sent it."""

    token_ids: list[int]
    logprobs: list[float]
    prompt_ids: list[int] | None = None
    """The prompt that it completes, from servers that tell."""


class Lacking(Exception):
    """An answer without something that training needs: `what` is "token ids" or "log-probs"."""

    def __init__(self, what: str) -> None:
        super().__init__(f"the answer has no {what}")
        self.what = what


@dataclass(frozen=True)
class Wire:
    """One kind of server."""

    name: str
    port: int
    command: str
    """What starts one, for messages; {model} and {port} are filled in."""
    request: Callable[[str, Adapter | None, Ask], dict[str, Any]]
    read: Callable[[Any], list[Answer]]
    route: str = "/v1/completions"
    health: str = "/health"
    models: str = "/v1/models"
    """Lists what is served; empty where the list is of no use, and requests name the model as the trainer does."""
    tokenize: str = ""
    takes_ids: bool = True
    takes_n: bool = True
    options: tuple[str, ...] = OPTIONS
    """Sampling options that this server applies as retrain does; temperature goes without saying."""
    apart: tuple[str, ...] = ()
    """Of these, one alone is applied as retrain does; together they are cut by in another order."""
    load: str = "/v1/load_lora_adapter"
    unload: str = "/v1/unload_lora_adapter"
    mlx_adapters: bool = False
    """Adapters are named in each request, by a folder in MLX's own layout; nothing is loaded beforehand."""
    remedies: Mapping[str, str] = field(default_factory=dict)
    """What mends a miss: ids, logprobs, lora, rank, context, processed."""


def _completions(model: str, adapter: Adapter | None, ask: Ask) -> dict[str, Any]:
    """The request that vLLM, MAX and their like understand; an adapter is a model of its own."""
    sampling = ask.sampling
    return {
        "model": adapter.name if adapter else model,
        "prompt": ask.prompt_ids.tolist(),
        "n": sampling.n,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": sampling.seed,
        "logprobs": 1,
        "return_token_ids": True,
    }


def _vllm(model: str, adapter: Adapter | None, ask: Ask) -> dict[str, Any]:
    sampling = ask.sampling
    return _completions(model, adapter, ask) | {
        "logprobs": 0,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "stop_token_ids": list(ask.stop_ids),
    }


def _max(model: str, adapter: Adapter | None, ask: Ask) -> dict[str, Any]:
    sampling = ask.sampling
    # With logprobs = 0 MAX sends an empty list, so it stays 1.
    return _completions(model, adapter, ask) | {
        "top_k": sampling.top_k or -1,
        "stop_token_ids": list(ask.stop_ids),
    }


def _mlx(model: str, adapter: Adapter | None, ask: Ask) -> dict[str, Any]:
    sampling = ask.sampling
    told = {
        "model": model,
        "prompt": ask.prompt_text,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "seed": sampling.seed,
        # A bool, and never top_logprobs: with it the server sends the likeliest token in place of the sampled one.
        "logprobs": True,
    }
    return told | ({"adapters": str(adapter.path)} if adapter else {})


def _sglang(model: str, adapter: Adapter | None, ask: Ask) -> dict[str, Any]:
    sampling = ask.sampling
    told = {
        "input_ids": ask.prompt_ids.tolist(),
        "sampling_params": {
            "n": sampling.n,
            "max_new_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "stop_token_ids": list(ask.stop_ids),
            "sampling_seed": sampling.seed % 2**31,
        },
        "return_logprob": True,
    }
    return told | ({"lora_path": adapter.name} if adapter else {})


def _read_choices(reply: Any) -> list[Answer]:
    """OpenAI's completion shape with token ids, as vLLM and MAX send it."""
    answers = []
    for choice in sorted(reply["choices"], key=lambda choice: int(choice["index"])):
        ids, told = choice.get("token_ids"), choice.get("logprobs")
        if ids is None:
            raise Lacking("token ids")
        if not told or not told.get("token_logprobs"):
            raise Lacking("log-probs")
        answers.append(Answer(ids, told["token_logprobs"], choice.get("prompt_token_ids")))
    return answers


def _read_mlx(reply: Any) -> list[Answer]:
    answers = []
    for choice in reply["choices"]:
        told = choice.get("logprobs")
        if not told or not told.get("content"):
            raise Lacking("log-probs")
        if any("id" not in token for token in told["content"]):
            raise Lacking("token ids")
        answers.append(Answer([t["id"] for t in told["content"]], [t["logprob"] for t in told["content"]]))
    return answers


def _read_sglang(reply: Any) -> list[Answer]:
    """An object for one completion, a list for several; each token as [log-prob, id, text]."""
    answers = []
    for one in reply if isinstance(reply, list) else [reply]:
        if "output_ids" not in one:
            raise Lacking("token ids")
        told = one["meta_info"].get("output_token_logprobs")
        if told is None:
            raise Lacking("log-probs")
        answers.append(Answer(one["output_ids"], [token[0] for token in told]))
    return answers


VLLM = Wire(
    name="vllm",
    port=8000,
    command="VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve {model} --port {port} --enable-lora",
    request=_vllm,
    read=_read_choices,
    tokenize="/tokenize",
    # It cuts by min_p first and takes top_p of what that leaves; retrain does it the other way round.
    apart=("top_p", "min_p"),
    remedies={
        "ids": "vLLM sends token ids from 0.10.2 on; update it.",
        "logprobs": "Start it without --max-logprobs 0.",
        "lora": "Start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its environment.",
        "rank": "Start it with --max-lora-rank {rank}.",
        "context": "Start it with a larger --max-model-len.",
        "processed": "--logprobs-mode processed_logprobs",
    },
)
SGLANG = Wire(
    name="sglang",
    port=30000,
    command="python -m sglang.launch_server --model-path {model} --port {port} --enable-lora --max-lora-rank RANK "
    "--lora-target-modules all",
    request=_sglang,
    read=_read_sglang,
    route="/generate",
    # SGLang's repetition penalty leaves the prompt out, ours counts it.
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
MLX = Wire(
    name="mlx",
    port=8080,
    command="mlx_lm.server --model {model} --port {port}",
    request=_mlx,
    read=_read_mlx,
    # Its list is empty without a hub cache, and with the name "default_model" it ignores the adapter.
    models="",
    takes_ids=False,
    takes_n=False,
    # It cuts by top_p and min_p before the temperature, we after it; its repetition penalty looks back 20 tokens.
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
MAX = Wire(
    name="max",
    port=8000,
    command="max serve --model {model} --port {port} --enable-lora --no-enable-prefix-caching --prefer-module-v3",
    request=_max,
    read=_read_choices,
    takes_n=False,
    # Whether it cuts before or after the temperature was not found out.
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
OPENAI = Wire(
    name="openai",
    port=8000,
    command="a server with /v1/completions, token ids, log-probs and /v1/load_lora_adapter",
    request=_completions,
    read=_read_choices,
    health="/v1/models",
    options=("top_p",),
    remedies={
        "ids": "It must know return_token_ids, as vLLM does; a server that sends text alone cannot be trained with.",
        "logprobs": "It must send the log-prob of every sampled token; a server that cannot is of no use here.",
        "lora": "It must load adapters while it runs, by POST /v1/load_lora_adapter as vLLM does.",
        "rank": "Raise its limit to {rank}.",
        "context": "Give it a longer context.",
    },
)
