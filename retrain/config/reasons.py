"""Reasons why an option has no effect, for the `unused` facet of its declaration.

A name that is not built in belongs to a plugin. Plugins receive complete tables and may read any option of them, so
options count as used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from retrain.config.declare import Reason
from retrain.config.toml import show_value
from retrain.plugins import REGISTRIES, SERVER_ENGINES, is_plugin
from retrain.runtime.devices import is_on_cpu

if TYPE_CHECKING:
    from retrain.config.schema import TrainConfig


def used_if(path: str, is_used: Callable[[Any], bool]) -> Reason:
    """Used if the option at `path` has such a value; the reason states the value it has."""
    section, _, key = path.partition(".")

    def reason(config: TrainConfig) -> str:
        value = getattr(getattr(config, section), key)
        shown = (value or "empty") if isinstance(value, str) else show_value(value)
        return "" if is_used(value) else f"[{section}] {key} is {shown}"

    return reason


def first_of(*reasons: Reason) -> Reason:
    """The first reason that applies."""
    return lambda config: next(filter(None, (reason(config) for reason in reasons)), "")


def always(text: str) -> Reason:
    """The same reason under every configuration."""
    return lambda config: text


never = always("")
"""Always used: for the switch of a table whose other options depend on it."""

needs_adapter = used_if("model.lora_rank", bool)
needs_local_backend = used_if("backend.backend", "local".__eq__)
needs_remote_backend = used_if("backend.backend", lambda name: name != "local")
needs_no_algorithm = used_if("algorithm.algorithm_mode", lambda path: not path)
needs_semantic_planning = used_if("planning.detector", lambda name: name != "regex")
needs_moving_reference = first_of(used_if("kl.beta", bool), used_if("kl.sync_ref_model", bool))
needs_server = used_if("inference.engine", lambda name: name != "pytorch")


def needs_plugin(kind: str, path: str) -> Reason:
    """Used only by plugins."""
    return used_if(path, lambda name: is_plugin(kind, name))


def needs_tinker_service(config: TrainConfig) -> str:
    """Used with a remote backend, or to download the adapter of a squeeze."""
    remote = config.squeeze is not None and config.squeeze.adapter_path.startswith("tinker://")
    return "" if remote else needs_remote_backend(config)


def needs_transform_plugin(config: TrainConfig) -> str:
    """Used by custom transforms and algorithms."""
    return "" if config.algorithm.algorithm_mode else needs_plugin("transform", "algorithm.transform_mode")(config)


def needs_own_machine(config: TrainConfig) -> str:
    """Used if this machine trains, or runs the turns of an environment in a fixed order."""
    in_rounds = config.environment.provider and config.training.deterministic is True
    return "" if config.backend.backend != "tinker" or in_rounds else "[backend] backend is tinker"


def needs_separate_sampler(config: TrainConfig) -> str:
    """Used if sampling and training can overlap."""
    return "" if config.samples_separately else "sampling and training share one device"


def trains_complete_steps(config: TrainConfig) -> str:
    """Why steps of the local backend cannot be overlapped, where the configuration alone decides it."""
    if config.training.async_steps:
        return "this backend trains on complete steps"
    if config.lora.dropout:
        return "[lora] dropout draws its masks in the order of training"
    if config.memory.micro_batches:
        return "[memory] micro_batches splits complete steps"
    if config.teaching.enabled:
        return "[teaching] scores the teaching texts of a step together"
    on_cpu = config.inference.engine == "pytorch" and is_on_cpu(config.backend.devices)
    return "the engine returns the completions of a step together" if on_cpu else ""


def needs_ratio_cap(config: TrainConfig) -> str:
    """Used if the loss caps ratios; 0 turns the cap off, which needs no note."""
    loss = config.loss
    is_read = not loss.ratio_cap or REGISTRIES["loss"].reads(loss.type, "ratio_cap")
    return "" if is_read else f"[loss] type is {loss.type}"


def needs_frozen_model(config: TrainConfig) -> str:
    """Used if a reference or a separate student is in memory."""
    teaching = config.teaching
    student = teaching.student_model or (teaching.enabled and not config.model.lora_rank)
    return "" if config.kl.beta or student else "there is no reference ([kl] beta) and no student of its own"


def can_launch_server(config: TrainConfig) -> str:
    """Used if a vLLM server can be started."""
    inference = config.inference
    if inference.engine != "vllm":
        return f"[inference] engine is {inference.engine}, and only vLLM servers can be started"
    return "[inference] url names a server" if inference.url else ""


launches_server = first_of(can_launch_server, used_if("inference.launch", bool))


def not_on_servers(key: str, launched: str = "") -> Reason:
    """Used by engines in this process; a server may have a flag for it. `launched` is the option that a server started
    by the run uses instead."""

    def reason(config: TrainConfig) -> str:
        engine = config.inference.engine
        if engine not in SERVER_ENGINES:
            return ""
        if launched and config.inference.starts_server:
            return f"the server that is started takes {launched}"
        flag = REGISTRIES["engine"].facts(engine).server_flags.get(key)
        return f"[inference] engine is {engine}" + (f"; start its server with {flag}" if flag else "")

    return reason


def needs_no_environment(config: TrainConfig) -> str:
    """Used unless an environment provides problems and rewards."""
    provider = config.environment.provider
    return f"[environment] provider is {provider}" if provider else ""


def read_by_source(key: str) -> Reason:
    """Used if a data source in use reads this option of [data]."""

    def reason(config: TrainConfig) -> str:
        if in_environment := needs_no_environment(config):
            return in_environment
        sources = {config.data.source} | ({config.held_out_source} if config.eval.every else set())
        is_read = any(REGISTRIES["data"].reads(source, key) for source in sources)
        return "" if is_read else f"[data] source is {config.data.source}"

    return reason


def read_by_training_source(key: str) -> Reason:
    """Used if the data source of training reads this option of [data]; evaluation has its own."""
    return first_of(needs_no_environment, used_if("data.source", lambda source: REGISTRIES["data"].reads(source, key)))


def needs_held_out_data(config: TrainConfig) -> str:
    """Used unless an environment provides held-out tasks."""
    return "an environment brings its own held-out problems" if config.environment.provider else ""


def needs_held_out_file(config: TrainConfig) -> str:
    """Used if the data source of evaluations reads a file."""
    source, section = config.held_out_source, "eval" if config.eval.source else "data"
    reads_file = REGISTRIES["data"].reads(source, "path")
    return needs_held_out_data(config) or ("" if reads_file else f"[{section}] source is {source}, which reads no file")


def needs_splits(config: TrainConfig) -> str:
    """Used if the data source of evaluations has splits."""
    has_splits = REGISTRIES["data"].reads(config.held_out_source, "split")
    return f"a {config.held_out_source} file has no splits" if config.eval.every and not has_splits else ""


def needs_reward(*types: str, otherwise: str) -> Reason:
    """Used by rewards of these types; `otherwise` is the reason if none of [reward] terms is one."""

    def reason(config: TrainConfig) -> str:
        terms = config.reward.terms
        if terms:
            return "" if any(term.type in types for term in terms) else otherwise
        return used_if("reward.type", lambda name: name in types)(config)

    return first_of(needs_no_environment, reason)


needs_judge = needs_reward("judge", otherwise="none of [reward] terms is a judge")
needs_boxed_answers = needs_reward("match", "math", otherwise="none of [reward] terms looks for a box")


def has_no_terms(config: TrainConfig) -> str:
    """Used unless the reward has terms, which have their own."""
    return "[reward] terms replace it" if config.reward.terms else ""


needs_single_reward = first_of(needs_no_environment, has_no_terms)
needs_custom_reward = first_of(needs_single_reward, used_if("reward.type", "custom".__eq__))


def _has_other_than_judges(config: TrainConfig) -> str:
    terms = config.reward.terms
    if terms:
        return "all of [reward] terms are judges" if all(term.type == "judge" for term in terms) else ""
    return used_if("reward.type", lambda name: name != "judge")(config)


needs_scoring_processes = first_of(needs_no_environment, _has_other_than_judges)
"""Used by the processes that score completions; a judge is asked over HTTP."""
