from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from retrain.campaign.plan import find_limits, label_conditions, plan_runs
from retrain.config import load_config
from retrain.errors import ConfigError

from .campaigns import GRPO, MAXRL, campaign_config, planned


def test_every_condition_meets_every_seed_and_pairs_come_first(tmp_path: Path) -> None:
    names = [run.name for run in planned(campaign_config(tmp_path))]
    assert names == ["grpo+none_s1", "maxrl+none_s1", "grpo+none_s2", "maxrl+none_s2"]


def test_the_default_campaign_has_five_conditions_and_eight_seeds() -> None:
    runs = plan_runs(load_config(None, {}).model_copy(update={"campaign": default_campaign()}), Path("c"), "c.toml")
    assert len(runs) == 40
    assert {run.condition for run in runs} == {
        "grpo+none",
        "maxrl+none",
        "maxrl+gtpo",
        "maxrl+gtpo_hicra",
        "maxrl+gtpo_sepa",
    }
    assert {run.max_steps for run in runs} == {500}


def default_campaign() -> Any:
    from retrain.config.schema import Campaign

    return Campaign()


def test_every_run_has_its_own_folder_adapter_seed_and_wandb_name(tmp_path: Path) -> None:
    runs = planned(campaign_config(tmp_path, {"logging": {"wandb_tags": "paper"}}))
    for run in runs:
        config = run.config
        assert config.campaign is None
        assert (config.training.seed, config.training.max_steps) == (run.seed, 4)
        assert config.logging.log_dir == str(tmp_path / "runs" / run.name)
        assert config.backend.adapter_path == str(tmp_path / "runs" / run.name / "adapter")
        assert config.logging.wandb_run_name == f"{run.condition}_s{run.seed}"
        assert config.logging.wandb_group == run.condition
        assert config.logging.wandb_tags == f"paper,{run.condition},seed{run.seed}"
    assert len({run.config.backend.adapter_path for run in runs}) == 4


def test_conditions_with_one_algorithm_are_named_by_what_else_they_override(tmp_path: Path) -> None:
    conditions = [GRPO, GRPO | {"lr": 1e-4}, GRPO | {"gtpo": {"beta": 0.3}}]
    runs = planned(campaign_config(tmp_path, seeds=[1], conditions=conditions))
    assert [run.condition for run in runs] == ["grpo+none", "grpo+none_lr=0.0001", "grpo+none_gtpo.beta=0.3"]
    assert [run.config.training.lr for run in runs] == [4e-5, 1e-4, 4e-5]


def test_names_can_be_folders_and_tags_and_stay_distinct(tmp_path: Path) -> None:
    conditions = [GRPO | {"system_prompt": text} for text in ("a/b, c", "a b c", "x" * 200, "x" * 201)]
    runs = planned(campaign_config(tmp_path, seeds=[1], conditions=conditions))
    names = [run.name for run in runs]
    assert len(set(names)) == 4
    assert all("/" not in name and "," not in name and " " not in name and len(name) < 80 for name in names)


def test_three_equal_labels_stay_distinct() -> None:
    config = load_config()
    labels = label_conditions([config] * 3, [{"system_prompt": "!"}, {"system_prompt": "?"}, {"system_prompt": "%"}])
    assert len(set(labels)) == 3


def test_the_name_of_a_condition_does_not_depend_on_the_others(tmp_path: Path) -> None:
    tables = [GRPO | {"lr": 1e-3, "max_steps": 9}, MAXRL | {"system_prompt": "x" * 200}, GRPO]
    together = [run.condition for run in planned(campaign_config(tmp_path, seeds=[1], conditions=tables))]
    alone = [planned(campaign_config(tmp_path, seeds=[1], conditions=[table]))[0].condition for table in tables]
    assert together == alone
    assert together[0] == "grpo+none_lr=0.001", "steps may be added when a campaign is resumed"


def test_the_name_of_a_condition_does_not_depend_on_the_order_of_its_options(tmp_path: Path) -> None:
    tables = [GRPO | {"lr": 1e-3, "batch_size": 4}, {"batch_size": 4, "lr": 1e-3} | GRPO]
    names = [planned(campaign_config(tmp_path, seeds=[1], conditions=[table]))[0].condition for table in tables]
    assert names == ["grpo+none_batch_size=4_lr=0.001"] * 2


def test_conditions_that_differ_only_in_what_may_change_are_named_by_it(tmp_path: Path) -> None:
    names = [
        [run.condition for run in planned(campaign_config(tmp_path, seeds=[1], conditions=conditions))]
        for conditions in ([GRPO | {"max_steps": steps} for steps in some] for some in ((1, 2), (2, 3)))
    ]
    assert names[0][1] == names[1][0] == "grpo+none_training.max_steps=2"


@pytest.mark.parametrize(
    ("one", "other", "tables", "is_same"),
    [
        ({"type": "importance_sampling"}, {"type": "ppo"}, {}, True),
        ({"type": "ppo"}, {"type": "cispo", "clip_high": 0.5}, {}, True),
        ({"type": "ppo"}, {"type": "grpo"}, {}, False),  # another average
        ({"type": "ppo"}, {"type": "gspo"}, {}, False),  # ratios of sequences
        ({"type": "ppo"}, {"type": "cispo", "grad_clip": 0.5}, {}, False),
        ({"type": "ppo"}, {"type": "cispo"}, {"training": {"async_steps": 1}}, False),
    ],
)
def test_conditions_whose_losses_cannot_differ_are_named(
    tmp_path: Path, one: dict[str, Any], other: dict[str, Any], tables: dict[str, Any], is_same: bool
) -> None:
    conditions = [GRPO | {"loss": one}, GRPO | {"loss": other}]
    notes = find_limits(planned(campaign_config(tmp_path, tables, conditions=conditions)))
    assert len(notes) == is_same
    assert all("differ only in [loss]" in note and "updates are nearly the same" in note for note in notes)


@pytest.mark.parametrize(
    ("table", "tables", "words"),
    [
        ({"reward.correct_from": 0.2}, {}, "not measured alike: [reward] correct_from is 0.2 instead of 1.0"),
        ({"reward.timeout_s": 9.0}, {}, ""),
        ({"judge_model": "gpt-5"}, {}, ""),  # nobody judges
        ({"reward.type": "match"}, {}, 'not measured alike: [reward] type is "match" instead of "custom"'),
        (
            {"temperature": 0.2},
            {},
            "not measured alike: [training] temperature is 0.2 instead of 0.7; a difference in c",
        ),
        (
            {"temperature": 0.2},
            {"eval": {"every": 1}},
            "(see [eval] temperature) is 0.2 instead of 0.7",
        ),
        ({"temperature": 0.2}, {"eval": {"every": 1, "temperature": 0.0}}, ""),
        ({"eval.temperature": 0.7}, {"eval": {"every": 1}}, ""),
        (
            {"eval.temperature": 0.0},
            {"eval": {"every": 1}},
            "(see [eval] temperature) is 0.0 instead of 0.7",
        ),
        ({"teaching.efficiency_weight": 0.5}, {"teaching": {"enabled": True}}, ""),
        (
            {"eval.max_examples": 4},
            {"eval": {"every": 1}},
            "not evaluated alike: [eval] max_examples is 4 instead of 128",
        ),
        ({"eval.max_examples": 4}, {}, ""),
        ({"data.source": "math"}, {}, '[data] source is "math" instead of "arithmetic"; a difference in correct_rate'),
        (
            {"reward.type": "math", "temperature": 0.2},
            {},
            '[training] temperature is 0.2 instead of 0.7, [reward] type is "math" instead of "custom"; a difference',
        ),
        ({"training.max_examples": 9}, {}, "not measured alike: [training] max_examples is 9 instead of 0"),
        ({"training.max_examples": 9}, {"eval": {"every": 1}}, ""),
        ({"system_prompt": "Be brief."}, {"eval": {"every": 1}}, "not evaluated alike: [data] system_prompt is"),
        ({"model.model": "some/other"}, {}, "different models (builtin:tiny, some/other)"),
        ({"lr": 1e-3}, {"eval": {"every": 1}}, ""),
    ],
)
def test_what_the_comparison_of_conditions_cannot_tell_is_noted(
    tmp_path: Path, table: dict[str, Any], tables: dict[str, Any], words: str
) -> None:
    notes = find_limits(planned(campaign_config(tmp_path, tables, conditions=[GRPO, GRPO | table])))
    assert len(notes) == bool(words) and words in "".join(notes)


def test_training_data_may_differ_if_held_out_problems_do_not(tmp_path: Path) -> None:
    files = {"data": {"source": "jsonl", "path": "a.jsonl"}}
    own = {"eval": {"every": 1, "source": "jsonl", "path": "held_out.jsonl"}}
    conditions = [GRPO, GRPO | {"data.path": "b.jsonl"}]
    assert find_limits(planned(campaign_config(tmp_path, files | own, conditions=conditions))) == []
    conditions = [GRPO, GRPO | {"eval.path": "b.jsonl"}]
    (note,) = find_limits(planned(campaign_config(tmp_path, files | own, conditions=conditions)))
    assert '[eval] path is "b.jsonl" instead of "held_out.jsonl"' in note


def test_a_file_under_another_spelling_is_the_same(tmp_path: Path) -> None:
    conditions = [GRPO, GRPO | {"data.path": "./rows/../a.jsonl"}]
    files = {"data": {"source": "jsonl", "path": "a.jsonl"}}
    assert find_limits(planned(campaign_config(tmp_path, files, conditions=conditions))) == []


def test_a_condition_may_have_steps_of_its_own(tmp_path: Path) -> None:
    runs = planned(campaign_config(tmp_path, seeds=[1], conditions=[GRPO, MAXRL | {"max_steps": 500}]))
    assert [run.max_steps for run in runs] == [4, 500]


@pytest.mark.parametrize(
    ("tables", "campaign", "words"),
    [
        ({}, {"conditions": [GRPO, MAXRL | {"seed": 3}]}, r"conditions\[1\] sets training.seed"),
        ({}, {"conditions": [GRPO, MAXRL | {"log_dir": "x"}]}, r"conditions\[1\] sets logging.log_dir"),
        ({}, {"conditions": [GRPO, MAXRL | {"epochs": 1.0}]}, r"conditions\[1\] sets training.epochs"),
        ({}, {"executor": "ray", "gpus_per_run": 1.5}, "gpus_per_run is 1.5; above 1 Ray gives whole GPUs"),
        ({}, {"share_model": True, "parallel": True}, "share_model steps the runs in turn"),
        ({}, {"share_model": True, "executor": "ray"}, "share_model steps the runs in turn"),
        ({}, {"stop_when": "decided", "conditions": [GRPO]}, "stop_when compares conditions, and there is only one"),
        (
            {},
            {"stop_when": "decided", "seeds": [1, 2, 3, 4, 5]},
            "from 5 seeds on and needs more than that; there are 5",
        ),
    ],
)
def test_what_a_campaign_cannot_use_is_rejected(
    tmp_path: Path, tables: dict[str, Any], campaign: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        campaign_config(tmp_path, tables, **campaign)


def test_a_campaign_gives_its_runs_their_steps_seeds_and_folders(tmp_path: Path) -> None:
    own = {"training": {"seed": 1, "max_steps": 7, "epochs": 2.0}, "backend": {"adapter_path": "x", "devices": "cpu"}}
    runs = planned(campaign_config(tmp_path, own | {"squeeze": {"adapter_path": "x"}}, seeds=[5], conditions=[GRPO]))
    assert [(run.seed, run.max_steps, run.config.training.epochs) for run in runs] == [(5, 4, 0.0)]
    assert runs[0].config.backend.adapter_path == str(runs[0].folder / "adapter")


@pytest.mark.parametrize(
    ("campaign", "words"),
    [
        ({"conditions": [GRPO, MAXRL, GRPO]}, "same condition twice"),
        ({"conditions": []}, r"\[campaign\] conditions must not be empty"),
        ({"seeds": []}, r"\[campaign\] seeds must not be empty"),
        ({"seeds": [1, 2, 1]}, "same seed twice"),
        ({"seeds": [-1]}, "seeds"),
        ({"max_workers": -1}, r"max_workers must be >= 0"),
        ({"stagger_seconds": -1.0}, r"stagger_seconds must be >= 0"),
        ({"conditions": [{"lrr": 1.0}]}, "sets 'lrr', which is not an option that a condition can override"),
        ({"conditions": [{"lr": -1.0}]}, r"conditions\[0\]: \[training\] lr must be > 0"),
        ({"executor": "slurm"}, "executor must be one of"),
        ({"stop_when": "bored"}, "stop_when must be one of"),
        ({"max_steps": 0}, "max_steps must be >= 1"),
    ],
)
def test_a_wrong_campaign_does_not_load(campaign: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        campaign_config(None, **campaign)


def test_conditions_that_are_the_same_run_are_refused(tmp_path: Path) -> None:
    # The first states what it has anyway.
    for size, is_same in ((2, True), (3, False)):
        config = campaign_config(tmp_path, seeds=[1], conditions=[GRPO | {"batch_size": size}, GRPO])
        if is_same:
            with pytest.raises(ConfigError, match="campaign conditions 1 and 2 are the same run"):
                planned(config)
        else:
            assert len(planned(config)) == 2
    stated = campaign_config(tmp_path, seeds=[1], conditions=[GRPO, GRPO | {"max_steps": 4}])
    with pytest.raises(ConfigError, match="are the same run"):
        planned(stated)


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("gtpo_beta", "gtpo = { beta = ... }"),
        ("eval_temperature", "eval = { temperature = ... }"),
        ("reward_timeout_s", "reward = { timeout_s = ... }"),
        ("temperatur", "temperature"),
        ("learning_rate", "lr"),
        ("gtpo.betaa", "gtpo = { beta = ... }"),
        ("optimizer.lr", "lr"),
        ("gpto.beta", "gtpo = { beta = ... }"),
        ("rewrad.type", "reward = { type = ... }"),
        ("training.warmup_steps", "optimizer = { warmup_steps = ... }"),
        ("environment.max_tokens", "max_tokens"),
    ],
)
def test_an_unknown_key_is_answered_with_the_option_meant(tmp_path: Path, key: str, meant: str) -> None:
    conditions = [GRPO, {**GRPO, key: 0.3}]
    with pytest.raises(ConfigError, match=re.escape(f"Did you mean {meant}?")):
        campaign_config(tmp_path, conditions=conditions)


def test_a_key_that_might_mean_another_option_is_noted(tmp_path: Path) -> None:
    def notes_on(condition: dict[str, Any]) -> list[str]:
        config = campaign_config(tmp_path, conditions=[GRPO, {**GRPO, "lr": 1e-3, **condition}])
        return [note for note in find_limits(planned(config), config.campaign) if "in conditions sets" in note]

    assert notes_on({"beta": 0.3}) == ["beta in conditions sets [kl] beta; to set another: gtpo = { beta = ... }"]
    for clear in (
        {"kl": {"beta": 0.3}},
        {"kl.beta": 0.3},
        {"temperature": 0.5},
        {"lr": 1e-4},
        {"model": "builtin:tiny"},
    ):
        assert notes_on(clear) == []
