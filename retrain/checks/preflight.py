"""Checks before loading: problems that would end the run later, found within seconds and without PyTorch."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import shlex
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path

from retrain.checks.connections import check_tinker_address, server_kind
from retrain.checks.keys import find_wandb_issues, missing_keys
from retrain.checks.user_code import find_missing_plugins, find_reward_issues
from retrain.config import TrainConfig
from retrain.config.options import Option, all_options, ignored_on_tinker, values_of
from retrain.config.reasons import trains_complete_steps
from retrain.config.schema import Data
from retrain.data import build_source, describe_shared, held_out_section, load_examples, load_held_out, reads_file
from retrain.data.hub import OFFLINE_HINT, FromHub, is_on_hub_only
from retrain.data.order import endless_epochs
from retrain.errors import ConfigError, ConfigIssue
from retrain.modeling.files import (
    MERGE_HINT,
    NO_TOKENIZER,
    NO_WEIGHTS,
    find_base,
    find_damaged_files,
    find_lacking_files,
    find_model,
    hub_cache,
    is_quantized,
    lacks_tokenizer,
    lacks_weights,
    read_context_length,
    suggest_restoring,
    suggest_tokenizer,
)
from retrain.modeling.sampling import training_distribution
from retrain.plugins import REGISTRIES, SERVER_ENGINES
from retrain.runtime.devices import is_on_cpu
from retrain.runtime.packages import find_vllm, install_command
from retrain.runtime.text import list_some

HUB_S = 4.0
"""Timeout in seconds of the check that the Hub can be reached."""


def check_before_loading(config: TrainConfig, log: Callable[[str], None] = lambda line: None) -> None:
    """Raise one error with all obstacles, or that the Tinker service is not there.

    If the Hub cannot be reached, only the cache is used.
    """
    issues = tuple(find_obstacles(config))
    if not issues and needs_hub(config) and use_cache_if_unreachable(log):
        issues = tuple(find_obstacles(config))
    if issues:
        raise ConfigError("this configuration cannot be run here:", issues)
    if config.backend.backend == "local" and config.inference.engine in SERVER_ENGINES and config.inference.launch:
        find_vllm()
    check_tinker_address(config)


def check_files_of_problems(configs: Sequence[TrainConfig]) -> None:
    """Raise for a file of `[data]` or `[eval]` with invalid rows. Each is read once; a plugin is left to the run."""
    sections: dict[str, Data] = {}
    for config in configs:
        if not config.environment.provider:
            held_out = [held_out_section(config)] if config.eval.every else []
            sections |= {str(section): section for section in (config.data, *held_out)}
    for section in sections.values():
        if reads_file(section.source):
            load_examples(section)


def find_shared_problems(configs: Sequence[TrainConfig]) -> list[str]:
    """Sentences about held-out problems in files of which some are trained on as well; the files are valid."""
    both: dict[str, TrainConfig] = {}
    for config in configs:
        is_file = reads_file(config.data.source) and reads_file(config.held_out_source)
        if is_file and config.eval.every and not config.environment.provider:
            both[f"{config.data} {config.eval}"] = config
    found = [describe_shared(load_examples(config.data), load_held_out(config)) for config in both.values()]
    return list(dict.fromkeys(filter(None, found)))


def find_obstacles(config: TrainConfig) -> Iterator[ConfigIssue]:
    """Missing packages, keys, files, rewards and models, and completions that do not fit the context."""
    yield from _missing_packages(config)
    yield from (issue for _, issue in missing_keys(config))
    yield from find_wandb_issues(config)
    yield from _missing_files(config)
    yield from find_reward_issues(config)
    yield from find_missing_plugins(config)
    for where, name in models_of(config).items():
        yield from _quantized_model(where, name)
        yield from find_missing_model(where, name)
        yield from find_missing_tokenizer(where, name)
        # A service reads no weights here.
        if config.backend.backend != "tinker":
            yield from find_damaged_weights(where, name)
        if reads_weights(config):
            yield from find_missing_weights(where, name)
    yield from _replaced_models(config)
    yield from _missing_datasets(config)
    yield from _too_long(config)
    yield from _endless_epochs(config)
    yield from _unsupported_sampling(config)
    yield from _impossible_overlap(config)
    yield from _needing_a_gpu(config)


def models_of(config: TrainConfig) -> dict[str, str]:
    """The models that a run loads, by option."""
    student = config.teaching.student_model if config.teaching.enabled else ""
    return {"[model] model": config.model.model} | ({"[teaching] student_model": student} if student else {})


def _quantized_model(where: str, name: str) -> Iterator[ConfigIssue]:
    if is_quantized(find_model(name)):
        text = f"= {json.dumps(name)} has quantized weights; retrain quantizes the original as it loads it."
        yield ConfigIssue(where, text, 'Try: the model it was made from, with [model] quantization = "nf4"')


def find_missing_model(where: str, name: str) -> Iterator[ConfigIssue]:
    """An issue if a model, named by the option `where`, is an adapter, or neither here nor to be downloaded."""
    files = find_model(name)
    key, found, base = where.split()[-1], files.found, find_base(files)
    if base:
        # transformers would load the base with the adapter, and training would replace the adapter.
        yield ConfigIssue(where, f"= {json.dumps(name)} holds an adapter of {base}, not a model.", MERGE_HINT)
    elif found == "folder" and (lacking := find_lacking_files(files)):
        text = f"= {json.dumps(name)} is incomplete: its index names {list_some(lacking)}."
        yield ConfigIssue(where, text, "Try: copy or download it again")
    elif found == "file":
        how = f'retrain import-gguf {shlex.quote(name)} FOLDER, and {key} = "FOLDER"' if name.endswith(".gguf") else ""
        hint = f"Try: {how or 'the folder that holds it'}"
        yield ConfigIssue(where, f"= {json.dumps(name)} is a file, not the folder of a model.", hint)
    elif found == "missing":
        yield ConfigIssue(where, f"= {json.dumps(name)}: no such folder.", f'Try: {key} = "path/to/model", or a Hub id')
    elif found == "download" and is_offline() and not _is_partly_cached(name):
        yield ConfigIssue(
            where,
            f"= {json.dumps(name)}: no such folder, not in the cache of the Hugging Face Hub, and the Hub cannot be "
            "reached.",
            f'Try: download it elsewhere and name its folder, {key} = "path/to/model"; or {key} = "builtin:tiny"',
        )


def reads_weights(config: TrainConfig) -> bool:
    """Whether weights are read from the usual files here: a service and a plugin have their own."""
    return config.backend.backend == "local" and not config.model.init_kwargs


def find_missing_weights(where: str, name: str) -> Iterator[ConfigIssue]:
    """An issue if a model, named by the option `where`, lacks weights that will not be downloaded."""
    files = find_model(name)
    if files.found == "cache" and is_offline() and (lacking := find_lacking_files(files)):
        text = f"= {json.dumps(name)} is incomplete in the cache of the Hugging Face Hub, which cannot be reached"
        yield ConfigIssue(where, f"{text}: it lacks {list_some(lacking)}.", f"Try: HF_HUB_OFFLINE=0 hf download {name}")
    # An adapter is reported as such.
    if lacks_weights(files) and not find_base(files):
        yield ConfigIssue(where, f"= {json.dumps(name)} {NO_WEIGHTS}.", "Try: copy or download it again")


def _replaced_models(config: TrainConfig) -> Iterator[ConfigIssue]:
    """Models in whose folder the run would write what it trains."""
    # A service writes nothing here, and the runs of a campaign have folders of their own.
    if config.backend.backend == "tinker" or config.kind == "campaign":
        return
    path = config.backend.adapter_path
    written = Path(path).expanduser().resolve()
    for where, name in models_of(config).items():
        folder = find_model(name).folder
        if folder is not None and folder.resolve() == written:
            text = f"= {json.dumps(path)} is the folder of {where}, which the run would replace."
            yield ConfigIssue("[backend] adapter_path", text, "Try: another --adapter-path")


def find_missing_tokenizer(where: str, name: str) -> Iterator[ConfigIssue]:
    """An issue if the folder of a model, named by the option `where`, has no tokenizer."""
    files = find_model(name)
    if lacks_tokenizer(files):
        yield ConfigIssue(where, f"= {json.dumps(name)} {NO_TOKENIZER}", suggest_tokenizer(files))


def find_damaged_weights(where: str, name: str) -> Iterator[ConfigIssue]:
    """An issue if weights of a model, named by the option `where`, are truncated or otherwise cannot be read."""
    files = find_model(name)
    if damaged := find_damaged_files(files):
        yield ConfigIssue(where, f"= {json.dumps(name)}: {list_some(damaged)}.", suggest_restoring(files))


def _is_partly_cached(name: str) -> bool:
    """Whether some files are in the cache, such as the tokenizer; then the libraries decide if they suffice."""
    return any((hub_cache() / f"models--{name.replace('/', '--')}" / "snapshots").glob("*/*.json"))


def _missing_datasets(config: TrainConfig) -> Iterator[ConfigIssue]:
    if config.environment.provider or not is_offline():
        return
    held_out = {"[eval] source": held_out_section(config)} if config.eval.every else {}
    missing: dict[str, str] = {}
    for where, section in ({"[data] source": config.data} | held_out).items():
        if REGISTRIES["data"].facts(section.source).from_hub:
            source = build_source(section)
            assert isinstance(source, FromHub)
            if is_on_hub_only(source.dataset) and source.dataset not in missing:
                missing[source.dataset] = f"{where} = {json.dumps(section.source)}"
    for dataset, where in missing.items():
        reason = "which is not in the cache of the Hugging Face Hub. The Hub cannot be reached."
        if dataset.startswith((".", "~")):
            reason = "but there is no such folder."
        # The table that names it is the one to change.
        hint = OFFLINE_HINT.replace("[data]", where.partition(" ")[0])
        yield ConfigIssue(where, f"needs the dataset {dataset}, {reason}", hint)


def _missing_files(config: TrainConfig) -> Iterator[ConfigIssue]:
    if config.environment.provider:
        return
    files = (config.data.path, config.eval.path)
    for where, path, source in (
        ("[data] path", config.data.path, config.data.source),
        ("[eval] path", config.eval.path if config.eval.every else "", config.held_out_source),
    ):
        if path and "path" in REGISTRIES["data"].facts(source).reads and not _exists(path):
            looked = "" if Path(path).expanduser().is_absolute() else f" (looked in {Path.cwd()})"
            text = f"= {json.dumps(path)}: there is no file {path}{looked}."
            yield ConfigIssue(where, text, _suggest_file(path, files))


def _suggest_file(path: str, used: Sequence[str]) -> str:
    """The file with the most similar name in the same folder, if there is one; not the one of the other table."""
    folder = Path(path).expanduser().parent
    others = sorted({other.name for other in folder.glob("*.json*")} - {Path(name).name for name in used})
    close = get_close_matches(Path(path).name, others, n=1)
    if close:
        return f"Try: path = {json.dumps(str(Path(path).with_name(close[0])))}"
    relative = "" if Path(path).expanduser().is_absolute() else ", which is relative to the working directory"
    return f"Try: check the path{relative}; the file has one JSON object per line"


def _exists(path: str) -> bool:
    try:
        return Path(path).expanduser().exists()
    except (OSError, ValueError):
        return True  # not a valid path, which is reported when it is read


def _too_long(config: TrainConfig) -> Iterator[ConfigIssue]:
    """Completions that leave no room for a prompt; environments truncate theirs."""
    if config.backend.backend == "tinker" or config.environment.provider:
        return
    context = known_context(config)
    if context is not None and config.training.max_tokens >= context:
        yield ConfigIssue(
            "[training] max_tokens",
            f"= {config.training.max_tokens} and a prompt do not fit the model's context of {context}.",
            f"Try: max_tokens = {context // (4 if config.teaching.enabled else 2)}",
        )


def _endless_epochs(config: TrainConfig) -> Iterator[ConfigIssue]:
    """Passes over examples without end; of a plugin or an environment, that is seen once it is loaded."""
    training, is_endless = config.training, REGISTRIES["data"].facts(config.data.source).endless
    if training.epochs and not training.max_examples and is_endless and not config.environment.provider:
        yield ConfigIssue("[training] epochs", *endless_epochs(training))


def _unsupported_sampling(config: TrainConfig) -> Iterator[ConfigIssue]:
    """Sampling options that the kind of server lacks; a custom engine checks its own."""
    if config.backend.backend == "local" and config.inference.engine in SERVER_ENGINES:
        yield from server_kind(config).find_unsupported(training_distribution(config))


def _needing_a_gpu(config: TrainConfig) -> Iterator[ConfigIssue]:
    """Options of the engine that no CPU supports; whether a GPU does is seen once it is in use."""
    if (
        config.backend.backend != "local"
        or config.inference.engine != "pytorch"
        or not is_on_cpu(config.backend.devices)
    ):
        return
    for key, value, default in (("attention_kernel", "triton", "default"), ("dtype", "fp8", "auto")):
        if values_of(config)[f"inference.{key}"] == value:
            yield ConfigIssue(f"[inference] {key}", f'= "{value}" needs a GPU.', f'Try: {key} = "{default}"')


def _impossible_overlap(config: TrainConfig) -> Iterator[ConfigIssue]:
    """Overlapped steps that are asked for and cannot be; whether a plugin allows them is seen once it is loaded."""
    if config.training.overlap is True and config.backend.backend == "local":
        reason = trains_complete_steps(config)
        if reason:
            hint = 'Try: overlap = "auto", which falls back to sequential steps'
            yield ConfigIssue("[training] overlap", f"= true is not possible: {reason}.", hint)


def known_context(config: TrainConfig) -> int | None:
    """Context length in the files of the model; None if it is not there, or may be overridden."""
    return None if config.model.init_kwargs else read_context_length(find_model(config.model.model))


def packages_by_option(config: TrainConfig | None) -> dict[str, dict[str, bool]]:
    """For each package, the settings that need it and whether the configuration has each of them."""
    values = values_of(config) if config is not None else {}
    found: dict[str, dict[str, bool]] = {}
    for option in all_options():
        used = option.path in values and _is_used(option, config)
        package = option.facets.package or {}
        if isinstance(package, str):
            is_set = used and values[option.path] != option.default
            found.setdefault(package, {})[option.where] = is_set
        else:
            for choice, name in package.items():
                is_set = used and values[option.path] == choice
                found.setdefault(name, {})[f'{option.where} = "{choice}"'] = is_set
        chosen = {values[option.path]} if used and option.kind else set()
        if option.path == "reward.type" and config is not None and config.reward.terms:
            chosen = {term.type for term in config.reward.terms}
        for name in REGISTRIES[option.kind].builtins if option.kind else ():
            for package in REGISTRIES[option.kind].facts(name).packages:
                found.setdefault(package, {})[f'{option.where} = "{name}"'] = name in chosen
    return found


def _is_used(option: Option, config: TrainConfig | None) -> bool:
    if config is None:
        return False
    on_tinker = config.backend.backend == "tinker" and ignored_on_tinker(option)
    return not on_tinker and not (option.facets.unused and option.facets.unused(config))


def _missing_packages(config: TrainConfig) -> Iterator[ConfigIssue]:
    for package, settings in packages_by_option(config).items():
        needed = next((where for where, is_set in settings.items() if is_set), "")
        if needed and not _is_importable(package.replace("-", "_")):
            text = f"needs the package {package}, which is not installed."
            yield ConfigIssue(needed, text, f"Try: {install_command(package)}")


def _is_importable(name: str) -> bool:
    return name in sys.modules or importlib.util.find_spec(name) is not None


def needs_hub(config: TrainConfig) -> bool:
    """Whether a model or dataset comes from the Hub or its cache."""
    models = any(find_model(name).found in ("cache", "download") for name in models_of(config).values())
    sources = [config.data.source, *([config.held_out_source] if config.eval.every else [])]
    from_hub = any(REGISTRIES["data"].facts(source).from_hub for source in sources)
    return models or (not config.environment.provider and from_hub)


def is_offline() -> bool:
    """Whether the Hugging Face libraries are in offline mode."""
    return os.environ.get("HF_HUB_OFFLINE", "0").lower() not in ("0", "", "false", "no", "off")


def go_offline() -> None:
    """Put the Hugging Face libraries of this process and its children into offline mode, so that they do not retry."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    for name, module in (("huggingface_hub", "huggingface_hub.constants"), ("datasets", "datasets.config")):
        # Modules that are already imported have read the variable.
        if name in sys.modules and module in sys.modules:
            vars(sys.modules[module])["HF_HUB_OFFLINE"] = True


def use_cache_if_unreachable(log: Callable[[str], None]) -> bool:
    """Whether the Hub is found to be out of reach; then only its cache is used from now on."""
    if is_offline() or hub_answers():
        return False
    go_offline()
    log(f"The Hugging Face Hub ({hub_url()}) cannot be reached; only cached files will be used.")
    return True


def hub_url() -> str:
    """URL of the Hub."""
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


@functools.lru_cache(maxsize=8)
def hub_answers(timeout_s: float = HUB_S) -> bool:
    """Whether the Hub can be reached, also through a proxy."""
    answered: list[bool] = []

    def request() -> None:
        try:
            urllib.request.urlopen(urllib.request.Request(hub_url(), method="HEAD"), timeout=timeout_s).close()
        except urllib.error.HTTPError:
            pass
        except (OSError, ValueError):
            return
        answered.append(True)

    # In a thread, because name resolution has no timeout.
    thread = threading.Thread(target=request, daemon=True)
    thread.start()
    thread.join(timeout_s)
    return bool(answered)
