"""Settings of a YAML run, checked before PyTorch and TRL are imported, which takes many seconds."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

from annotated_types import Ge, Le
from packaging.version import Version
from pydantic import FiniteFloat, NonNegativeFloat, NonNegativeInt, PositiveInt, TypeAdapter, ValidationError

from retrain.config.synonyms import find_same_option
from retrain.errors import ConfigError, ConfigIssue
from retrain.plugins import REGISTRIES, import_path
from retrain.runtime.packages import missing
from retrain.runtime.text import plural

TESTED = ("1.16", "1.17")
"""Supported TRL versions: from the first, up to but not including the second."""
OWN_SETS = ("arithmetic", "gsm8k", "math")
"""Datasets that are named as in TOML files."""
FILES = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
"""Endings of dataset files, and the builders of `datasets` for them."""
CLASSES = {"grpo": "retrain.grpo.config:GRPOConfig", "sft": "trl:SFTConfig"}
# Files that declare the arguments of these classes; earlier ones override later ones.
SHARED = (("trl", "trainer/base_config.py"), ("transformers", "training_args.py"))
DECLARATIONS = {
    "grpo": (("retrain", "grpo/config.py"), ("trl", "trainer/grpo_config.py"), *SHARED),
    "sft": (("trl", "trainer/sft_config.py"), *SHARED),
}
Share = Annotated[float, Ge(0), Le(1)]
TYPE_NAMES = {
    str: "a string",
    int: "a whole number",
    float: "a number",
    FiniteFloat: "a number",
    bool: "true or false",
    PositiveInt: "a whole number of at least 1",
    NonNegativeInt: "a whole number of at least 0",
    NonNegativeFloat: "a number of at least 0",
    Share: "a number between 0 and 1",
    list[str]: "a list of names",
    list[float]: "a list of numbers",
    dict[str, Any]: "a table",
}
WIDER: dict[str, Any] = {
    "resume_from_checkpoint": bool | str | None,
    "scale_rewards": bool | str,
    "fsdp": bool | str | list[str] | None,
}
"""Types of arguments of which TRL and transformers take more values than they declare."""
# Names of options in messages of code shared with TOML runs, and the corresponding settings here.
TOML_NAMES = {
    "[model] model": "model_name_or_path",
    '[data] source = "jsonl" and path': "dataset_id_or_path",
    'name its folder in [plugins] search_paths = ["folder"]': "add its folder to PYTHONPATH",
    "judge, custom, ": "judge, ",
    ", or a dotted path.": ", or module:function.",
    'max_tokens, or [inference] kv_cache_dtype = "int8"': "max_completion_length or per_device_train_batch_size",
}


_OF_MODEL = "It belongs to model_init_kwargs: {{{}: …}}."
TRL_SCRIPTS = {
    "dataset_name": "Did you mean dataset_id_or_path?",
    "dataset_train_split": "Did you mean train_split?",
    "dataset_test_split": "Did you mean val_split?",
    "lora_r": "Did you mean lora_rank?",
    "use_peft": "Leave it out: a lora_rank above 0 trains an adapter.",
    "dtype": _OF_MODEL.format("dtype"),
    "torch_dtype": _OF_MODEL.format("dtype"),
    "attn_implementation": _OF_MODEL.format("attn_implementation"),
    "model_revision": _OF_MODEL.format("revision"),
    "reward_model_name_or_path": "Reward models are for scripts: reward_funcs of GRPOTrainer takes them.",
}
"""Arguments of TRL's scripts that have another name here, and what to write."""


@dataclass(frozen=True)
class RunSettings:
    """Settings that are not arguments of the trainer's configuration class."""

    trainer_type: str = "grpo"
    model_name_or_path: str = ""
    name: str = ""
    tokenizer_kwargs: dict[str, Any] | None = None
    lora_rank: NonNegativeInt | None = 0
    lora_alpha: int | float | None = None
    lora_dropout: float = 0.0
    lora_target_modules: Literal["all-linear"] | list[str] = "all-linear"
    dataset_id_or_path: str = ""
    dataset_config: str | None = None
    train_split: str | None = None
    val_split: str | None = None
    max_train_examples: PositiveInt | None = None
    max_val_examples: PositiveInt | None = None
    prompt_column: str | None = None
    answer_column: str | None = None
    keep_columns: list[str] | None = None
    system_prompt: str = ""
    completion_only_training: bool | None = None
    artificial_epochs: PositiveInt = 1
    reward_funcs: str | list[str] | None = None
    reward_weights: list[float] | None = None

    @property
    def reward_names(self) -> list[str]:
        """`reward_funcs`, which may be a single name, as a list."""
        return [self.reward_funcs] if isinstance(self.reward_funcs, str) else self.reward_funcs or []


def read_settings(settings: Mapping[str, Any]) -> tuple[RunSettings, dict[str, Any]]:
    """The run and the arguments of its trainer; one ConfigError lists all unknown settings and wrong values."""
    kind = settings.get("trainer_type", "grpo")
    if not isinstance(kind, str) or kind not in DECLARATIONS:
        raise ConfigError(f"trainer_type must be grpo or sft, got {kind!r}.")
    known = known_settings(kind)
    # YAML reads an unquoted `no`, a value of these, as false.
    settings = {key: "no" if value is False and key.endswith("_strategy") else value for key, value in settings.items()}
    values, issues = check_types({key: value for key, value in settings.items() if key in known}, known)
    issues += [_unknown(key, list(known)) for key in settings if key not in known]
    own = {field.name for field in fields(RunSettings)}
    run = RunSettings(**{key: value for key, value in values.items() if key in own})
    issues = issues or [*_find_issues(run), *_find_data_issues(run), *_find_unknown_choices(kind, values)]
    if issues:
        raise ConfigError("the composed settings cannot be run:", tuple(issues))
    arguments = read_arguments(kind)
    return run, {key: value for key, value in values.items() if key in arguments}


def known_settings(kind: str) -> dict[str, Any]:
    """Types of all settings of a run by name; those of RunSettings may also be arguments of the trainer."""
    return read_arguments(kind) | get_type_hints(RunSettings, include_extras=True)


def is_tested(trl_version: str) -> bool:
    """Whether this is one of the versions of TRL that retrain was tested with."""
    return Version(TESTED[0]) <= Version(trl_version) < Version(TESTED[1])


@cache
def read_arguments(kind: str) -> dict[str, Any]:
    """Types of a trainer's arguments by name, from the source of its configuration classes.

    A type that only they know is `Any` here; TRL and transformers check those values.
    """

    class Names(dict[str, Any]):
        def __missing__(self, name: str) -> Any:
            return vars(builtins).get(name, Any)

    try:
        if not is_tested(version("trl")):
            return get_type_hints(import_path(CLASSES[kind], "trainer"), include_extras=True)
    except PackageNotFoundError as error:
        raise missing("trl", "retrain.grpo") from error
    names, found = Names(globals()), {}
    for package, file in reversed(DECLARATIONS[kind]):
        (folder,) = find_spec(package).submodule_search_locations  # type: ignore[union-attr, misc]
        tree = ast.parse((Path(folder) / file).read_text(encoding="utf-8"))
        for line in (line for part in tree.body if isinstance(part, ast.ClassDef) for line in part.body):
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                found[line.target.id] = eval(ast.unparse(line.annotation), {}, names)
    found |= {name: hint for name, hint in WIDER.items() if name in found}
    return {name: hint for name, hint in found.items() if not name.startswith("_")}


def check_types(values: Mapping[str, Any], hints: Mapping[str, Any]) -> tuple[dict[str, Any], list[ConfigIssue]]:
    """The values converted to their declared types (YAML reads some numbers as strings), and the issues found."""
    checked, issues = {}, []
    for key, value in values.items():
        words = _type_words(hints[key])
        try:
            # pydantic would read a flag as 0 or 1.
            is_wrong_flag = isinstance(value, bool) and words and TYPE_NAMES[bool] not in words
            checked[key] = TypeAdapter(hints[key]).validate_python(value, strict=bool(is_wrong_flag))
        except ValidationError as error:
            *some, last = words or [str(error.errors()[0]["msg"])]
            wanted = f"{', '.join(some)} or {last}" if some else last
            issues.append(ConfigIssue(key, f"must be {wanted}, got {value!r}."))
    return checked, issues


def _type_words(hint: Any) -> list[str]:
    if isinstance(hint, str):
        return [hint]
    if hint in TYPE_NAMES:
        return [TYPE_NAMES[hint]]
    return [word for part in get_args(hint) for word in _type_words(part)]


def _unknown(key: str, known: list[str]) -> ConfigIssue:
    others = [kind for kind in DECLARATIONS if key in read_arguments(kind)]
    if others:
        return ConfigIssue(key, f"is a setting of trainer_type: {others[0]}.")
    if key in TRL_SCRIPTS:
        return ConfigIssue(f"unknown setting {key!r}.", "", TRL_SCRIPTS[key])
    close = find_same_option(key, known) or next(iter(get_close_matches(key[:60], known, n=1)), "")
    hint = f"Did you mean {close}?" if close else "docs/trl.md lists all settings."
    return ConfigIssue(f"unknown setting {key!r}.", "", hint)


def _find_unknown_choices(kind: str, values: Mapping[str, Any]) -> list[ConfigIssue]:
    """Issues: values that TRL's trainer would refuse only after it has sampled."""
    if kind != "grpo":
        return []
    found = []
    for name, choices in read_choices().items():
        value = values.get(name)
        if isinstance(value, str) and choices and value not in choices:
            hint = "Try: loss_type=grpo importance_sampling_level=sequence" if value == "gspo" else ""
            found.append(ConfigIssue(name, f"must be one of {', '.join(choices)}, got {value!r}.", hint))
    return found


@cache
def read_choices() -> dict[str, list[str]]:
    """The values of some arguments that are declared as any text: those with which TRL's trainer compares them."""
    (folder,) = find_spec("trl").submodule_search_locations  # type: ignore[union-attr, misc]
    tree = ast.parse((Path(folder) / "trainer" / "grpo_trainer.py").read_text(encoding="utf-8"))
    found: dict[str, set[str]] = {name: set() for name in ("loss_type", "scale_rewards", "importance_sampling_level")}
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and isinstance(node.left, ast.Attribute) and node.left.attr in found:
            texts = (
                part.value for other in node.comparators for part in ast.walk(other) if isinstance(part, ast.Constant)
            )
            found[node.left.attr] |= {text for text in texts if isinstance(text, str)}
    return {name: sorted(texts) for name, texts in found.items()}


def _find_issues(run: RunSettings) -> list[ConfigIssue]:
    is_grpo = run.trainer_type == "grpo"
    required = {"model_name_or_path": "builtin:tiny", "dataset_id_or_path": "arithmetic"}
    required |= {"reward_funcs": "match"} if is_grpo else {}
    given = {field.name: getattr(run, field.name) for field in fields(run)}
    missing = {name: example for name, example in required.items() if not given[name]}
    issues = [ConfigIssue(name, "is missing.", f"Try: {name}={example}") for name, example in missing.items()]
    names = run.reward_names
    weights = run.reward_weights
    if weights is not None and names and len(weights) != len(names):
        issues.append(
            ConfigIssue("reward_weights", f"has {plural(len(weights), 'number')} for {plural(len(names), 'function')}.")
        )
    issues += [ConfigIssue("reward_funcs:", text) for name in names if (text := _explain_reward(name))]
    if is_grpo and run.completion_only_training is False:
        text = "= false cannot be used: GRPO trains on sampled tokens, never on prompts."
        issues.append(ConfigIssue("completion_only_training", text, "Leave it out."))
    return issues


def _explain_reward(name: str) -> str:
    """Why this is not a reward here, or ""."""
    if ":" in name:
        return ""
    if name == "custom":
        return "'custom' names no function.  Try: module:function"
    (folder,) = find_spec("trl").submodule_search_locations  # type: ignore[union-attr, misc]
    if name.isidentifier() and any(f"def {name}(" in file.read_text() for file in Path(folder, "rewards").glob("*.py")):
        return f"{name!r} is not known by its name alone.  Try: trl.rewards:{name}"
    return REGISTRIES["reward"].explain_unknown(name)


def find_unused(run: RunSettings, arguments: Mapping[str, Any]) -> list[str]:
    """Sentences on settings of an adapter, of held-out rows or of vLLM, in a run without them, or with none held out.

    No errors: a file may set them, and an override such as lora_rank=0 make them idle.
    """
    is_idle = run.max_val_examples is not None and not run.val_split
    idle = ["max_val_examples is not used: there is no val_split."] if is_idle else []
    if run.val_split and _is_same_split(run):
        idle.append(f"val_split = {run.val_split!r} has the problems that are trained on: none is held out.")
    samples_with_vllm = arguments.get("use_vllm") and arguments.get("vllm_mode", "colocate") == "colocate"
    if arguments.get("vllm_dtype", "auto") != "auto" and not samples_with_vllm:
        idle.append("vllm_dtype is not used: it needs use_vllm in this process.")
    if run.lora_rank:
        return idle
    given = {field.name: (getattr(run, field.name), field.default) for field in fields(run)}
    return idle + [
        f"{name} = {value!r} is not used: there is no lora_rank."
        for name, (value, default) in given.items()
        if name.startswith("lora_") and value != default and name != "lora_rank"
    ]


def _is_same_split(run: RunSettings) -> bool:
    trained = run.train_split or "train"
    # Every split but `train` has the problems that are held out.
    is_endless = run.dataset_id_or_path == "arithmetic"
    return run.val_split == trained or (is_endless and "train" not in (run.val_split, trained))


def _find_data_issues(run: RunSettings) -> list[ConfigIssue]:
    """Issues: a missing file or folder, or a split of data without splits, which would load the full dataset."""
    name = run.dataset_id_or_path
    path = Path(name).expanduser()
    # The id of a dataset of the Hub has at most one slash.
    is_folder = name.startswith((".", "/", "~")) or name.count("/") > 1
    if (path.suffix in FILES or is_folder) and not path.exists():
        what = "file" if path.suffix in FILES else "folder"
        return [ConfigIssue("dataset_id_or_path:", f"there is no {what} {path} (looked in {Path.cwd()}).")]
    idle = {"train_split": run.train_split, "val_split": run.val_split, "dataset_config": run.dataset_config}
    if path.is_file() and path.suffix in FILES:
        what = "a file, which has no splits or configurations"
    elif (path / "dataset_dict.json").exists():
        what, idle = "a saved dataset, which has no configurations", {"dataset_config": run.dataset_config}
    elif (path / "dataset_info.json").exists():
        what = "a saved dataset without splits or configurations"
    else:
        return []
    others = {"val_split": f", or {advise_split(run.val_split)}"}
    return [
        ConfigIssue(name, f"= {value!r} has no effect: {path} is {what}.", f"Try: {name}=null{others.get(name, '')}")
        for name, value in idle.items()
        # A file is loaded as the split "train".
        if value and (name, value) != ("train_split", "train")
    ]


def advise_split(split: str | None) -> str:
    """How rows of a file get held-out rows beside them: a folder with a file for each split."""
    # Of other names of files, `datasets` makes no split, or one with another name.
    if split not in ("validation", "test"):
        return f"val_split=validation and {advise_split('validation')}"
    return f"dataset_id_or_path=FOLDER with train.jsonl and {split}.jsonl in it"


def name_settings(text: str) -> str:
    """A message with the names of YAML settings in place of TOML options."""
    for option, setting in TOML_NAMES.items():
        text = text.replace(option, setting)
    return text
