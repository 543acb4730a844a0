"""What `retrain doctor` tries out: importing plugins, loading the tokenizer, contacting servers.

Trials run in a separate process, so that an import that crashes or hangs cannot stop the report.
"""

from __future__ import annotations

import importlib.util
import json
import os
import select
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from retrain.campaign.plan import plan_runs, split_conditions
from retrain.campaign.squeezing import check_analysis
from retrain.checks.connections import explain_no_judge
from retrain.checks.keys import explain_invalid_tinker_key
from retrain.checks.preflight import (
    is_offline,
    known_context,
    models_of,
    needs_hub,
    reads_weights,
    use_cache_if_unreachable,
)
from retrain.checks.user_code import find_reward_issues, uses_detector
from retrain.cli.trial_prompts import measure_prompts
from retrain.cli.trial_servers import try_launch, try_servers, try_service
from retrain.config import TrainConfig, dump_config
from retrain.config.load import build_config
from retrain.config.toml import parse_toml
from retrain.data import reads_file
from retrain.errors import ConfigError, RetrainError
from retrain.isolation.guard import GuardedProcess
from retrain.isolation.redaction import redact_all
from retrain.losses import build_loss
from retrain.modeling.files import find_base, find_model, lacks_weights
from retrain.plugins import REGISTRIES, SERVER_ENGINES, is_plugin, make_importable
from retrain.runtime.text import plural
from retrain.types import Example

TRIAL_S = 60.0
"""Limit for all trials together; usually they take a few seconds."""
FIRST_EXAMPLES = 16
"""Examples of an environment whose prompts are looked at: some are generated slowly."""
MEASURED = 256
"""Prompts that are tokenized to find the longest."""
ENVIRONMENT = "[environment] provider"
# What the trials of backends, servers, data and models depend on.
_MACHINE = ("backend", "inference", "model", "lora", "teaching", "data", "eval", "environment")
_BLOCK = 65_536


@dataclass(frozen=True)
class Trial:
    """The result of one trial: what was found, and why the run would not start or "".

    Both are empty where another check reports the problem.
    """

    where: str
    detail: str
    problem: str = ""
    is_warning: bool = False


@dataclass(frozen=True)
class Doubt:
    """What was found, where the run would start with a warning or may fail later."""

    text: str


Attempt = Callable[[TrainConfig], str | Doubt]
"""Does what the run will do and returns what was found; raises where the run would."""


@contextmanager
def start_trials(config: TrainConfig) -> Iterator[Callable[[], list[Trial]]]:
    """Try everything that this configuration uses, within `TRIAL_S`; the function given waits for the results.

    Whatever the trials have started is killed at the end, and when this process dies.
    """
    wanted = [where for where, _ in _trials(config)]
    if not wanted:
        yield list
        return
    with open(os.devnull, "wb") as nowhere:
        process = GuardedProcess(__name__, nowhere.fileno(), os.environ)
    until = time.monotonic() + TRIAL_S

    def wait() -> list[Trial]:
        shown, is_over = b"", False
        while not is_over and select.select([process.replies], [], [], max(0.0, until - time.monotonic()))[0]:
            part = os.read(process.replies.fileno(), _BLOCK)
            shown, is_over = shown + part, not part
        code = process.stop()
        found = [Trial(**json.loads(line)) for line in shown.split(b"\n")[:-1]]
        if is_over:
            ended = Trial("", "", f"the trial process exited with code {code}")
        else:
            ended = Trial("", f"unknown: the trial took more than {TRIAL_S:.0f} s", is_warning=True)
        # The first one without a result ended the process.
        unfinished = [replace(ended, where=where) for where in wanted[len(found) : len(found) + 1]]
        untried = (Trial(where, "unknown: not tried after that", is_warning=True) for where in wanted[len(found) + 1 :])
        return [*found, *unfinished, *untried]

    try:
        with suppress(BrokenPipeError), process.requests as requests:
            requests.write(dump_config(config).encode())
        yield wait
    finally:
        process.end()


def main() -> None:
    """Entry point of the process: a configuration on standard input, one line per trial on standard output."""
    # Output of plugins must not be mistaken for a result.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # PYTHONIOENCODING may say otherwise.
    with open(0, encoding="utf-8", closefd=False) as stdin:
        config = build_config(parse_toml(stdin.read(), "stdin"), {}, "the configuration")
    if needs_hub(config):
        use_cache_if_unreachable(lambda line: None)
    for where, attempt in _trials(config):
        try:
            found = attempt(config)
            trial = Trial(where, found.text, is_warning=True) if isinstance(found, Doubt) else Trial(where, found)
        except RetrainError as error:
            trial = Trial(where, "", str(error))
        except Exception as error:
            trial = Trial(where, "", f"{type(error).__name__}: {error}")
        # Here too: a plugin may have read secrets into the environment of this process.
        out.write(json.dumps(redact_all(asdict(trial))) + "\n")
        out.flush()
    out.close()
    # Do not wait for threads and processes that plugins left behind.
    os._exit(0)


def _trials(config: TrainConfig) -> Iterator[tuple[str, Attempt]]:
    """The trials, the quickest first."""
    if config.kind == "squeeze":
        yield "[squeeze]", _try_adapter
        return
    if config.campaign is not None and config.squeeze is not None:
        yield "[squeeze]", _try_analysis
    conditions = split_conditions(config, "the campaign").values()
    # Those of conditions that do not differ in what is tried are the same.
    trials: dict[tuple[str, str], tuple[str, Attempt]] = {}
    for find, sections in ((_own_trials, ()), (_machine_trials, _MACHINE)):
        for one in conditions:
            for where, attempt in find(one):
                settings = [getattr(one, section) for section in sections or (where.partition("]")[0][1:],)]
                sizes = (one.training.max_tokens, one.training.max_prompt_tokens) if sections else ()
                trials.setdefault((where, f"{settings} {sizes}"), (where, partial(_try_condition, one, attempt)))
    # Its examples may take long to load, and no time may be left for what comes after it.
    yield from sorted(trials.values(), key=lambda trial: trial[0] == ENVIRONMENT)


def _try_condition(condition: TrainConfig, attempt: Attempt, campaign: TrainConfig) -> str | Doubt:
    return attempt(condition)


def _own_trials(config: TrainConfig) -> Iterator[tuple[str, Attempt]]:
    algorithm = config.algorithm
    named = (
        ("advantage", algorithm.advantage_mode),
        ("transform", algorithm.transform_mode),
        ("uncertainty", algorithm.uncertainty_kind),
    )
    if algorithm.algorithm_mode or any(is_plugin(kind, name) for kind, name in named):
        yield "[algorithm]", _try_algorithm
    may_need = uses_detector(config) or is_plugin("transform", algorithm.transform_mode)
    if is_plugin("planning", config.planning.detector) and may_need:
        yield "[planning] detector", _try_detector
    if is_plugin("loss", config.loss.type):
        yield "[loss] type", _try_loss
    if config.environment.provider:
        yield ENVIRONMENT, _try_environment
    else:
        if any(kind == "custom" or is_plugin("reward", kind) for kind in _rewards(config)):
            yield "[reward]", _try_reward
        if "judge" in _rewards(config):
            yield "[reward] judge_base_url", _try_judge


def _machine_trials(config: TrainConfig) -> Iterator[tuple[str, Attempt]]:
    """Trials of the backend, servers, data and models."""
    if is_plugin("backend", config.backend.backend):
        yield "[backend] backend", lambda c: _load("backend", c.backend.backend, c)
    if config.backend.backend == "tinker":
        if importlib.util.find_spec("tinker") is not None:
            yield "[backend] backend", try_service
    elif config.inference.starts_server:
        yield "[inference] launch", try_launch
    elif config.inference.engine in SERVER_ENGINES:
        yield "[inference] engine", try_servers
    elif is_plugin("engine", config.inference.engine):
        yield "[inference] engine", lambda c: _load("engine", c.inference.engine, c)
    if not config.environment.provider and REGISTRIES["data"].facts(config.data.source).from_hub:
        yield "[data] source", _try_hub_source
    for where, name in models_of(config).items():
        # Missing folders, adapters and models to be downloaded are reported by another check.
        files = find_model(name)
        if (files.folder is not None and not find_base(files)) or config.backend.backend == "tinker":
            yield f"{where}, tokenizer", partial(_try_tokenizer, name, where)
    if not config.environment.provider and is_plugin("data", config.data.source):
        yield "[data] source", _try_source
    if not config.environment.provider and config.eval.every and is_plugin("data", config.held_out_source):
        yield "[eval] source", _try_held_out
    for table in _tables_to_measure(config):
        yield f"{table}, prompts", lambda c, table=table: _try_prompts(c, table)  # type: ignore[misc]


def _rewards(config: TrainConfig) -> list[str]:
    return [term.type for term in config.reward.terms] or [config.reward.type]


def _load(kind: str, name: str, config: TrainConfig) -> str:
    REGISTRIES[kind].load(name, config.plugins.search_paths)
    return f"{name} imported"


def _try_algorithm(config: TrainConfig) -> str:
    from retrain.advantages import CreditAssigner  # noqa: PLC0415  (slow to import)

    CreditAssigner(config)
    return f"{config.condition} loaded"


def _try_detector(config: TrainConfig) -> str:
    from retrain.planning import build_detector  # noqa: PLC0415  (loads numpy)

    build_detector(config.planning, config.logging.strategic_grams, config.plugins.search_paths)
    return f"{config.planning.detector} loaded"


def _try_loss(config: TrainConfig) -> str:
    build_loss(config.loss, config.plugins.search_paths)
    return f"{config.loss.type} loaded"


def _try_source(config: TrainConfig) -> str:
    from retrain.data import load_examples  # noqa: PLC0415

    return f"{config.data.source} loaded: {_count(load_examples(config.data, config.plugins.search_paths))}"


def _try_held_out(config: TrainConfig) -> str:
    from retrain.data import load_held_out  # noqa: PLC0415

    return f"{config.held_out_source} loaded: {plural(len(load_held_out(config)), 'example')}"


def _try_hub_source(config: TrainConfig) -> str:
    """Offline, the data is read from the cache; otherwise the run downloads it."""
    from retrain.data import build_source  # noqa: PLC0415

    source = build_source(config.data, config.plugins.search_paths)
    if not is_offline():
        return f"{config.data.source} comes from the Hub, which is reachable"
    return f"{config.data.source}: {len(source.load()):,} examples in the cache"


def _try_reward(config: TrainConfig) -> str:
    from retrain.rewards import read_spec, start_pool  # noqa: PLC0415

    # Loading would also import a function for TRL, which a run refuses.
    if issue := next(find_reward_issues(config), None):
        raise ConfigError(str(issue))
    spec = read_spec(config.reward, config.plugins.search_paths)
    terms = tuple(term for term in spec.terms if term.type != "judge")
    # In a worker, as in the run: there, code sees other variables and modules, and less memory.
    section = config.reward.model_copy(update={"workers": 1})
    start_pool(replace(spec, terms=terms), section, lambda line: None).close()
    return f"{', '.join(term.name for term in terms)} imported"


def _try_adapter(config: TrainConfig) -> str:
    """Whether an analysis can read its adapter; one on Tinker is left to it."""
    from retrain.squeeze.adapter import Adapter  # noqa: PLC0415  (imports PyTorch)
    from retrain.squeeze.analyze import torch_device  # noqa: PLC0415
    from retrain.squeeze.compress import check_target  # noqa: PLC0415
    from retrain.squeeze.run import REMOTE, check_ranks  # noqa: PLC0415

    assert config.squeeze is not None
    torch_device(config.squeeze.device)
    path = config.squeeze.adapter_path
    if path.startswith(REMOTE):
        problem = explain_invalid_tinker_key()
        if problem:
            raise RetrainError(f"{path} {problem}  Try: put TINKER_API_KEY=tml-... into .env")
        return f"{path} is downloaded by the analysis"
    if not Path(path).expanduser().exists():
        return ""  # reported with the other files
    if config.squeeze.output_path:
        check_target(Path(path).expanduser(), Path(config.squeeze.output_path).expanduser())
    with Adapter(Path(path).expanduser()) as adapter:
        check_ranks(config.squeeze, adapter.rank)
        return f"{path}: {plural(len(adapter.pairs), 'layer')}, rank {adapter.rank}"


def _try_analysis(config: TrainConfig) -> str:
    folder = Path(config.campaign_folder or config.logging.log_dir).expanduser()
    check_analysis(config, plan_runs(config, folder, "the campaign"), folder)
    return "can analyze the first run with an adapter"


def _try_judge(config: TrainConfig) -> str:
    """Whether the server responds. What it bills for is left to the run."""
    from retrain.rewards.judge import find_server  # noqa: PLC0415  (loads an HTTP client)

    server = find_server(config.reward)
    problem = explain_no_judge(f"{server.url.rstrip('/')}/models", server.key)
    if problem:
        raise RetrainError(
            f"no judge responds at {server.shown_url}: {problem}  "
            "Try: check [reward] judge_base_url, and OPENAI_API_KEY if it needs a key"
        )
    return f"{server.shown_url} responded"


def _try_environment(config: TrainConfig) -> str | Doubt:
    """Load the environment and the splits that the run uses."""
    from retrain.data import sample_held_out  # noqa: PLC0415
    from retrain.environments import build_environment, load_split  # noqa: PLC0415

    section = config.environment.model_copy(update={"auto_install": False})
    make_importable(config.plugins.search_paths)
    if config.environment.auto_install and section.provider == "verifiers" and not _is_installed(section.id):
        if shutil.which("prime") or shutil.which("uv"):
            return f"{section.id} is not installed; the run installs it"
        raise RetrainError("neither the Prime CLI nor uv is on PATH.  Try: pip install prime")
    environment = build_environment(section, config.plugins.search_paths, lambda line: None)
    examples = load_split(environment, section, "train")
    found = f"{section.id or section.provider} loaded: {_count(examples)}"
    asked = list(examples[:FIRST_EXAMPLES])
    if config.eval.every:
        split = load_split(environment, section, config.eval.split)
        held_out = sample_held_out(split, config.eval.max_examples, lambda line: None)
        found += f", {len(held_out):,} held out"
        asked += held_out[:FIRST_EXAMPLES]
    size, doubt = measure_prompts(config, environment, asked)
    return Doubt(f"{found}; {doubt}") if doubt else "; ".join(filter(None, (found, size)))


def _count(examples: Sequence[Example]) -> str:
    from retrain.data import Endless  # noqa: PLC0415

    return "unlimited examples" if isinstance(examples, Endless) else plural(len(examples), "example")


def _is_installed(id: str) -> bool:
    from retrain.environments.verifiers.modules import is_shipped, module_name  # noqa: PLC0415

    return importlib.util.find_spec(module_name(id)) is not None or is_shipped(id)


def _try_tokenizer(name: str, where: str, config: TrainConfig) -> str:
    from retrain.checks.vocabulary import check_template  # noqa: PLC0415  (loads numpy)
    from retrain.modeling.tokens import load_tokenizer  # noqa: PLC0415  (imports transformers)

    tokenizer = load_tokenizer(name, where)
    check_template(config, tokenizer, where)
    if reads_weights(config) and not lacks_weights(find_model(name)):
        from retrain.modeling.policy import check_architecture  # noqa: PLC0415  (imports PyTorch)

        check_architecture(config.model.model_copy(update={"model": name}), config.lora)
    return f"{name}: {len(tokenizer):,} tokens"


def _tables_to_measure(config: TrainConfig) -> Iterator[str]:
    """Tables whose prompts may be too long, as those from a file, if it is known how much the model takes."""
    context = known_context(config)
    if config.environment.provider or config.backend.backend != "local" or context is None:
        return
    held_out = {"[eval]": config.held_out_source} if config.eval.every else {}
    for table, source in ({"[data]": config.data.source} | held_out).items():
        # Generated questions are short: they count where little is left for them, or beside other parts of a prompt.
        leaves_little = config.training.max_tokens > context // 2
        counts = config.teaching.enabled or bool(config.data.system_prompt) or leaves_little
        if reads_file(source) or (counts and REGISTRIES["data"].facts(source).endless):
            yield table


def _try_prompts(config: TrainConfig, table: str) -> str | Doubt:
    """Whether prompts leave room for completions; of many prompts, only the longest texts are tokenized.

    Empty if the file of the table, or the tokenizer, cannot be loaded: their own checks say why.
    """
    from retrain.assemble import check_prompts, sample_of  # noqa: PLC0415  (imports PyTorch)
    from retrain.checks.vocabulary import check_prompt_tokens  # noqa: PLC0415
    from retrain.data import count_shared, load_examples, load_held_out  # noqa: PLC0415
    from retrain.modeling.tokens import PromptEncoder, load_tokenizer  # noqa: PLC0415
    from retrain.teaching import check_known_context  # noqa: PLC0415

    context, training = known_context(config), config.training
    assert context is not None

    def load_training() -> Sequence[Example]:
        return sample_of(load_examples(config.data, config.plugins.search_paths))[: training.max_examples or None]

    try:
        examples = load_training() if table == "[data]" else load_held_out(config)
        tokenizer = load_tokenizer(config.model.model)
    except RetrainError:
        return ""
    longest = sorted(examples, key=lambda example: len(str(example.prompt)))[-MEASURED:]
    encoder = PromptEncoder(tokenizer, config.data.system_prompt, training.max_prompt_tokens, lambda line: None)
    check_prompt_tokens(config, encoder, {table: longest})
    if config.teaching.enabled:
        cuts = check_known_context(config, encoder, longest)
        fix = "a larger max_prompt_tokens, a shorter template, or shorter questions"
    else:
        check_prompts(config, encoder, {table: longest}, context)
        few = f"the {MEASURED} longest" if len(longest) < len(examples) else plural(len(longest), "prompt")
        cuts = [f"of {few}, {cut}, from the left"] if (cut := encoder.describe_cut(longest)) else []
        # Uncut, they may not fit.
        fits = encoder.longest_whole(longest) + training.max_tokens <= context
        fix = (
            "max_prompt_tokens = 0, or shorter prompts" if fits else "shorter prompts, or a model with a longer context"
        )
    found, shared = f"up to {encoder.longest(longest)} of {context:,} tokens", 0
    if table == "[eval]" and reads_file(config.data.source):
        with suppress(RetrainError):
            shared = count_shared(load_training(), examples)
    if shared:
        fix = "set [eval] path or source to problems that are not trained on"
        cuts = [found, *cuts, f"{shared} of {len(examples)} are also in [data]"]
    return Doubt(f"{'; '.join(cuts)}.  Try: {fix}") if cuts else found
