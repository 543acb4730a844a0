"""Rules about single values."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

from retrain.config.options import Option, all_options, option_issue, options_by_path, values_of
from retrain.config.schema import TrainConfig
from retrain.errors import ConfigIssue
from retrain.plugins import REGISTRIES

_DEVICE = re.compile(r"cpu|gpu:(0|[1-9][0-9]{0,2})")
_LAUNCH_DEVICE = re.compile(r"auto|cpu|cuda:(0|[1-9][0-9]{0,2})")
_SURROGATE = re.compile(r"[\ud800-\udfff]")
# Names in braces. After a letter or a backslash they are LaTeX: \frac{a}{b}.
_PLACEHOLDER = re.compile(r"(?<![\w\\}])\{([a-z_]+)\}")
# Arguments of from_pretrained that other options set.
_SET_BY = {
    "dtype": "[model] dtype", "torch_dtype": "[model] dtype", "device_map": "[backend] devices",
    "attn_implementation": "[inference] attention_kernel", "gguf_file": "a folder with safetensors",
    "quantization_config": '[model] quantization = "nf4"', "load_in_4bit": '[model] quantization = "nf4"',
    "load_in_8bit": '[model] quantization = "int8"',
}  # fmt: skip


def check_names(config: TrainConfig) -> Iterator[ConfigIssue]:
    """The name of a part is built in, installed, or a dotted path."""
    for where, kind, option, name in named_parts(config):
        # Empty is valid only as the default.
        text = "" if name == option.default == "" else REGISTRIES[kind].explain_unknown(name)
        if text:
            yield ConfigIssue(where, text)


def named_parts(config: TrainConfig) -> Iterator[tuple[str, str, Option, str]]:
    """The names of parts in a configuration: where each is, its registry and the option that it is in."""
    values, terms = values_of(config), options_by_path()["reward.terms"]
    yield from ((o.where, o.kind, o, str(values[o.path])) for o in all_options() if o.kind and o.path in values)
    yield from ((f"{terms.where}[{n}].type", "reward", terms, term.type) for n, term in enumerate(config.reward.terms))


def check_devices(config: TrainConfig) -> Iterator[ConfigIssue]:
    """`auto`, `cpu`, `gpu:N`, or several of the last two with commas."""
    devices = [device.strip() for device in config.backend.devices.split(",")]
    if devices == ["auto"]:
        return
    bad = [device for device in devices if not _DEVICE.fullmatch(device)]
    if bad:
        yield option_issue(
            "backend.devices",
            f"has {bad[0]!r}; a device is cpu or gpu:N, several are separated by commas; auto stands alone.",
            'Try: devices = "auto"',
        )
    elif len(set(devices)) < len(devices) > 2 and set(devices) != {"cpu"}:
        # Two that are the same are split mode on one GPU.
        twice = max(devices, key=devices.count)
        yield option_issue("backend.devices", f"names {twice!r} twice.", f'Try: devices = "{devices[0]}"')


def check_launch_device(config: TrainConfig) -> Iterator[ConfigIssue]:
    """`auto`, `cpu` or `cuda:N`."""
    device = config.inference.launch_device
    if not _LAUNCH_DEVICE.fullmatch(device):
        text = f"is {device!r}; it must be auto, cpu or cuda:N."
        yield option_issue("inference.launch_device", text, 'Try: launch_device = "cuda:1"')


def check_init_kwargs(config: TrainConfig) -> Iterator[ConfigIssue]:
    """Arguments that retrain passes to from_pretrained cannot be passed a second time."""
    for name in config.model.init_kwargs:
        if name in _SET_BY:
            text = f"has {name!r}, which is not supported here."
            yield option_issue("model.init_kwargs", text, f"Try: {_SET_BY[name]}")


def check_group_size(config: TrainConfig) -> Iterator[ConfigIssue]:
    """Advantages compare completions of one prompt, so a group has at least two."""
    if config.training.group_size < 2:
        text = "must be at least 2: advantages compare completions of one prompt."
        yield option_issue("training.group_size", text, "Try: group_size = 16")


def check_ratio_cap(config: TrainConfig) -> Iterator[ConfigIssue]:
    """A cap is at least 1, the on-policy ratio; below 1 - clip_low, ppo would drop negative advantages."""
    cap = config.loss.ratio_cap
    if 0 < cap < 1:
        yield option_issue("loss.ratio_cap", f"must be 0 or at least 1, got {cap}.", "Try: ratio_cap = 2.0")


def check_strategic_grams(config: TrainConfig) -> Iterator[ConfigIssue]:
    """Text that starts like a JSON array is one, of non-empty strings."""
    text = config.logging.strategic_grams.strip()
    if not text.startswith("["):
        return
    try:
        grams = json.loads(text)
    except (ValueError, RecursionError):
        grams = None
    if not isinstance(grams, list) or not grams or not all(isinstance(gram, str) and gram.strip() for gram in grams):
        yield option_issue(
            "logging.strategic_grams",
            "starts like a JSON array but is not an array of phrases.",
            """Try: strategic_grams = '["wait", "let me check"]'""",
        )


def check_templates(config: TrainConfig) -> Iterator[ConfigIssue]:
    """A template has all required variables, and no unknown ones, which would be shown to the model literally."""
    values = values_of(config)
    for option in all_options():
        variables = option.facets.variables or {}
        text = values[option.path] if variables else ""
        if not text:
            continue
        missing = [f"{{{name}}}" for name, required in variables.items() if required and f"{{{name}}}" not in text]
        if missing:
            yield option_issue(option.path, f"lacks {' and '.join(missing)}.")
        for name in _PLACEHOLDER.findall(text):
            if name not in variables:
                known = ", ".join(f"{{{variable}}}" for variable in variables)
                yield option_issue(option.path, f"has the unknown variable {{{name}}}.", f"Variables: {known}.")


def check_toml_values(config: TrainConfig) -> Iterator[ConfigIssue]:
    """A run stores its configuration as TOML, which has no null and only valid Unicode."""
    for path, value in values_of(config).items():
        if _has_null(value):
            yield option_issue(path, "holds null, which TOML lacks.", "Try: leave that key out")
        if any(_SURROGATE.search(text) for text in _texts(value)):
            yield option_issue(path, "holds text that is not valid Unicode.")


def _has_null(value: object) -> bool:
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return value is None or any(_has_null(item) for item in items)


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield key
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
