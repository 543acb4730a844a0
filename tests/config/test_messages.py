"""Error messages: table, key, value and a suggestion, all issues at once."""

from __future__ import annotations

from typing import Any

import pytest

from retrain.config import TrainConfig, build_config
from retrain.config.load import MAX_ISSUES
from retrain.config.toml import parse_toml
from retrain.errors import ConfigError


def problems_in(text: str | dict[str, Any]) -> list[str]:
    tables = parse_toml(text, "run.toml") if isinstance(text, str) else text
    with pytest.raises(ConfigError) as caught:
        build_config(tables, {}, "run.toml")
    return [str(problem) for problem in caught.value.issues]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[training]\nlr = -1.0", "[training] lr must be > 0, got -1.0.  Try: lr = 4e-05"),
        ("[training]\nbatch_size = 3.9", "[training] batch_size must be a whole number, got 3.9.  Try: batch_size = 8"),
        (
            "[training]\nbatch_size = true",
            "[training] batch_size must be a whole number, got true.  Try: batch_size = 8",
        ),
        ("[training]\nlr = true", "[training] lr must be a number, got true.  Try: lr = 4e-05"),
        ('[training]\nlr = "1e-4"', '[training] lr must be a number, got "1e-4".  Try: lr = 0.0001'),
        ('[training]\nlr = "-1"', '[training] lr must be a number, got "-1".  Try: lr = 4e-05'),
        (
            '[training]\nmax_steps = "12"',
            '[training] max_steps must be a whole number, got "12".  Try: max_steps = 12',
        ),
        ("[training]\nbatch_size = 4.0", "[training] batch_size must be a whole number, got 4.0.  Try: batch_size = 4"),
        ("[training]\nlr = inf", "[training] lr must be a finite number, got inf.  Try: lr = 4e-05"),
        ("[training]\nlr = nan", "[training] lr must be a finite number, got nan.  Try: lr = 4e-05"),
        ("[campaign]\nseeds = 4", "[campaign] seeds must be a list, got 4.  Try: seeds = [4]"),
        ('[campaign]\nseeds = "4,5"', '[campaign] seeds must be a list, got "4,5".  Try: seeds = [4, 5]'),
        (
            '[campaign]\nseeds = "a,5"',
            '[campaign] seeds must be a list, got "a,5".  Try: seeds = [42, 101, 202, 303, 404, 505, 606, 707]',
        ),
        ("[training]\ntop_p = 1.5", "[training] top_p must be <= 1, got 1.5.  Try: top_p = 1.0"),
        ("[training]\nseed = -2", "[training] seed must be >= -1, got -2.  Try: seed = -1"),
        (
            "[training]\nseed = 9007199254740993",
            "[training] seed must be <= 9007199254740992, got 9007199254740993.  Try: seed = -1",
        ),
        (
            "[training]\nn_samples_per_prompt = 7",
            "unknown option [training] n_samples_per_prompt.  Did you mean group_size?",
        ),
        (
            "[training]\nmax_response_length = 7",
            "unknown option [training] max_response_length.  Did you mean max_tokens?",
        ),
        (
            "[training]\nscale_rewards = true",
            "unknown option [training] scale_rewards.  Did you mean [algorithm] advantage_mode?",
        ),
        ("[training]\nmax_stepz = 7", "unknown option [training] max_stepz.  Did you mean max_steps?"),
        ("[training]\nlora_rank = 7", "unknown option [training] lora_rank.  Did you mean [model] lora_rank?"),
        ("[training]\nlora_rnk = 7", "unknown option [training] lora_rnk.  Did you mean [model] lora_rank?"),
        ("[training.sepa]\nsteps = 7", "unknown option [training] sepa.  Did you mean the table [sepa]?"),
        ("[training]\nqqqq = 7", "unknown option [training] qqqq.  `retrain help` lists every option."),
        ("[trainnning]", "unknown table [trainnning].  Did you mean [training]?"),
        ("[[trainnning]]", "unknown table [trainnning].  Did you mean [training]?"),
        ("lr = 1.0", "unknown option lr outside any table.  Did you mean [training] lr?"),
        ("qqqq = 1.0", "unknown option qqqq outside any table.  Options stand inside a [table]."),
        ("training = 3", "[training] must be a table, got 3.  Try: [training]"),
        (
            "[[training]]\nlr = 1",
            "[training] must be a table, got [{ lr = 1 }].  Try: [training], with single brackets",
        ),
        (
            '[inference]\nprefix_caching = "false"',
            '[inference] prefix_caching must be true or false, got "false".  Try: prefix_caching = false',
        ),
        (
            '[sepa]\nschedule = "cosine"',
            "[sepa] schedule must be one of 'linear', 'auto', got \"cosine\".  Try: schedule = \"linear\"",
        ),
        *(
            (
                f"[distributed]\n{line}",
                f"[distributed] {line.split()[0]} was removed.  "
                "Try: fsdp = true, or `retrain grpo` with accelerate/zero3.yaml for ZeRO",
            )
            for line in ("zero_stage = 3", "offload_optimizer = true", "offload_parameters = true")
        ),
        ('[model]\nmodel = ""', '[model] model must not be empty, got "".  Try: model = "Qwen/Qwen3-4B-Instruct-2507"'),
        ("[logging]\nlog_dir = 5", '[logging] log_dir must be a string, got 5.  Try: log_dir = "logs/train"'),
        ("[environment]\nargs = 5", "[environment] args must be a table, got 5.  Try: args = {}"),
        (
            "[environment]\nargs = '{\"a\": '",
            '[environment] args is not valid JSON (Expecting value at character 6), got "{\\"a\\": ".  Try: args = {}',
        ),
        (
            "[environment]\nargs = '{\"a\": [null]}'",
            "[environment] args holds null, which TOML lacks.  Try: leave that key out",
        ),
        ("[environment]\nargs = '{\"\\ud800\": 1}'", "[environment] args holds text that is not valid Unicode."),
        (
            "[plugins]\nsearch_paths = [1]",
            '[plugins] search_paths[0] must be a string, got 1.  Try: search_paths = ["."]',
        ),
        ("[squeeze]\ntarget_ranks = [8, 0]", "[squeeze] target_ranks[1] must be >= 1, got 0.  Try: target_ranks = []"),
        ("[reward]\nterms = [{weigth = 1}]", "[reward] terms[0].weigth is unknown.  Did you mean weight?"),
        (
            "[reward]\nterms = [{weight = true}]",
            "[reward] terms[0].weight must be a number, got true.  Try: terms = []",
        ),
        ('[resume]\nfrom_ = "x"', "unknown option [resume] from_.  Did you mean from?"),
        ('["a\\nb"]', 'unknown table ["a\\nb"].  Tables: ' + ", ".join(TrainConfig.model_fields) + "."),
        (
            '[training]\n"\\u001b[31m" = 1',
            'unknown option [training] "\\u001b[31m".  `retrain help` lists every option.',
        ),
        ('[training]\n"" = 1', 'unknown option [training] "".  `retrain help` lists every option.'),
        (
            "[training]\nseed = 0x" + "f" * 5000,
            f"[training] seed must be <= 9007199254740992, got 0x{'f' * 55}....  Try: seed = -1",
        ),
        ("[training]\nlr = 0x" + "f" * 5000, f"[training] lr must be a number, got 0x{'f' * 55}....  Try: lr = 4e-05"),
    ],
)
def test_an_issue_has_a_location_a_value_and_a_suggestion(text: str, problem: str) -> None:
    assert problems_in(text) == [problem]


def test_removed_options_with_their_former_defaults_are_dropped() -> None:
    saved = {"distributed": {"zero_stage": 0, "fsdp": True, "offload_optimizer": False, "offload_parameters": False}}
    assert build_config(saved, {}, "config.toml") == build_config({"distributed": {"fsdp": True}}, {}, "config.toml")


def test_an_override_of_a_removed_option_names_the_replacement() -> None:
    with pytest.raises(ConfigError, match=r"\[distributed\] zero_stage was removed\.  Try: fsdp = true"):
        build_config({}, {"distributed.zero_stage": 3}, "run.toml")


def test_one_error_reports_all_issues() -> None:
    text = """
    lr = 3
    [training]
    lr = -1
    max_stepz = 7
    [trainnning]
    [backend]
    devices = "tpu:0"
    [backpressure]
    enabled = true
    min_batch_size = 9
    max_batch_size = 3
    """
    with pytest.raises(ConfigError) as caught:
        build_config(parse_toml(text, "run.toml"), {"nothing.here": 1}, "run.toml")
    assert str(caught.value).splitlines()[0] == "run.toml has 7 problems:"
    assert len(str(caught.value).splitlines()) == 8
    places = " | ".join(problem.where for problem in caught.value.issues)
    for place in ("[nothing] here", "lr", "[training] lr", "max_stepz", "[trainnning]", "devices", "max_batch_size"):
        assert place in places


def test_a_single_issue_is_singular() -> None:
    with pytest.raises(ConfigError, match=r"^run\.toml has 1 problem:\n"):
        build_config({"training": {"lr": -1}}, {}, "run.toml")


def test_an_invalid_value_causes_no_issues_of_other_options() -> None:
    # `type` is the default here only because what was written is no string.
    assert len(problems_in({"reward": {"type": 5, "custom_module": "mine"}})) == 1
    assert len(problems_in({"reward": {"type": "judge", "judge_modle": "gpt"}})) == 1


def test_thousands_of_issues_are_truncated() -> None:
    found = problems_in("[training]\n" + "\n".join(f"key{n} = {n}" for n in range(20_000)))
    assert len(found) == MAX_ISSUES + 1
    assert found[-1] == "and 19950 more."


def test_long_keys_and_values_are_truncated() -> None:
    (problem,) = problems_in({"training": {"k" * 100_000: "v"}})
    assert len(problem) < 200
    (problem,) = problems_in({"training": {"lr": "v" * 100_000}})
    assert len(problem) < 200
    (problem,) = problems_in({"algorithm": {"advantage_mode": "v" * 100_000}})
    assert len(problem) < 250


@pytest.mark.parametrize(
    ("tables", "where"),
    [
        (lambda deep: {"environment": {"args": deep}}, "[environment] args"),
        (lambda deep: {"campaign": {"conditions": [deep]}}, "[campaign] conditions"),
        (lambda deep: {"training": {"lr": deep}}, "[training] lr"),
        (lambda deep: {"nothing": deep}, "[nothing] a"),
        (lambda deep: {"nothing": [deep]}, "[nothing]"),
        (lambda deep: {"a": deep}, "[a] a"),
    ],
)
def test_values_nested_too_deeply_are_reported(tables: Any, where: str) -> None:
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"a": deep}
    found = problems_in(tables(deep))
    assert any(problem == f"{where} is nested more than 32 levels deep." for problem in found)


def test_the_given_tables_are_not_modified() -> None:
    tables: dict[str, Any] = {"training": {"lr": -1, "seed": 3}, "trainnning": {}}
    with pytest.raises(ConfigError):
        build_config(tables, {"training.seed": 4, "model.lora_rank": 8}, "run.toml")
    assert tables == {"training": {"lr": -1, "seed": 3}, "trainnning": {}}
