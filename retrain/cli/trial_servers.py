"""What `retrain doctor` tries out elsewhere: Tinker services and inference servers."""

from __future__ import annotations

from retrain.checks.connections import TINKER_HEALTH, explain_no_response, find_absent_server, server_kind
from retrain.checks.keys import explain_invalid_tinker_key
from retrain.checks.preflight import models_of
from retrain.config import TrainConfig
from retrain.errors import RetrainError
from retrain.runtime.packages import find_vllm

OFFER_S = 10.0
"""Limit for a Tinker service to say which models it has."""


def try_service(config: TrainConfig) -> str:
    """Whether the service accepts the key and has the models."""
    from tinker.lib.base_url import resolve_base_url  # noqa: PLC0415  (an optional extra)

    from retrain.backends.tinker.service import Service, in_background  # noqa: PLC0415

    url = str(resolve_base_url(config.model.base_url or None))
    problem = explain_no_response(url + TINKER_HEALTH)
    if problem:
        raise RetrainError(
            f"the Tinker service at {url} does not respond: {problem}  Try: check the network and [model] base_url"
        )
    if explain_invalid_tinker_key():
        return f"{url} responds"  # the key is reported by another check
    service = Service(config.model.base_url, lambda line: None)
    for where, name in models_of(config).items():
        asked = in_background(lambda name=name, where=where: service.find_model(name, where))  # type: ignore[misc]
        try:
            offered = asked.result(OFFER_S)
        except TimeoutError as error:
            # The SDK retries for minutes, and without end while the account cannot be billed.
            raise RetrainError(
                f"the Tinker service at {url} did not say within {OFFER_S:.0f} s what it offers.  "
                "Try: check the account and the status of the service"
            ) from error
        if offered is None:
            return f"{url} accepts the key and does not list its models"
    return f"{url} accepts the key and has {', '.join(models_of(config).values())}"


def try_servers(config: TrainConfig) -> str:
    """Whether the servers respond, and serve the model."""
    problem, start = find_absent_server(config)
    if problem:
        raise RetrainError(f"{problem}  Try: {start}")
    from retrain.inference_engine.http.identity import identify_servers  # noqa: PLC0415  (imports transformers)
    from retrain.modeling.tokens import load_tokenizer  # noqa: PLC0415

    identify_servers(server_kind(config), config, load_tokenizer(config.model.model))
    return f"{', '.join(server_kind(config).urls(config.inference.url))} responded"


def try_launch(config: TrainConfig) -> str:
    """Whether vLLM can be started here."""
    return f"{find_vllm()} starts it"
