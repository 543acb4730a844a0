"""Rules that span options. Each is one function that yields the problems it finds; the lists are at the foot."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from retrain.config.conditions import conditions_override_real_options
from retrain.config.evaluation import evaluation_samples_differ, evaluation_temperature_is_one
from retrain.config.options import all_options, options_by_path
from retrain.config.paths import paths_can_be_used
from retrain.config.schema import Reward, RewardTerm, TrainConfig
from retrain.config.toml import show_value
from retrain.config.urls import judge_address_holds_no_password, urls_are_urls
from retrain.errors import ConfigIssue
from retrain.plugins import REGISTRIES, is_dotted_path
from retrain.schedules.learning_rate import schedule_is_sound

Rule = Callable[[TrainConfig], Iterator[ConfigIssue]]

_DEVICE = re.compile(r"cpu|gpu:(0|[1-9][0-9]{0,2})")
TABLE = re.compile(r"\[[a-z]+\]")
_LAUNCH_DEVICE = re.compile(r"auto|cpu|cuda:(0|[1-9][0-9]{0,2})")
_SURROGATE = re.compile(r"[\ud800-\udfff]")
SERVER_ENGINES = frozenset(REGISTRIES["engine"].builtins) - {"pytorch"}


def find_conflicts(config: TrainConfig, judged: Iterable[ConfigIssue] = ()) -> list[ConfigIssue]:
    """Every problem that any rule finds.

    A table with a problem already `judged` holds a default where the user wrote something else, so what rules that
    compare its options would say of them is not to be trusted; each value on its own can still be judged.
    """
    judged = tuple(judged)
    reported = {problem.where for problem in judged}
    doubtful = tuple(table for problem in judged for table in TABLE.findall(f"{problem.where} {problem.hint}"))
    found = [problem for rule in VALUE_RULES for problem in rule(config)]
    found += [p for rule in RELATION_RULES for p in rule(config) if not p.where.startswith(doubtful)]
    return [problem for problem in found if problem.where not in reported]


def held_out_source(config: TrainConfig) -> str:
    """Where the problems of an evaluation come from."""
    return config.eval.source or config.data.source


def values_of(config: TrainConfig) -> dict[str, Any]:
    """Every option's value by `section.key`; tables that are absent are left out."""
    tables = config.model_dump(by_alias=True)
    return {path: tables[o.section][o.key] for path, o in options_by_path().items() if tables[o.section] is not None}


def names_are_known(config: TrainConfig) -> Iterator[ConfigIssue]:
    """A name that selects a part must be built in, installed, or a dotted path."""
    values = values_of(config)
    named = [(o.where, o.kind, values[o.path], o.default) for o in all_options() if o.kind and o.path in values]
    named += [(f"[reward] terms[{n}].type", "reward", term.type, "match") for n, term in enumerate(config.reward.terms)]
    for where, kind, name, default in named:
        # Empty is a choice only where it is the default.
        text = REGISTRIES[kind].problem_with(name) if name or default else ""
        if text:
            yield ConfigIssue(where, text)


def devices_follow_the_grammar(config: TrainConfig) -> Iterator[ConfigIssue]:
    """`auto`, `cpu`, `gpu:N`, or several of the last two with commas."""
    devices = [device.strip() for device in config.backend.devices.split(",")]
    if devices == ["auto"]:
        return
    bad = [device for device in devices if not _DEVICE.fullmatch(device)]
    if bad:
        yield ConfigIssue(
            "[backend] devices",
            f"has {bad[0]!r}; a device is cpu or gpu:N, several are separated by commas; auto stands alone.",
            'Try: devices = "auto"',
        )
    elif len(set(devices)) < len(devices) and set(devices) != {"cpu"}:
        yield ConfigIssue(
            "[backend] devices", f"names {max(devices, key=devices.count)!r} twice.", f'Try: devices = "{devices[0]}"'
        )


def split_mode_has_no_dropout(config: TrainConfig) -> Iterator[ConfigIssue]:
    """Sampling and training would draw from one generator at once, and no run could be repeated."""
    split = "," in config.backend.devices
    ahead = "several [backend] devices" if split else "[training] async_steps"
    if config.lora.dropout and (split or (config.training.async_steps and samples_apart(config))):
        yield ConfigIssue("[lora] dropout", f"does not go with {ahead}.", "Try: dropout = 0.0")


def samples_apart(config: TrainConfig) -> bool:
    """Whether completions are sampled on another device than the one that trains, and so may be a step ahead."""
    split = "," in config.backend.devices
    return config.backend.backend != "local" or split or config.inference.engine in SERVER_ENGINES


def samplers_are_where_they_can_be(config: TrainConfig) -> Iterator[ConfigIssue]:
    """A sampler on a server has no device here."""
    server = config.inference.engine in SERVER_ENGINES
    if config.backend.backend == "local" and server and "," in config.backend.devices:
        yield ConfigIssue(
            "[backend] devices",
            f"names several, but [inference] engine {json.dumps(config.inference.engine)} samples on a server.",
            f'Try: devices = "{config.backend.devices.split(",")[-1].strip()}"; [training] async_steps = 1 overlaps',
        )


def whole_models_are_trained_here(config: TrainConfig) -> Iterator[ConfigIssue]:
    """Servers and services take adapters; a whole model is trained, and sampled from, in this process."""
    if config.model.lora_rank:
        return
    if config.backend.backend == "tinker":
        yield ConfigIssue(
            "[model] lora_rank", "= 0 trains the whole model, and tinker trains adapters.", "Try: lora_rank = 32"
        )
    if config.inference.engine in REGISTRIES["engine"].builtins and config.inference.engine != "pytorch":
        told = f"= 0 trains the whole model, and the engine {json.dumps(config.inference.engine)} is given adapters."
        yield ConfigIssue("[model] lora_rank", told, 'Try: [inference] engine = "pytorch"')


def init_kwargs_leave_ours_alone(config: TrainConfig) -> Iterator[ConfigIssue]:
    """What retrain itself says when it loads a model cannot be said a second time."""
    ours = {
        "dtype": "[model] dtype", "torch_dtype": "[model] dtype", "device_map": "[backend] devices",
        "attn_implementation": "[inference] attention_kernel", "gguf_file": "a folder with safetensors",
        "quantization_config": "", "load_in_8bit": "", "load_in_4bit": "",
    }  # fmt: skip
    for name in config.model.init_kwargs:
        if name in ours:
            hint = f"Try: {ours[name]}" if ours[name] else "Quantised weights cannot be trained here."
            yield ConfigIssue("[model] init_kwargs", f"has {name!r}, which is not for it to say.", hint)


def micro_batches_are_cut_one_way(config: TrainConfig) -> Iterator[ConfigIssue]:
    """How many there are and how large they are is one choice."""
    if config.memory.micro_batches and config.memory.micro_batch_rows:
        yield ConfigIssue("[memory] micro_batches", "and micro_batch_rows cut a step in two ways.", "Set one of them.")


def weights_are_sharded_one_way(config: TrainConfig) -> Iterator[ConfigIssue]:
    """By FSDP2 or by DeepSpeed, over the processes of one local run, with whole weights where they are needed."""
    own, stage = config.distributed, config.distributed.zero_stage
    if config.backend.backend != "local" or (not own.fsdp and not stage):
        return
    where = "[distributed] fsdp" if own.fsdp else "[distributed] zero_stage"
    if own.fsdp and stage:
        yield ConfigIssue(where, f"does not go with zero_stage = {stage}: both shard.", "Try: zero_stage = 0")
    if config.campaign is not None:
        yield ConfigIssue(where, "needs several processes, but each run of a [campaign] is one.", "Try: leave it out")
    if not own.gather_for_generation and config.inference.engine == "pytorch":
        yield ConfigIssue(
            "[distributed] gather_for_generation",
            '= false leaves no rank with whole weights, which [inference] engine "pytorch" samples from.',
            'Try: gather_for_generation = true, or engine = "vllm"',
        )
    if stage == 3 and config.kl.beta and (config.kl.sync_ref_model or not config.model.lora_rank):
        yield ConfigIssue(
            "[kl] beta",
            "with [distributed] zero_stage = 3 has the base model as its reference, which takes an adapter to switch "
            "off and does not move.",
            "Try: [distributed] fsdp = true, or sync_ref_model = false and a lora_rank",
        )


def groups_can_differ(config: TrainConfig) -> Iterator[ConfigIssue]:
    """Advantages compare completions of one prompt, so a lone completion teaches nothing."""
    if config.training.group_size < 2:
        yield ConfigIssue(
            "[training] group_size",
            "must be at least 2: advantages compare completions of one prompt.",
            "Try: group_size = 16",
        )


def ratio_cap_lets_ratios_of_one_pass(config: TrainConfig) -> Iterator[ConfigIssue]:
    """On-policy ratios are 1: a cap below shrinks them all, and below 1 - clip_low ppo drops negative advantages."""
    cap = config.loss.ratio_cap
    if 0 < cap < 1:
        yield ConfigIssue("[loss] ratio_cap", f"must be 0 or at least 1, got {cap}.", "Try: ratio_cap = 2.0")


def _check_custom(where: str, reward: Reward | RewardTerm) -> Iterator[ConfigIssue]:
    if reward.type == "custom" and not reward.custom_module:
        yield ConfigIssue(
            f"{where}custom_module", 'is empty, but type is "custom".', 'Try: custom_module = "my_rewards"'
        )


def rewards_are_complete(config: TrainConfig) -> Iterator[ConfigIssue]:
    """A custom reward names its module, and weighted terms do the same."""
    reward = config.reward
    for index, term in enumerate(reward.terms):
        yield from _check_custom(f"[reward] terms[{index}].", term)
    if not reward.terms:
        yield from _check_custom("[reward] ", reward)


def correct_can_be_reached(config: TrainConfig) -> Iterator[ConfigIssue]:
    """Built-in rewards give at most 1 each; weighted, they may all together stay below what counts as correct."""
    reward = config.reward
    known = all(term.type in REGISTRIES["reward"].builtins and term.type != "custom" for term in reward.terms)
    most = sum(max(term.weight, 0.0) for term in reward.terms)
    if reward.terms and known and not config.environment.provider and most < reward.correct_from - 1e-9:
        yield ConfigIssue(
            "[reward] correct_from",
            f"= {reward.correct_from:g} is more than the terms can add up to ({most:g}).",
            f"Try: correct_from = {most:g}",
        )


def environment_is_complete(config: TrainConfig) -> Iterator[ConfigIssue]:
    """A provider needs an id, and a rollout at least one turn."""
    environment = config.environment
    # A dotted path is a class of the user's own; what it needs to know is in args.
    if environment.provider and not environment.id and not is_dotted_path(environment.provider):
        yield ConfigIssue(
            "[environment] id",
            f"is empty, but provider is {json.dumps(environment.provider)}.",
            {"builtin": 'Try: id = "guess-number"', "reasoning_gym": 'Try: id = "chain_sum"'}.get(
                environment.provider, 'Try: id = "primeintellect/gsm8k"'
            ),
        )
    if environment.max_turns == 0:
        yield ConfigIssue("[environment] max_turns", "must be -1 or at least 1, got 0.", "Try: max_turns = -1")


def teaching_is_of_one_answer(config: TrainConfig) -> Iterator[ConfigIssue]:
    """An environment has a conversation of its own, in which there is no place for a student."""
    if config.teaching.enabled and config.environment.provider:
        yield ConfigIssue(
            "[teaching] enabled",
            "does not go with an [environment]: the student answers problems of [data], scored by [reward].",
            "Try: enabled = false",
        )


def teaching_has_an_advantage_for_losses(config: TrainConfig) -> Iterator[ConfigIssue]:
    """maxrl divides by a group's mean reward, which teaching that does harm makes negative. A campaign's runs are asked
    one by one."""
    teaching, mode = config.teaching, config.algorithm
    is_maxrl = mode.advantage_mode == "maxrl" and not mode.algorithm_mode
    if teaching.enabled and teaching.degradation_penalty_multiplier and is_maxrl and config.campaign is None:
        yield ConfigIssue(
            "[algorithm] advantage_mode",
            '= "maxrl" divides by the mean reward, which [teaching] enabled lets fall below 0 with a student.',
            'Try: advantage_mode = "grpo"',
        )


def maxrl_has_no_penalties(config: TrainConfig) -> Iterator[ConfigIssue]:
    """A term with a negative weight takes the reward below 0 where the others give nothing. A campaign's runs are asked
    one by one."""
    mode = config.algorithm
    is_maxrl = mode.advantage_mode == "maxrl" and not mode.algorithm_mode
    if not is_maxrl or config.campaign is not None or config.environment.provider:
        return
    for index, term in enumerate(config.reward.terms):
        if term.weight < 0:
            yield ConfigIssue(
                f"[reward] terms[{index}].weight",
                f'= {show_value(term.weight)} makes rewards negative, and [algorithm] advantage_mode = "maxrl" divides '
                "by their mean.",
                'Try: advantage_mode = "grpo"',
            )


def students_have_whole_weights(config: TrainConfig) -> Iterator[ConfigIssue]:
    """The base is sampled over the policy's own tensors, which some ways of distributing keep in pieces."""
    own, spread = (
        config.distributed,
        "[distributed] fsdp" if config.distributed.fsdp else "[distributed] zero_stage = 3",
    )
    shares = config.teaching.enabled and not config.teaching.student_model and config.model.lora_rank
    if shares and (own.fsdp or own.zero_stage == 3):
        yield ConfigIssue(
            "[teaching] student_model",
            f"is empty: the student would be the policy's own weights, which {spread} keeps in pieces.",
            f"Try: student_model = {json.dumps(config.model.model)}",
        )


def data_source_is_complete(config: TrainConfig) -> Iterator[ConfigIssue]:
    """jsonl needs a path, hub an id."""
    for section, own in (("data", config.data), ("eval", config.eval)):
        if own.source == "jsonl" and not own.path:
            yield ConfigIssue(
                f"[{section}] path", f'is empty, but [{section}] source is "jsonl".', 'Try: path = "problems.jsonl"'
            )
    if config.data.source == "hub" and not config.data.id:
        yield ConfigIssue("[data] id", 'is empty, but [data] source is "hub".', 'Try: id = "openai/gsm8k"')


def evaluation_has_enough_samples(config: TrainConfig) -> Iterator[ConfigIssue]:
    """pass@k needs at least k samples."""
    if config.eval.k > config.eval.samples:
        yield ConfigIssue(
            "[eval] k",
            f"is {config.eval.k}, more than the {config.eval.samples} samples a problem.",
            f"Try: samples = {config.eval.k}",
        )


def evaluation_has_held_out_problems(config: TrainConfig) -> Iterator[ConfigIssue]:
    """A jsonl file has no splits, so evaluation on it needs a file of its own."""
    if config.eval.every and not config.eval.source and config.data.source == "jsonl" and not config.eval.path:
        yield ConfigIssue(
            "[eval] path",
            'is empty; with [data] source = "jsonl" evaluation needs its own file.',
            'Try: path = "held_out.jsonl"',
        )


def evaluation_is_not_on_training_problems(config: TrainConfig) -> Iterator[ConfigIssue]:
    """A pass rate on the problems that were trained on says nothing about others."""
    data, held_out = config.data, config.eval
    if not held_out.every or held_out_source(config) != data.source:
        return
    # Without a source or a path of its own an evaluation reads the file of [data], in another split.
    own_path = held_out.path if held_out.source or held_out.path else data.path
    if data.source == "jsonl":
        # A file has no splits; that evaluation names one is the rule above.
        if held_out.path and _is_same_file(held_out.path, data.path):
            yield ConfigIssue("[eval] path", "is the file of [data] path.", 'Try: path = "held_out.jsonl"')
    elif _is_same_split(data.source, held_out.split, data.split) and (
        # Of the built-in sources only jsonl reads a file.
        data.source in REGISTRIES["data"].builtins or _is_same_file(own_path, data.path)
    ):
        yield ConfigIssue(
            "[eval] split",
            f"= {show_value(held_out.split)} holds the problems of [data] split = {show_value(data.split)}.",
            'Try: split = "test"' if data.split == "train" else 'Try: [data] split = "train"',
        )


def _is_same_split(source: str, one: str, other: str) -> bool:
    # To the arithmetic source every split but train is the held-out tenth.
    return one == other or (source == "arithmetic" and "train" not in (one, other))


def _is_same_file(one: str, other: str) -> bool:
    try:
        return os.path.realpath(os.path.expanduser(one)) == os.path.realpath(os.path.expanduser(other))
    except (OSError, ValueError):
        return one == other  # no file can have such a name, which reading it will say


def backpressure_bounds_are_ordered(config: TrainConfig) -> Iterator[ConfigIssue]:
    """The smallest batch size may not exceed the largest."""
    pressure = config.backpressure
    if pressure.max_batch_size < pressure.min_batch_size:
        yield ConfigIssue(
            "[backpressure] max_batch_size",
            f"is {pressure.max_batch_size}, below min_batch_size = {pressure.min_batch_size}.",
            f"Try: max_batch_size = {pressure.min_batch_size}",
        )


def launch_device_follows_the_grammar(config: TrainConfig) -> Iterator[ConfigIssue]:
    """`auto`, `cpu` or `cuda:N`."""
    device = config.inference.launch_device
    if not _LAUNCH_DEVICE.fullmatch(device):
        yield ConfigIssue(
            "[inference] launch_device", f"is {device!r}; it is auto, cpu or cuda:N.", 'Try: launch_device = "cuda:1"'
        )


def strategic_grams_can_be_read(config: TrainConfig) -> Iterator[ConfigIssue]:
    """Text that starts like a JSON array must be one, of non-empty strings."""
    text = config.logging.strategic_grams.strip()
    if not text.startswith("["):
        return
    try:
        grams = json.loads(text)
    except (ValueError, RecursionError):
        grams = None
    if not isinstance(grams, list) or not grams or not all(isinstance(gram, str) and gram.strip() for gram in grams):
        yield ConfigIssue(
            "[logging] strategic_grams",
            "starts like a JSON array but is not one of phrases.",
            """Try: strategic_grams = '["wait", "let me check"]'""",
        )


def templates_name_their_variables(config: TrainConfig) -> Iterator[ConfigIssue]:
    """A teaching template that leaves out a variable would never show it to the model."""
    wanted = {
        "student_diagnostic_template": ("question",),
        "teacher_adaptive_template": ("question", "approach"),
        "student_with_teaching_template": ("question", "teaching"),
        "student_baseline_template": ("question",),
    }
    values = values_of(config)
    for key, variables in wanted.items():
        text = values[f"teaching.{key}"]
        known = [f"{{{name}}}" for name in variables]
        missing = [name for name in known if text and name not in text]
        if missing:
            yield ConfigIssue(f"[teaching] {key}", f"lacks {' and '.join(missing)}.")
        for name in _unknown_variables(text, variables):
            yield ConfigIssue(
                f"[teaching] {key}", f"has {{{name}}}, which it does not know.", f"It knows {' and '.join(known)}."
            )


def _unknown_variables(text: str, known: Iterable[str]) -> list[str]:
    """Names in braces that stand for nothing. What follows a letter or a backslash is LaTeX: \\frac{a}{b}."""
    return [name for name in re.findall(r"(?<![\w\\}])\{([a-z_]+)\}", text) if name not in known]


def judge_prompt_names_its_variables(config: TrainConfig) -> Iterator[ConfigIssue]:
    """A judge that is not shown the answer cannot grade it, and a misspelt variable would be shown as it stands."""
    text = config.reward.judge_prompt
    if text and "{response}" not in text:
        yield ConfigIssue("[reward] judge_prompt", "lacks {response}.")
    known = ("question", "reference", "response")
    for name in _unknown_variables(text, known):
        yield ConfigIssue(
            "[reward] judge_prompt",
            f"has {{{name}}}, which it does not know.",
            "It knows {question}, {reference} and {response}.",
        )


def values_can_be_written(config: TrainConfig) -> Iterator[ConfigIssue]:
    """A run writes its configuration down as TOML, which has no null and holds only whole Unicode characters."""
    for path, value in values_of(config).items():
        if _holds_null(value):
            yield ConfigIssue(options_by_path()[path].where, "holds null, which TOML lacks.", "Try: leave that key out")
        if any(_SURROGATE.search(text) for text in _texts(value)):
            yield ConfigIssue(options_by_path()[path].where, "holds text that is not valid Unicode.")


def _holds_null(value: object) -> bool:
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return value is None or any(_holds_null(item) for item in items)


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


# These look at one option each, the others at how options agree.
VALUE_RULES: tuple[Rule, ...] = (
    names_are_known,
    values_can_be_written,
    devices_follow_the_grammar,
    launch_device_follows_the_grammar,
    groups_can_differ,
    evaluation_temperature_is_one,
    init_kwargs_leave_ours_alone,
    schedule_is_sound,
    ratio_cap_lets_ratios_of_one_pass,
    urls_are_urls,
    paths_can_be_used,
    strategic_grams_can_be_read,
    templates_name_their_variables,
    judge_prompt_names_its_variables,
    judge_address_holds_no_password,
    conditions_override_real_options,
)
RELATION_RULES: tuple[Rule, ...] = (
    weights_are_sharded_one_way,
    split_mode_has_no_dropout,
    whole_models_are_trained_here,
    micro_batches_are_cut_one_way,
    samplers_are_where_they_can_be,
    rewards_are_complete,
    correct_can_be_reached,
    environment_is_complete,
    teaching_is_of_one_answer,
    teaching_has_an_advantage_for_losses,
    maxrl_has_no_penalties,
    students_have_whole_weights,
    data_source_is_complete,
    evaluation_has_enough_samples,
    evaluation_samples_differ,
    evaluation_has_held_out_problems,
    evaluation_is_not_on_training_problems,
    backpressure_bounds_are_ordered,
)
