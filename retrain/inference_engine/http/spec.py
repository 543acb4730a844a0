"""What is specific to a kind of server, and the request format that several kinds share.

The meaning of a server's log-probs is not declared but measured at start-up, since it depends on server flags.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from retrain.errors import ConfigError, ConfigIssue
from retrain.types import IntArray, JsonObject, Sampling

OPTIONS = ("top_p", "top_k", "min_p", "repetition_penalty")
_DEFAULTS = {option: getattr(Sampling(max_tokens=1), option) for option in OPTIONS}


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
    """A reply that lacks something that training needs: `what` is "token ids" or "log-probs"."""

    def __init__(self, what: str) -> None:
        super().__init__(f"the reply has no {what}")
        self.what = what


@dataclass(frozen=True)
class ServerSpec:
    """One kind of server."""

    name: str
    port: int
    command: str
    """Start command for messages, with {model}, {port} and {rank}."""
    request: Callable[[str, Adapter | None, CompletionRequest], JsonObject]
    read: Callable[[Any], list[CompletionResult]]
    route: str = "/v1/completions"
    health: str = "/health"
    models: str = "/v1/models"
    """Endpoint that lists models; if empty, requests use the trainer's model name."""
    tokenize: str = ""
    takes_ids: bool = True
    takes_n: bool = True
    options: tuple[str, ...] = OPTIONS
    """Sampling options that this server applies like retrain, besides temperature."""
    exclusive: tuple[str, ...] = ()
    """Options of which only one at a time works as in retrain; together they are applied in a different order."""
    load: str = "/v1/load_lora_adapter"
    """Endpoint that loads an adapter; empty if each request names one. Training requires adapter support."""
    unload: str = "/v1/unload_lora_adapter"
    url_required: str = ""
    """Why `[inference] url` must be set; "" if the default is this machine."""
    mlx_adapters: bool = False
    """Whether each request names an adapter folder in MLX's layout; nothing is loaded beforehand."""
    ranks: tuple[int, ...] = ()
    """Values of its option for the largest rank of an adapter; empty if it takes any."""
    remedies: Mapping[str, str] = field(default_factory=dict)
    """Fix for each missing capability: ids, logprobs, lora, rank, context, processed."""

    def start_command(self, model: str, url: str, rank: int) -> str:
        """The command that starts a server at this URL, for adapters of this rank."""
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        return self.command.format(model=model, port=port, rank=self.max_rank(rank))

    def max_rank(self, rank: int) -> int:
        """What the server's option has to be for adapters of this rank."""
        return next((value for value in self.ranks if value >= rank), rank)

    def urls(self, url: str) -> list[str]:
        """The servers that `[inference] url` names, or the default one on this machine."""
        named = [part.strip().rstrip("/").removesuffix("/v1") for part in url.split(",") if part.strip()]
        if self.url_required and not named:
            start = self.command.format(model="MODEL", port=self.port, rank="RANK")
            raise ConfigError(
                f'[inference] engine = "{self.name}" needs url: {self.url_required}  '
                f'Try: {start}, and url = "http://localhost:{self.port}"'
            )
        return list(dict.fromkeys(named)) or [f"http://127.0.0.1:{self.port}"]

    def find_unsupported(self, sampling: Sampling) -> Iterator[ConfigIssue]:
        """Options of `[training]` under which this server would sample from a different distribution than retrain."""
        changed = {option: default for option, default in _DEFAULTS.items() if getattr(sampling, option) != default}
        for option, default in changed.items():
            if option not in self.options:
                yield ConfigIssue(
                    f"[training] {option}",
                    f'= {getattr(sampling, option)} is not supported by engine = "{self.name}": it lacks the option or '
                    "interprets it differently.",
                    f"Try: {option} = {default}",
                )
        both = [option for option in changed if option in self.exclusive]
        if len(both) > 1:
            yield ConfigIssue(
                f"[training] {' and '.join(both)}",
                f'cannot both be set with engine = "{self.name}": it applies them in a different order than retrain.',
                f"Try: {both[-1]} = {changed[both[-1]]}",
            )

    def check_sampling(self, sampling: Sampling) -> None:
        """Raise for options that this server does not support."""
        issues = tuple(self.find_unsupported(sampling))
        if issues:
            raise ConfigError("the server cannot sample like this:", issues)


def completions_request(model: str, adapter: Adapter | None, request: CompletionRequest) -> JsonObject:
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


def read_choices(reply: Any) -> list[CompletionResult]:
    """OpenAI's completion shape with token ids, as vLLM and MAX send it."""
    results = []
    for choice in sorted(reply["choices"], key=lambda choice: int(choice["index"])):
        ids, logprobs = choice.get("token_ids"), choice.get("logprobs")
        if ids is None:
            raise IncompleteReply("token ids")
        if not logprobs or (ids and not logprobs.get("token_logprobs")):
            raise IncompleteReply("log-probs")
        results.append(CompletionResult(ids, logprobs["token_logprobs"], choice.get("prompt_token_ids")))
    return results
