from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from folders import write_campaign, write_run

from retrain.analysis.comparison import compare_runs
from retrain.analysis.runs import find_runs, find_unlabelled
from retrain.campaign.progress import read_progress
from retrain.cli import run
from retrain.cli.status import find_entries
from retrain.report.contents import collect
from retrain.storage.folder import lock_folder

PROBLEMS = 64


def answers(rate: float, seed: int) -> list[int]:
    return [int(x) for x in np.random.default_rng(seed).random(PROBLEMS) < rate]


@pytest.fixture
def campaign(tmp_path: Path) -> Path:
    seeds = range(1, 7)
    return write_campaign(
        tmp_path / "campaign",
        {
            "grpo+none": {seed: answers(0.3, seed) for seed in seeds},
            "maxrl+none": {seed: answers(0.8, 10 + seed) for seed in seeds},
            "maxrl+gtpo": {seed: answers(0.3, 30 + seed) for seed in seeds},
        },
    )


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, Any]:
    capsys.readouterr()
    assert run(["compare", *map(str, arguments), "--json"]) == 0
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    return data


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    capsys.readouterr()
    assert run(["compare", *map(str, arguments)]) == 2
    return capsys.readouterr().err


def test_seeds_with_one_value_tell_no_noise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    never = {seed: [0] * PROBLEMS for seed in (1, 2, 3)}
    folder = write_campaign(tmp_path / "campaign", {"grpo+none": never, "maxrl+none": never})
    assert compare_runs(find_runs([folder])).noise is None
    assert run(["compare", str(folder)]) == 0
    assert "Noise floor: unknown, since all seeds of a condition gave the same value." in capsys.readouterr().out


def test_a_campaign_whose_first_run_is_still_loading_is_refused_in_a_sentence(
    campaign: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(campaign / "runs")
    for arguments in ((campaign,), (campaign, "--metric", "loss")):
        assert "there is no run with a step yet" in refusal(capsys, *arguments)


@pytest.mark.parametrize("rate", [0.0, None])
def test_an_evaluation_without_scores_is_not_compared(
    campaign: Path, capsys: pytest.CaptureFixture[str], rate: float | None
) -> None:
    # Earlier versions wrote 0.
    for folder in (campaign / "runs").glob("maxrl+none_*"):
        *others, last = [json.loads(line) for line in (folder / "eval.jsonl").read_text().splitlines()]
        none = dict.fromkeys(("eval_pass_at_1", "eval_pass_at_k", "eval_ci_low", "eval_ci_high"), rate)
        empty = last | none | {"correct": [0] * PROBLEMS, "counted": [0] * PROBLEMS}
        (folder / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (*others, empty)))
    data = as_json(capsys, campaign, "--metric", "eval_pass_at_1")
    assert {c["condition"] for c in data["comparisons"]} == {"maxrl+gtpo"}
    assert any("maxrl+none" in note and "Left out" in note for note in data["notes"])
    status = read_progress(campaign / "runs" / "maxrl+none_s1")
    assert status is not None and status.held_out is None
    for page in (collect([campaign]), collect([campaign / "runs" / "maxrl+none_s1"])):
        assert "0.0%" not in page["verdict"]["sentence"]


def test_runs_whose_evaluations_have_no_scores_are_compared_in_training(
    campaign: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = campaign / "runs" / "maxrl+none_s1" / "eval.jsonl"
    rows = [json.loads(line) | {"correct": [0], "counted": [0]} for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = as_json(capsys, campaign)
    assert data["metric"] == "correct_rate"
    assert any("no evaluation of maxrl+none_s1" in note for note in data["notes"])
    assert "not compared" not in collect([campaign])["verdict"]["sentence"]


def test_the_metric_that_some_runs_lack_is_suggested_only_if_it_compares(
    campaign: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("maxrl+none", "maxrl+gtpo"):
        for file in (campaign / "runs").glob(f"{name}_*/eval.jsonl"):
            file.unlink()
    (note,) = [note for note in as_json(capsys, campaign)["notes"] if "Compared by correct_rate" in note]
    assert "--metric" not in note


def test_a_campaign_is_compared_with_its_first_condition(campaign: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = as_json(capsys, campaign)
    assert (data["metric"], data["step"], data["notes"]) == ("eval_pass_at_1", 4, [])
    better, same = data["comparisons"]
    assert (better["condition"], better["baseline"]) == ("maxrl+none", "grpo+none")
    assert better["verdict"] == "statistically_significant_improvement"
    assert same["verdict"] == "insufficient_evidence"
    assert better["seeds"] == [1, 2, 3, 4, 5, 6]
    assert better["problems"]["problems"] == PROBLEMS
    assert better["problems"]["difference"] == pytest.approx(better["test"]["difference"])
    assert 0 < data["noise_floor"]["standard_deviation"] < 0.2


@pytest.mark.parametrize("how", ["removed", "empty", "not evaluated"])
def test_the_first_condition_is_the_baseline_also_without_its_first_run(
    campaign: Path, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    table = json.loads((campaign / "manifest.json").read_text())
    # As a campaign orders its runs: by seed.
    table["runs"].sort(key=lambda entry: entry["seed"])
    (campaign / "manifest.json").write_text(json.dumps(table))
    first = campaign / table["runs"][0]["folder"]
    assert table["runs"][0]["condition"] == "grpo+none"
    if how == "removed":
        shutil.rmtree(first)
    for name in {"empty": ("metrics.jsonl", "eval.jsonl"), "not evaluated": ("eval.jsonl",)}.get(how, ()):
        (first / name).write_text("")
    data = as_json(capsys, campaign, "--metric", "eval_pass_at_1")
    assert {(c["baseline"], c["verdict"]) for c in data["comparisons"] if c["condition"] == "maxrl+none"} == {
        ("grpo+none", "statistically_significant_improvement")
    }
    if how == "empty":
        assert f"Left out, without any step: {first.name}." in as_json(capsys, campaign)["notes"]


def test_a_first_condition_without_runs_is_named(campaign: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in (campaign / "runs").glob("grpo+none_*"):
        shutil.rmtree(folder)
    data = as_json(capsys, campaign)
    assert data["comparisons"][0]["baseline"] == "maxrl+none"
    assert any("No run of grpo+none, the first condition of" in note for note in data["notes"])
    assert not any("No run of" in note for note in as_json(capsys, campaign, "--baseline", "maxrl+gtpo")["notes"])


def test_another_baseline_and_metric_can_be_asked_for(campaign: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = as_json(capsys, campaign, "--baseline", "maxrl+none", "--metric", "loss", "--last", "1")
    assert data["higher_is_better"] is False
    assert data["comparisons"][0]["verdict"] == "significant_degradation"
    assert data["comparisons"][0]["problems"] is None


def test_problems_without_a_score_are_named(campaign: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert as_json(capsys, campaign)["comparisons"][0]["problems"]["left_out"] == 0
    path = next(campaign.glob("runs/*/eval.jsonl"))
    *before, last = map(json.loads, path.read_text().splitlines())
    last["counted"][0] = last["correct"][0] = 0
    path.write_text("".join(json.dumps(row) + "\n" for row in [*before, last]))
    total = len(last["counted"])
    assert run(["compare", str(campaign)]) == 0
    text = capsys.readouterr().out
    assert f"On the {total - 1} of {total} held-out problems that every run scored the difference is" in text
    assert "The means are over the problems that each run scored" in text


def test_options_that_no_label_shows_are_named(campaign: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (campaign / "runs").glob("maxrl+none*/config.toml"):
        rate = re.search(r"(?m)^lr = .*$", text := path.read_text())
        path.write_text(text.replace(rate[0], "lr = 0.5") if rate else f"{text}\n[training]\nlr = 0.5\n")
    assert any(
        "maxrl+none and grpo+none also differ in training.lr (0.5, " in n for n in as_json(capsys, campaign)["notes"]
    )


def test_data_and_models_in_equally_named_files_are_told_apart_by_their_folders(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = []
    for mode, version, seed in (("grpo", "v1", 1), ("grpo", "v2", 2), ("maxrl", "v1", 1), ("maxrl", "v1", 2)):
        data = {"data__source": "jsonl", "data__path": f"/data/{version}/rows.jsonl", "algorithm__advantage_mode": mode}
        runs.append(write_run(tmp_path / f"{mode}_{version}_{seed}", [0.5, 0.5], training__seed=seed, **data))
    assert "grpo+none,path=v1/rows.jsonl and grpo+none,path=v2/rows.jsonl have no seed" in refusal(capsys, *runs)
    notes = as_json(capsys, *runs[1:])["notes"]
    assert "maxrl+none and grpo+none also differ in data.path (v1/rows.jsonl, v2/rows.jsonl)." in " ".join(notes)
    # The same contents in another place are the same data.
    for folder in runs:
        state = json.loads((folder / "trainer_state.json").read_text())
        (folder / "trainer_state.json").write_text(json.dumps(state | {"data": "one"}))
    (comparison,) = as_json(capsys, *runs)["comparisons"]
    assert (comparison["baseline"], comparison["condition"]) == ("grpo+none", "maxrl+none")
    models = [write_run(tmp_path / name, [0.5], model__model=f"/{name}/final") for name in ("a", "b")]
    found = as_json(capsys, *models, "--allow-different-models")
    assert [each["condition"] for each in found["comparisons"]] == ["grpo+none,model=b/final"]


def test_a_problem_without_a_score_in_every_run_makes_no_difference(
    campaign: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in campaign.glob("runs/*/eval.jsonl"):
        *before, last = map(json.loads, path.read_text().splitlines())
        last["counted"][0] = last["correct"][0] = 0
        path.write_text("".join(json.dumps(row) + "\n" for row in [*before, last]))
    assert run(["compare", str(campaign)]) == 0
    text = capsys.readouterr().out
    assert "held-out problems that every run scored the difference is" in text
    assert "The means are over the problems" not in text


def test_a_metric_without_a_better_direction_only_differs(campaign: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in campaign.glob("runs/*/metrics.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(row | {"grad_norm": 9 - row["correct_rate"]}) + "\n" for row in rows))
    options = ("--metric", "grad_norm", "--last", "1")
    data = as_json(capsys, campaign, *options)
    assert data["higher_is_better"] is None
    assert [c["verdict"] for c in data["comparisons"]] == ["significant_difference", "insufficient_evidence"]
    assert run(["compare", str(campaign), *options]) == 0
    text = capsys.readouterr().out
    assert "grad_norm at step 3, paired by seed" in text and "maxrl+none differs from grpo+none by -0." in text
    assert not any(word in text for word in ("better", "worse", "degradation", "improvement"))
    for flag, verdict in (
        ("--lower-is-better", "statistically_significant_improvement"),
        ("--higher-is-better", "significant_degradation"),
    ):
        assert as_json(capsys, campaign, *options, flag)["comparisons"][0]["verdict"] == verdict


def test_the_table_says_it_in_words(campaign: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["compare", str(campaign)]) == 0
    text = capsys.readouterr().out
    assert "maxrl+none is better than grpo+none by 0." in text
    assert "maxrl+gtpo is not distinguishable from grpo+none with 6 seeds." in text
    assert "6 seeds cannot give less than 0.0312" in text
    assert "Noise floor" in text and "held-out problems" in text
    assert "in 5% of cases, two runs of one condition differ by more than 0." in " ".join(text.split())
    assert "insufficient evidence" in text and "insufficient_evidence" not in text


def test_markdown_is_a_table_with_the_sentences_below(campaign: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["compare", str(campaign), "--markdown"]) == 0
    lines = capsys.readouterr().out.splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 5 and len({line.count("|") for line in table}) == 1
    assert any(line.startswith("- maxrl+none is better") for line in lines)
    assert run(["compare", str(campaign), "--markdown", "--json"]) == 2


def test_loose_runs_are_grouped_by_what_differs_in_their_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for lr in (1e-4, 1e-3):
        for seed in (1, 2, 3):
            folder = tmp_path / f"lr{lr}_{seed}"
            write_run(folder, [0.1 * seed, 0.1 * seed + 100 * lr], training__lr=lr, training__seed=seed)
    data = as_json(capsys, tmp_path)
    assert set(data["values"]) == {"grpo+none,lr=0.0001", "grpo+none,lr=0.001"}
    assert data["metric"] == "correct_rate"
    named = as_json(capsys, *(tmp_path / f"lr{lr}_{seed}" for lr in (1e-3, 1e-4) for seed in (1, 2)))
    assert named["comparisons"][0]["baseline"] == "grpo+none,lr=0.001"


def test_tables_that_differ_before_a_slash_are_told_apart(tmp_path: Path) -> None:
    for seed, args in enumerate([{"a": "1/2"}, {"a": "3/2"}, {"a": "3/2", "b": 1}]):
        environment = {"environment__provider": "verifiers", "environment__id": "gsm8k", "environment__args": args}
        write_run(tmp_path / f"{seed}", [0.1], training__seed=seed, **environment)
    assert {found.condition for found in find_runs([tmp_path])} == {
        'grpo+none,args={ a = "1/2" }',
        'grpo+none,args={ a = "3/2" }',
        'grpo+none,args={ a = "3/2", b = 1 }',
    }


def test_texts_that_differ_in_a_slash_are_told_apart(tmp_path: Path) -> None:
    for seed, prompt in enumerate(["Answer Yes", "Answer Yes/"]):
        write_run(tmp_path / f"{seed}", [0.1], training__seed=seed, data__system_prompt=prompt)
    assert len({found.condition for found in find_runs([tmp_path])}) == 2


def test_long_texts_and_options_of_one_name_have_short_labels(tmp_path: Path) -> None:
    ends = "Think\nin <think></think>, then answer in <answer></answer>"
    prompts = {"a": ends, "b": f"Be brief. {ends}"}
    for seed, prompt in enumerate(prompts.values()):
        write_run(tmp_path / "texts" / f"{seed}", [0.1], training__seed=seed, data__system_prompt=prompt)
    assert {found.condition for found in find_runs([tmp_path / "texts"])} == {
        r"grpo+none,system_prompt=Think\nin <think></think>, then answer …",
        r"grpo+none,system_prompt=Be brief. Think\nin <think></think>, th…",
    }
    for seed, (gtpo, kl) in enumerate([(0.1, 0.2), (0.2, 0.1)]):
        options = {"algorithm__transform_mode": "gtpo", "gtpo__beta": gtpo, "kl__beta": kl}
        write_run(tmp_path / "names" / f"{seed}", [0.1], training__seed=seed, **options)
    assert {found.condition for found in find_runs([tmp_path / "names"])} == {
        "grpo+gtpo,kl.beta=0.2,gtpo.beta=0.1",
        "grpo+gtpo,kl.beta=0.1,gtpo.beta=0.2",
    }
    # The label of one of them must not seem to show the other.
    for seed, (gtpo, kl) in enumerate([(0.1, 0.2), (0.1, 0.1), (0.2, 0.1)]):
        options = {"algorithm__transform_mode": "gtpo", "gtpo__beta": gtpo, "kl__beta": kl}
        write_run(tmp_path / "three" / f"{seed}", [0.1], training__seed=seed, **options)
    runs = find_runs([tmp_path / "three"])
    assert len({found.condition for found in runs}) == 3
    for found in runs:
        labels = set(found.condition.split(",")[1:])
        assert labels and all(label.startswith(("kl.beta=", "gtpo.beta=")) for label in labels)
    unlabelled = [replace(found, condition=f"{n},beta=0.1") for n, found in enumerate(runs)]
    assert find_unlabelled(unlabelled, "0,beta=0.1") != []


def test_a_table_in_another_order_is_the_same_condition(tmp_path: Path) -> None:
    tables: list[dict[str, Any]] = [{"a": 1.0, "b": 2.0}, {"b": 2, "a": 1}, {"a": 3.0, "b": 2.0}]
    for seed, args in enumerate(tables):
        environment = {"environment__provider": "verifiers", "environment__id": "gsm8k", "environment__args": args}
        write_run(tmp_path / f"{seed}", [0.1], training__seed=seed, **environment)
    assert [found.condition for found in find_runs([tmp_path])] == [
        "grpo+none,args={ a = 1.0, b = 2.0 }",
        "grpo+none,args={ a = 1.0, b = 2.0 }",
        "grpo+none,args={ a = 3.0, b = 2.0 }",
    ]


def test_links_to_runs_and_loops_in_a_folder_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in (1, 2):
        write_run(tmp_path / "logs" / f"run{seed}", [0.1], training__seed=seed)
        write_run(tmp_path / "elsewhere" / f"run{seed}", [0.1], training__seed=seed + 2)
    (tmp_path / "logs" / "latest").symlink_to("run2")
    (tmp_path / "logs" / "loop").symlink_to(".")
    (tmp_path / "logs" / "up").symlink_to(tmp_path)
    (tmp_path / "logs" / "itself").symlink_to("itself")
    (tmp_path / "logs" / "others").symlink_to("../elsewhere")
    (tmp_path / "logs" / "same").symlink_to("others")
    (tmp_path / "elsewhere" / "latest").symlink_to("run2")
    names = [found.path.relative_to(tmp_path / "logs") for found in find_runs([tmp_path / "logs"])]
    assert list(map(str, names)) == ["others/run1", "others/run2", "run1", "run2"]
    assert [found.path.name for found in find_runs([tmp_path / "logs" / "latest"])] == ["latest"]
    assert len(find_entries(tmp_path / "logs")) == 4


def test_options_without_effect_make_no_condition(tmp_path: Path) -> None:
    for seed, id in enumerate(["", "guess-number", "calculator"]):
        write_run(tmp_path / f"{seed}", [0.1, 0.2], training__seed=seed, environment__id=id)
    assert {found.condition for found in find_runs([tmp_path])} == {"grpo+none"}


def test_intervals_have_the_level_that_was_asked_for(campaign: Path, capsys: pytest.CaptureFixture[str]) -> None:
    usual, wanted = (as_json(capsys, campaign, *more)["comparisons"][0] for more in ((), ("--alpha", "0.3")))
    for one, other in ((usual["test"], wanted["test"]), (usual["problems"], wanted["problems"])):
        assert one["interval"][1] - one["interval"][0] > 1.3 * (other["interval"][1] - other["interval"][0])
    assert "(95% interval" in usual["sentence"] and "(70% interval" in wanted["sentence"]
    assert run(["compare", str(campaign), "--alpha", "0.3"]) == 0
    text = capsys.readouterr().out
    assert "70% interval" in text and "95%" not in text


def test_a_difference_that_is_the_same_in_every_seed_has_no_interval(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scores = {name: {seed: [1, 1, seed % 2, last] for seed in range(1, 7)} for name, last in (("a", 0), ("b", 1))}
    folder = write_campaign(tmp_path / "c", {"grpo+none": scores["a"], "maxrl+none": scores["b"]})
    (pair,) = as_json(capsys, folder)["comparisons"]
    assert pair["test"]["interval"] is None
    assert "interval" not in pair["sentence"]


def test_the_mean_of_the_baseline_is_over_the_seeds_that_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    baseline = {1: [1, 0, 0, 0], 2: [1, 1, 0, 0], 3: [1, 1, 1, 1]}
    other = {1: [1, 1, 0, 0], 2: [1, 1, 1, 1]}
    assert run(["compare", str(write_campaign(tmp_path / "c", {"grpo+none": baseline, "maxrl+none": other}))]) == 0
    text = capsys.readouterr().out
    assert "0.3750" in text and "0.7500" in text and "+0.3750" in text
    assert "do not share seed 3; ignored." in text


def test_what_a_run_computes_is_part_of_its_condition(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in (1, 2):
        write_run(tmp_path / f"a{seed}", [0.1, 0.2], training__seed=seed)
        write_run(tmp_path / f"b{seed}", [0.1, 0.3], training__seed=seed, logging__strategic_grams="boxed")
    assert set(as_json(capsys, tmp_path)["values"]) == {"grpo+none,strategic_grams=", "grpo+none,strategic_grams=boxed"}
    for seed in (1, 2):
        for steps in (4, 400):
            options = {"training__max_steps": steps, "optimizer__schedule": "cosine", "training__seed": seed}
            write_run(tmp_path / "cosine" / f"{steps}_{seed}", [0.1, 0.2], **options)
    data = as_json(capsys, tmp_path / "cosine")
    assert set(data["values"]) == {"grpo+none,max_steps=4", "grpo+none,max_steps=400"}
    assert "correct_rate is the mean of the last 2 steps up to step 1." in data["notes"]


def test_one_seed_has_no_interval_but_its_problems_can_be_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_campaign(tmp_path / "c", {"grpo+none": {42: answers(0.2, 1)}, "maxrl+none": {42: answers(0.9, 2)}})
    (pair,) = as_json(capsys, folder)["comparisons"]
    assert pair["verdict"] == "insufficient_evidence" and pair["test"]["interval"] is None
    assert "there is no interval" in pair["sentence"]
    assert pair["problems"]["p_value"] < 0.001


def test_an_interval_of_two_seeds_contains_only_possible_differences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scores = {"grpo+none": {1: [1, 0, 0, 0], 2: [1, 1, 1, 0]}, "maxrl+none": {1: [1, 1, 1, 1], 2: [1, 1, 0, 0]}}
    folder = write_campaign(tmp_path / "c", scores)
    data = as_json(capsys, folder)
    (pair,) = data["comparisons"]
    assert pair["test"]["difference"] == 0.25
    # The t interval of 0.75 and -0.25 is 0.25 ± 6.35.
    assert pair["test"]["interval"] == [-1.0, 1.0]
    assert pair["detectable"] == 1.0 and data["noise_floor"]["single_runs"] == 1.0
    assert run(["compare", str(folder)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "The interval is cut at ±1, the largest possible difference: 2 seeds are too few." in text
    assert "too few seeds to say how much two runs of one condition may differ" in text
    assert "Detectable difference" not in text


def test_unequal_steps_are_compared_at_the_step_all_reached(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in (1, 2):
        write_run(tmp_path / f"a{seed}", [0.1, 0.2, 0.3, 0.9], {0: [0, 0], 2: [1, 0], 4: [1, 1]}, training__seed=seed)
        write_run(
            tmp_path / f"b{seed}",
            [0.1, 0.2],
            {0: [0, 0], 2: [0, 0]},
            status="interrupted",
            training__seed=seed,
            algorithm__advantage_mode="maxrl",
        )
    data = as_json(capsys, tmp_path)
    assert data["step"] == 2
    assert data["values"]["grpo+none"] == {"1": 0.5, "2": 0.5}
    assert any("unequal steps" in note for note in data["notes"])
    assert any("Not finished: b1, b2" in note for note in data["notes"])
    by_training = as_json(capsys, tmp_path, "--metric", "correct_rate", "--last", "1")
    assert (by_training["step"], by_training["values"]["grpo+none"]["1"]) == (1, 0.2)


def test_a_condition_without_a_common_evaluation_does_not_prevent_the_other_comparisons(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in (1, 2):
        for mode, evaluations in (
            ("grpo", {0: [0, 0], 2: [1, 0], 4: [1, 1]}),
            ("maxrl", {0: [0, 0], 4: [1, 0]}),
            ("grpo_scaled", {0: [0, 0], 3: [1, 0]}),
        ):
            options = {"training__seed": seed, "algorithm__advantage_mode": mode}
            write_run(tmp_path / f"{mode}{seed}", [0.1] * 4, evaluations, **options)
    data = as_json(capsys, tmp_path)
    assert (data["step"], [row["condition"] for row in data["comparisons"]]) == (4, ["maxrl+none"])
    assert "Left out, without an evaluation at step 4: grpo_scaled+none: steps 0, 3." in data["notes"]


def test_a_single_run_without_a_common_evaluation_does_not_prevent_a_comparison(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    longer, shorter = {0: [0, 0], 10: [1, 0], 12: [1, 1]}, {0: [0, 0], 4: [1, 0]}
    for mode, seeds in (("grpo", (1, 2, 3)), ("maxrl", (1, 2)), ("grpo_scaled", (1, 2, 3))):
        for seed in seeds:
            is_short = mode == "grpo_scaled" or seed == 3
            options = {"training__seed": seed, "algorithm__advantage_mode": mode}
            write_run(tmp_path / f"{mode}{seed}", [0.1] * 4, shorter if is_short else longer, **options)
    data = as_json(capsys, tmp_path, "--baseline", "grpo+none")
    assert (data["step"], data["values"]) == (12, {name: {"1": 1.0, "2": 1.0} for name in ("grpo+none", "maxrl+none")})
    left_out = "Left out, without an evaluation at step 12: grpo+none seed 3, grpo_scaled+none: steps 0, 4."
    assert left_out in data["notes"]
    # Only seed 2 of grpo_scaled has the step, and the baseline lacks that seed there.
    for mode, seed, evaluations in (("grpo", 2, shorter), ("grpo_scaled", 2, longer)):
        options = {"training__seed": seed, "algorithm__advantage_mode": mode}
        write_run(tmp_path / f"{mode}{seed}", [0.1] * 4, evaluations, **options)
    data = as_json(capsys, tmp_path, "--baseline", "maxrl+none")
    assert (data["step"], data["values"]) == (
        12,
        {"grpo+none": {"1": 1.0}, "grpo_scaled+none": {"2": 1.0}, "maxrl+none": {"1": 1.0, "2": 1.0}},
    )
    data = as_json(capsys, tmp_path, "--baseline", "grpo+none")
    assert (data["step"], list(data["values"])) == (12, ["grpo+none", "maxrl+none"])
    assert "Left out, without a seed of grpo+none at step 12: grpo_scaled+none." in data["notes"]


def test_untrained_weights_are_never_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in (1, 2):
        write_run(tmp_path / f"a{seed}", [0.1] * 4, {0: [0, 0], 2: [1, 0], 4: [1, 1]}, training__seed=seed)
        short = tmp_path / f"b{seed}"
        options = {"training__seed": seed, "algorithm__advantage_mode": "maxrl"}
        write_run(short, [0.1, 0.2, 0.3], {0: [0, 0], 3: [0, 0]}, **options)
    text = " ".join(refusal(capsys, tmp_path).split())
    assert "no common evaluation after training (grpo+none: steps 0, 2, 4; maxrl+none: steps 0, 3)" in text
    write_run(short, [0.1], {0: [0, 0]}, **options)
    assert "grpo+none: steps 0, 2, 4; maxrl+none: steps 0, 3 (seed 2: 0))" in " ".join(
        refusal(capsys, tmp_path).split()
    )
    assert as_json(capsys, tmp_path, "--metric", "correct_rate")["step"] == 0


def test_torn_lines_are_left_out_and_reported(campaign: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = campaign / "runs" / "grpo+none_s1" / "eval.jsonl"
    path.write_bytes(path.read_bytes() + b'{"step": 8, "eval_pa\xff')
    os.truncate(campaign / "runs" / "grpo+none_s2" / "metrics.jsonl", 150)
    data = as_json(capsys, campaign)
    assert data["step"] == 4
    assert sum("1 incomplete line skipped" in note for note in data["notes"]) == 2


def test_different_models_are_rejected_unless_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in (1, 2):
        write_run(tmp_path / f"a{seed}", [0.1], training__seed=seed)
        write_run(tmp_path / f"b{seed}", [0.2 * seed], training__seed=seed, model__model="some/other")
    assert "different models" in refusal(capsys, tmp_path)
    data = as_json(capsys, tmp_path, "--allow-different-models")
    assert set(data["values"]) == {"grpo+none,model=builtin:tiny", "grpo+none,model=other"}


def test_evaluations_on_other_problems_are_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "a", [0.1], {1: [0, 1]}, eval__every=1, eval__max_examples=2)
    write_run(tmp_path / "b", [0.1], {1: [1]}, eval__every=1, eval__max_examples=1, algorithm__advantage_mode="maxrl")
    assert "[eval] max_examples is 1 instead of 2" in refusal(capsys, tmp_path)
    assert as_json(capsys, tmp_path, "--metric", "correct_rate")


def test_the_same_problems_may_come_from_another_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, others in (("a", {}), ("b", {"data__source": "math"})):
        for seed in (1, 2, 3):
            folder = write_run(
                tmp_path / f"{name}{seed}", [0.1], {1: [0, 1]}, training__seed=seed, eval__every=1, **others
            )
            rows = [json.loads(line) for line in (folder / "eval.jsonl").read_text().splitlines()]
            told = [json.dumps(row | {"problems": "the same", "sampling": {}}) for row in rows]
            (folder / "eval.jsonl").write_text("\n".join(told))
    assert as_json(capsys, tmp_path)["metric"] == "eval_pass_at_1"
    write_run(tmp_path / "b3", [0.1], {1: [0, 1]}, training__seed=3, eval__every=1, **others)
    assert '[data] source is "math" instead of "arithmetic"' in refusal(capsys, tmp_path)


def test_conditions_that_are_scored_by_other_rewards_only_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in range(1, 7):
        write_run(tmp_path / f"a{seed}", [0.1], {1: answers(0.3, seed)}, training__seed=seed)
        own = {"training__seed": seed, "training__lr": 1e-3}
        write_run(tmp_path / f"b{seed}", [0.1], {1: answers(0.8, 10 + seed)}, **own)
        write_run(tmp_path / f"c{seed}", [0.1], {1: answers(0.9, 20 + seed)}, reward__correct_from=0.2, **own)
    data = as_json(capsys, tmp_path)
    assert [c["verdict"] for c in data["comparisons"]] == [
        "statistically_significant_improvement",
        "significant_difference",
    ]
    scored = [
        note for note in data["notes"] if "not measured alike: [reward] correct_from is 0.2 instead of 1.0" in note
    ]
    assert len(scored) == 1 and "neither is called better" in scored[0]
    assert run(["compare", str(tmp_path), "--higher-is-better"]) == 0
    assert (shown := capsys.readouterr().out).count("is better than") == 2
    assert "A difference may come from that." in shown and "neither is called better" not in shown
    assert not any("alike" in note for note in as_json(capsys, tmp_path, "--metric", "loss")["notes"])
    assert run(["card", str(tmp_path), "--no-plots", "--output", str(tmp_path / "card")]) == 0
    card = (tmp_path / "card" / "README.md").read_text()
    assert "is better than" in card and "is different from" in card and "not measured alike" in card


def test_correct_rates_on_different_training_problems_only_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    for seed in range(1, 7):
        for name, rate, digest in (("a_hard", 0.2, "1"), ("easy", 0.8, "2"), ("moved", 0.5, "1")):
            folder = tmp_path / f"{name}{seed}"
            own = {"training__seed": seed, "training__lr": 1e-3 if name == "moved" else 1e-4}
            own["training__max_examples"] = 5 if name == "moved" else 0  # of a file that has five
            write_run(
                folder, rng.normal(rate, 0.01, 3).tolist(), **own, data__source="jsonl", data__path=f"{name}.jsonl"
            )
            (folder / "trainer_state.json").write_text(json.dumps({"data": digest}))
    data = as_json(capsys, tmp_path)
    verdicts = {c["condition"]: c["verdict"] for c in data["comparisons"]}
    assert sorted(verdicts.values()) == ["significant_difference", "statistically_significant_improvement"]
    (note,) = [note for note in data["notes"] if "not measured alike" in note]
    assert '[data] path is "easy.jsonl" instead of "a_hard.jsonl"' in note and "neither is called better" in note


def test_seeds_without_a_partner_are_left_out_and_named(campaign: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (campaign / "runs" / "maxrl+none_s3" / "metrics.jsonl").unlink()
    data = as_json(capsys, campaign)
    assert data["comparisons"][0]["seeds"] == [1, 2, 4, 5, 6]
    assert any("do not share seed 3" in note for note in data["notes"])


def test_a_campaign_that_could_stop_early_is_judged_by_its_sequential_test(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The paired t-test of all 8 seeds has p = 0.033; with a look after each from the fifth on, that is not enough.
    more = (6, -2, 5, 1, 7, 2, 5, 0)
    right = [[1] * (50 + extra) + [0] * (50 - extra) for extra in (0, *more)]
    scores = {
        "grpo+none": dict.fromkeys(range(1, 9), right[0]),
        "maxrl+none": {seed: right[seed] for seed in range(1, 9)},
    }
    usual = as_json(capsys, write_campaign(tmp_path / "usual" / "c", scores))
    assert usual["comparisons"][0]["verdict"] == "statistically_significant_improvement"
    assert (usual["alpha"], usual["level"]) == (0.05, 0.05)
    campaign = write_campaign(tmp_path / "sequential" / "c", scores, stop_when="decided")
    # The campaign, the folder that contains it, and its runs.
    for folders in ([campaign], [campaign.parent], sorted((campaign / "runs").iterdir())):
        data = as_json(capsys, *folders)
        assert data["comparisons"][0]["verdict"] == "insufficient_evidence"
        assert data["level"] == pytest.approx(0.0225, abs=0.0005)
        (note,) = [note for note in data["notes"] if "sequential test" in note]
        assert "of up to 8 seeds" in note and f"the level {data['level']:.4g}," in note
    assert run(["compare", str(campaign)]) == 0
    text = capsys.readouterr().out
    assert "97.75% interval" in text and "p (adj.)" in text and "95%" not in text


def test_a_decision_of_the_sequential_test_stands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scores = {
        "grpo+none": {seed: [1] * 5 + [0] * 5 for seed in range(1, 7)},
        "maxrl+none": {seed: [1] * (5 + seed % 3) + [0] * (5 - seed % 3) for seed in range(1, 7)},
    }
    campaign = write_campaign(tmp_path / "c", scores, stop_when="decided")
    manifest = json.loads((campaign / "manifest.json").read_text())
    decision = {"decided": True, "better": True, "seeds": 5, "p_value": 0.01, "level": 0.03}
    made = {"alpha": 0.05, "baseline": "grpo+none", "metric": "eval_pass_at_1", "skipped": []}
    made["decisions"] = {"maxrl+none": decision}
    (campaign / "manifest.json").write_text(json.dumps(manifest | {"stop_when": made}))
    data = as_json(capsys, campaign)
    assert data["comparisons"][0]["verdict"] == "statistically_significant_improvement"
    assert "maxrl+none: decided after 5 seeds (p = 0.01), which later seeds do not undo." in data["notes"]
    # It was about another metric, or at a higher level than asked for.
    for other in (("--metric", "loss"), ("--alpha", "0.01")):
        assert as_json(capsys, campaign, *other)["comparisons"][0]["verdict"] == "insufficient_evidence"
    # It was about another baseline, or at the level of fewer conditions.
    for changed in (
        made | {"baseline": "maxrl+gtpo"},
        made | {"decisions": {"maxrl+none": decision | {"level": 0.04}}},
    ):
        (campaign / "manifest.json").write_text(json.dumps(manifest | {"stop_when": changed}))
        assert as_json(capsys, campaign)["comparisons"][0]["verdict"] == "insufficient_evidence"


def test_rates_that_are_all_zero_say_what_counts_as_correct(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scores = {name: {seed: [0] * 10 for seed in (1, 2)} for name in ("grpo+none", "maxrl+none")}
    assert run(["compare", str(write_campaign(tmp_path / "c", scores))]) == 0
    assert "no completion counted as correct, for which its reward must be at least" in capsys.readouterr().out


def test_a_difference_to_other_seeds_of_the_baseline_is_marked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def right(*counts: int, first: int = 1) -> dict[int, list[int]]:
        return {seed: [1] * count + [0] * (10 - count) for seed, count in enumerate(counts, first)}

    scores = {"grpo+none": right(2, 4, 6), "maxrl+none": right(2, 4), "maxrl+gtpo": right(4, 6, first=2)}
    campaign = write_campaign(tmp_path / "c", scores)
    assert run(["compare", str(campaign), "--markdown"]) == 0
    text = capsys.readouterr().out
    assert "| grpo+none | 3 | 0.4000 |" in text
    assert "| maxrl+none | 2 | 0.3000 | +0.0000* |" in text and "| maxrl+gtpo | 2 | 0.5000 | +0.0000* |" in text
    assert "* grpo+none has a mean of 0.3000 with these 2 seeds." in text
    assert "* grpo+none has a mean of 0.5000 with these 2 seeds." in text
    both = [str(path) for path in (campaign / "runs").iterdir() if "gtpo" not in path.name]
    assert run(["compare", *both, "--baseline", "grpo+none", "--markdown"]) == 0
    text = capsys.readouterr().out
    assert "| grpo+none | 2 | 0.3000 |" in text and "+0.0000 |" in text and "*" not in text


def test_attempts_that_were_repeated_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in (1, 2):
        for name, lr in (("a", 1e-3), ("b", 2e-3)):
            write_run(tmp_path / f"{name}{seed}", [0.1, 0.2], training__seed=seed, training__lr=lr)
    before = as_json(capsys, tmp_path)

    def attempted(name: str, rates: list[float], status: str, held_out: dict[int, list[int]]) -> Path:
        own = {"training__seed": 1, "training__lr": 1e-3, "logging__log_dir": str(tmp_path / "a1")}
        return write_run(tmp_path / name, rates, held_out, status, **own)

    for name, rates, status, at in (
        ("a1.1", [], "failed", {0: [0, 1]}),
        ("a1.1", [], "running", {}),
        ("a1.1", [0.9, 0.9], "finished", {}),
        ("of a1", [], "failed", {}),
    ):
        attempt = attempted(name, rates, status, at)
        assert as_json(capsys, tmp_path) == before | {
            "notes": [f"Left out as another attempt at a1: {name}.", *before["notes"]]
        }
        assert run(["report", str(tmp_path)]) == 0
        assert "4 runs, 2 conditions" in (tmp_path / "report.html").read_text(encoding="utf-8")
        with lock_folder(attempt):
            assert run(["report", str(tmp_path)]) == 0
            page = (tmp_path / "report.html").read_text(encoding="utf-8")
            assert "5 runs, 4 conditions" in page, "a run that is active is shown"
        shutil.rmtree(attempt)
    # A run whose own name ends in a number is none of them.
    other = write_run(tmp_path / "a1.1", [0.9, 0.9], training__seed=1, training__lr=1e-3)
    assert "count as the same run" in refusal(capsys, tmp_path)
    shutil.rmtree(other)
    attempted("a1.1", [0.9], "finished", {})
    assert as_json(capsys, *sorted(tmp_path.glob("[ab]*")))["notes"][0] == "Left out as another attempt at a1: a1.1."
    assert "count as the same run" in refusal(capsys, tmp_path / "a1", tmp_path / "a1.1")
    assert run(["report", str(tmp_path / "a1"), str(tmp_path / "a1.1")]) == 0
    assert "2 runs, 2 conditions" in (tmp_path / "a1" / "report.html").read_text(encoding="utf-8")


def test_runs_of_a_campaign_that_has_got_more_steps_are_not_finished(
    campaign: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not [note for note in as_json(capsys, campaign)["notes"] if "Not finished" in note]
    manifest = json.loads((campaign / "manifest.json").read_text())
    for entry in manifest["runs"]:
        entry["max_steps"] = 6 if entry["seed"] == 2 else 4
    (campaign / "manifest.json").write_text(json.dumps(manifest))
    notes = as_json(capsys, campaign)["notes"]
    assert "Not finished: grpo+none_s2, maxrl+none_s2, maxrl+gtpo_s2." in notes


def test_what_cannot_be_compared_is_rejected(
    campaign: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    assert "neither a run nor a campaign" in refusal(capsys, tmp_path / "empty")
    assert "there is no folder" in refusal(capsys, tmp_path / "nowhere")
    one = campaign / "runs" / "grpo+none_s1"
    assert "named twice" in refusal(capsys, one, one)
    assert "only one condition" in refusal(capsys, one)
    copy = write_run(tmp_path / "copy", [0.1], training__seed=1, training__lr=4e-5)
    text = refusal(capsys, one, copy)
    assert "count as the same run" in text and f"retrain diff {one} {copy}" in text
    message = refusal(capsys, campaign, "--metric", "correct_rat")
    assert "no step in common with a correct_rat" in message and "correct_rate, loss" in message
    assert "Did you mean correct_rate?" in message
    assert "no condition 'x'" in refusal(capsys, campaign, "--baseline", "x")
    (campaign / "manifest.json").write_text('{"runs": [{"name": "x"}]}')
    assert "is not a valid manifest" in refusal(capsys, campaign)


def test_what_differs_between_two_runs_that_count_as_one_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = (write_run(tmp_path / str(steps), [0.1], training__max_steps=steps) for steps in (8, 5))
    text = " ".join(refusal(capsys, one, other).split())
    assert ". What differs is not part of a condition: training.max_steps (8 and 5). Try:" in text
    # The steps of a warm-up that is a fraction depend on it.
    for steps, folder in ((8, one), (5, other)):
        write_run(folder, [0.1], training__max_steps=steps, optimizer__warmup_steps=0.1)
    assert set(as_json(capsys, tmp_path)["values"]) == {"grpo+none,max_steps=8", "grpo+none,max_steps=5"}


def test_runs_without_an_evaluation_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "a", [0.1], {1: [0, 1]})
    write_run(tmp_path / "b", [0.1], algorithm__advantage_mode="maxrl")
    assert "has no evaluation yet" in refusal(capsys, tmp_path, "--metric", "eval_pass_at_1")
    assert as_json(capsys, tmp_path)["metric"] == "correct_rate"


def test_a_run_without_evaluations_explains_the_metric(campaign: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (campaign / "runs" / "maxrl+none_s3" / "eval.jsonl").write_text("")
    data = as_json(capsys, campaign)
    assert data["metric"] == "correct_rate"
    assert any(note.startswith("Compared by correct_rate: no evaluation of maxrl+none_s3.") for note in data["notes"])


def test_inputs_that_changed_between_runs_with_the_same_seed_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def write(name: str, seed: int, right: list[int], **inputs: Any) -> None:
        own = {"training__seed": seed, "training__lr": 1e-3 if name == "b" else 1e-4}
        folder = write_run(tmp_path / f"{name}{seed}", [0.1], {1: right}, **own)
        (folder / "trainer_state.json").write_text(json.dumps({"status": "finished", "step": 1, **inputs}))

    for seed in range(1, 7):
        # Later seeds have another reward in both conditions, and are compared with each other.
        write("a", seed, answers(0.3, seed), code={"mine": str(seed > 3)}, data="1")
        write("b", seed, answers(0.8, 10 + seed), code={"mine": str(seed > 3)}, data="1")
    data = as_json(capsys, tmp_path)
    assert data["comparisons"][0]["verdict"] == "statistically_significant_improvement"
    assert any(note.startswith("The code of mine changed between seeds: a4") for note in data["notes"])
    for inputs, told in (
        ({"code": {"mine": "edited"}}, "the code of mine changed"),
        ({"data": "2"}, "the training data changed"),
        ({"code": {"mine": "edited"}, "data": "2"}, "the code of mine and the training data changed"),
        ({"forced": ["[training] lr: 1 -> 2 at step 3"]}, "the options of a forced resume changed"),
        ({"models": {"m": {"config.json": "2"}}}, ""),
    ):
        write("b", 6, answers(0.8, 16), **inputs)
        data = as_json(capsys, tmp_path)
        assert data["comparisons"][0]["verdict"] == (
            "significant_difference" if told else "statistically_significant_improvement"
        )
        assert not told or any(f"not measured alike: {told} between their runs" in note for note in data["notes"])
