"""`retrain plan`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from retrain.cli import run

SHAPE = {
    "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _in_a_folder_with_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    # Whatever GPU is here, these tests know of none.
    monkeypatch.setenv("PATH", str(tmp_path))
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps(SHAPE), encoding="utf-8")
    write('[model]\nmodel = "./model"\n[training]\nmax_steps = 100\nmax_tokens = 512\n')


def write(text: str, name: str = "retrain.toml") -> None:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(text, encoding="utf-8")


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    capsys.readouterr()
    assert run(["plan", *arguments, "--json"]) == 0
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    return data


def test_memory_is_shown_by_part_and_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    memory = plan(capsys)["memory"]
    assert memory.pop("fits") is None, "no GPU is known"
    total, sampling, training = (memory.pop(key) for key in ("total", "sampling_peak", "training_peak"))
    assert total == training == sum(memory.values())
    assert memory["weights"] + memory["kv_cache"] < sampling < training
    assert memory["weights"] == pytest.approx(2 * 1.236e9, rel=1e-3)


def test_a_card_shows_what_fits_and_how_long_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    data = plan(capsys, "--gpu", "H100")
    assert data["gpu"]["memory"] == 80
    assert data["memory"]["fits"] is True
    assert data["largest_batch_size"] > 8
    assert data["step"]["seconds"] == pytest.approx(
        2 * (data["step"]["roofline_sample_seconds"] + data["step"]["roofline_train_seconds"])
    )
    assert data["run"]["seconds"] == pytest.approx(100 * data["step"]["seconds"])
    small = plan(capsys, "--gpu", "H100", "--memory", "3")
    assert small["memory"]["fits"] is False
    assert small["largest_batch_size"] == 0
    assert small["training"]["recomputed_layers"] == 16


W1 = """
[model]
model = "./qwen"
[training]
max_tokens = 512
"""


@pytest.mark.parametrize(("gigabytes", "at_once", "layers"), [("24", 111, 12), ("16", 48, 29)])
def test_a_4b_model_fits_small_gpus_and_the_text_says_how(
    capsys: pytest.CaptureFixture[str], gigabytes: str, at_once: int, layers: int
) -> None:
    qwen = SHAPE | {"model_type": "qwen3", "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36}
    write(json.dumps(qwen | {"head_dim": 128, "vocab_size": 151_936}), "qwen/config.json")
    write(W1)
    data = plan(capsys, "--memory", gigabytes, "--prompt-tokens", "67")
    memory = data["memory"]
    assert memory["fits"] is True
    assert memory["total"] == max(memory["sampling_peak"], memory["training_peak"]) < int(gigabytes) * 0.94e9
    assert data["sampling"] == {"merging": "in-place", "completions_at_once": at_once, "frees_cache": True}
    assert data["training"]["recomputed_layers"] == layers
    assert run(["plan", "--memory", gigabytes, "--prompt-tokens", "67"]) == 0
    text = capsys.readouterr().out
    assert "fits" in text and "DOES NOT" not in text
    assert "adapter: merged in place" in text and "the KV cache is freed before training" in text
    assert f"sampled at once, at full length: {at_once} of 128 completions; the others take turns" in text
    # Only the memory is known, so the time is that of GPUs with as much.
    assert ("on RTX 4090" if gigabytes == "24" else "on T4") in text
    assert data["step"]["seconds"] is None


def test_more_memory_makes_a_step_faster(capsys: pytest.CaptureFixture[str]) -> None:
    large, small = (plan(capsys, "--gpu", "H100", "--memory", size) for size in ("80", "6"))
    assert small["memory"]["fits"] is True
    assert small["step"]["seconds"] > large["step"]["seconds"]


def test_numbers_of_an_unknown_card_can_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    data = plan(capsys, "--tflops", "100", "--bandwidth", "1000")
    assert data["step"]["seconds"] > 0
    assert data["memory"]["fits"] is None
    assert run(["plan", "--gpu", "Voodoo"]) == 2
    assert "H200" in capsys.readouterr().err
    assert run(["plan", "--gpu", "L40"]) == 2
    error = capsys.readouterr().err
    assert "--gpu 'L40' is not in the table (" in error and "Try: --memory, --tflops, --bandwidth" in error


def test_a_part_of_a_cards_name_suggests_the_card(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--gpu", "4090"]) == 2
    assert 'Try: --gpu "RTX 4090"\n' in capsys.readouterr().err
    assert run(["plan", "--gpu", "NVIDIA RTX A1000"]) == 2
    assert "Try: --memory" in capsys.readouterr().err, "it has a word in common, and is another card"
    assert run(["plan", "--memory", "-1"]) == 2


def test_measured_steps_count_more_than_the_roofline(capsys: pytest.CaptureFixture[str]) -> None:
    steps = [{"batch_size": 8, "group_size": 16, "step_time_s": seconds} for seconds in (9.0, 3.0, 4.0)]
    write("".join(json.dumps(step) + "\n" for step in steps), "logs/train/metrics.jsonl")
    write(Path("retrain.toml").read_text(), "logs/train/config.toml")
    assert plan(capsys, "--gpu", "H100")["step"]["seconds_from"].startswith("the roofline of H100")
    data = plan(capsys)
    assert data["step"]["seconds"] == 4.0
    assert "3 steps" in data["step"]["seconds_from"]
    assert data["run"]["seconds"] == 400.0


def test_a_campaign_takes_its_steps_over_its_workers(capsys: pytest.CaptureFixture[str]) -> None:
    step = json.dumps({"batch_size": 8, "group_size": 16, "step_time_s": 2.0}) + "\n"
    write(step, "logs/campaign_1/runs/a_s1/metrics.jsonl")
    write(
        '[model]\nmodel = "./model"\n[campaign]\nseeds = [1, 2, 3]\nmax_steps = 10\nparallel = true\nmax_workers = 4\n'
        '[[campaign.conditions]]\nadvantage_mode = "grpo"\n[[campaign.conditions]]\nadvantage_mode = "maxrl"\n'
    )
    write('[model]\nmodel = "./model"\n', "logs/campaign_1/runs/a_s1/config.toml")
    campaign = plan(capsys)["campaign"]
    assert (campaign["runs"], campaign["workers"], campaign["total_steps"]) == (6, 4, 2 * 3 * 10)
    assert campaign["seconds"] == 60 * 2.0 / 4
    many = plan(capsys, "--max-workers", "50")["campaign"]
    assert (many["workers"], many["seconds"]) == (6, 20.0)
    assert run(["plan"]) == 0
    assert "2 conditions × 3 seeds × 10 steps = 60 steps, 4 runs at a time" in capsys.readouterr().out
    in_turn = ("--no-parallel", "--share-model")
    shared = plan(capsys, *in_turn)["campaign"]
    assert (shared["workers"], shared["seconds"]) == (4, 60 * 2.0)
    assert run(["plan", *in_turn]) == 0
    assert "60 steps, 4 runs at a time, stepping in turn" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"num_experts": 8}, "only dense decoders with attention in every layer are planned"),
        ({"layer_types": ["conv", "full_attention"]}, "not mixtures of experts or hybrids"),
        ({"vocab_size": None}, "config.json does not state the sizes of a decoder"),
        (None, "./bare has no config.json"),
    ],
)
def test_why_a_model_is_not_planned(
    capsys: pytest.CaptureFixture[str], settings: dict[str, object] | None, reason: str
) -> None:
    Path("bare").mkdir()
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 100}
    if settings is not None:
        Path("bare/config.json").write_text(json.dumps(sizes | settings))
    write('[model]\nmodel = "./bare"\n')
    for command in (["plan", "--gpu", "H100"], ["explain"]):
        run(command)
        printed = " ".join(capsys.readouterr().out.split())
        assert f"unknown: {reason}" in printed or reason in printed
        assert "hf download" not in printed


def test_without_the_models_files_nothing_is_made_up(capsys: pytest.CaptureFixture[str]) -> None:
    write('[model]\nmodel = "somebody/mystery"\n')
    data = plan(capsys, "--gpu", "H100")
    assert (data["memory"], data["training"], data["largest_batch_size"]) == (None, None, None)
    assert data["step"]["seconds"] is None
    assert run(["plan"]) == 0
    assert "unknown: the model's config.json is not on this machine" in capsys.readouterr().out


def test_a_config_fetched_ahead_of_the_weights_is_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(json.dumps(SHAPE), str(tmp_path / "hub/models--somebody--mystery/snapshots/abc/config.json"))
    write('[model]\nmodel = "somebody/mystery"\n')
    assert plan(capsys)["memory"]["total"] > 0


def test_a_remote_backend_needs_no_memory_here(capsys: pytest.CaptureFixture[str]) -> None:
    write('[model]\nmodel = "./model"\n[backend]\nbackend = "tinker"\n')
    assert plan(capsys, "--gpu", "H100")["memory"] is None


TINKER = '[model]\nmodel = "./model"\n[backend]\nbackend = "tinker"\n[training]\nmax_steps = 10\nbatch_size = 2\n'
TINKER += "group_size = 4\nmax_tokens = 100\n"
PRICES = ("--prefill-price", "1", "--sample-price", "10", "--train-price", "100")


def test_a_step_on_a_service_costs_its_tokens_at_the_prices_that_are_given(capsys: pytest.CaptureFixture[str]) -> None:
    write(TINKER)
    cost = plan(capsys, "--prompt-tokens", "50", *PRICES)["cost"]
    # 2 prompts of 50; 8 completions of 100; 8 rows of 150.
    assert [cost[f"{kind}_tokens"] for kind in ("prefill", "sample", "train")] == [100, 800, 1200]
    assert cost["tokens_from"] == "every completion at max_tokens; prompts of 50 tokens are assumed"
    assert cost["price"] == pytest.approx((100 * 1 + 800 * 10 + 1200 * 100) / 1e6)
    assert cost["run_price"] == pytest.approx(10 * cost["price"])
    assert cost["campaign_price"] is None
    # Three evaluations (before step 0, before step 5, after step 9) of 4 problems, 3 completions each.
    write(TINKER + "[eval]\nevery = 5\nmax_examples = 4\nsamples = 3\n")
    evaluated = plan(capsys, "--prompt-tokens", "50", *PRICES)["cost"]
    assert evaluated["run_price"] - cost["run_price"] == pytest.approx(3 * (4 * 50 * 1 + 12 * 100 * 10) / 1e6)


def test_logged_steps_say_how_many_tokens_there_really_are(capsys: pytest.CaptureFixture[str]) -> None:
    write(TINKER)
    row = {
        "batch_size": 2,
        "group_size": 4,
        "step_time_s": 3.0,
        "tokens_per_s": 80.0,
        "sample_time_s": 2.0,
        "num_datums": 4,
    }
    write(json.dumps(row) + "\n", "logs/train/metrics.jsonl")
    write(TINKER, "logs/train/config.toml")
    data = plan(capsys, "--prompt-tokens", "50", *PRICES)
    # 160 tokens in 8 completions; 4 rows of 50 + 20.
    assert [data["cost"][f"{kind}_tokens"] for kind in ("prefill", "sample", "train")] == [100, 160, 280]
    assert data["step"]["seconds"] == 3.0
    assert run(["plan", "--prompt-tokens", "50", *PRICES]) == 0
    text = capsys.readouterr().out
    assert "100 prompt, 160 sampled, 280 trained; the mean of 1 step in" in text
    assert "0.0297" in text, "a step"


def test_logged_steps_say_how_long_prompts_are_unless_it_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    write(TINKER + "[eval]\nevery = 5\nmax_examples = 4\nsamples = 3\n")
    write((Path("retrain.toml")).read_text(), "logs/train/config.toml")
    row = {"batch_size": 2, "group_size": 4, "step_time_s": 3.0, "tokens_per_s": 80.0, "sample_time_s": 2.0}
    logged = [row | {"num_datums": 4, "prompt_tokens_mean": length} for length in (9.0, 12.0, 12.0)]
    write("".join(json.dumps(each) + "\n" for each in logged), "logs/train/metrics.jsonl")
    cost = plan(capsys, *PRICES)["cost"]
    # 2 prompts of 11; 160 tokens in 8 completions; 4 rows of 11 + 20.
    assert [cost[f"{kind}_tokens"] for kind in ("prefill", "sample", "train")] == [22, 160, 124]
    assert cost["tokens_from"].startswith("the mean of 3 steps in ") and "assumed" not in cost["tokens_from"]
    # Three evaluations of 4 prompts of 11, and 12 completions of 20.
    assert cost["run_price"] == pytest.approx(10 * cost["price"] + 3 * (44 * 1 + 240 * 10) / 1e6)
    given = plan(capsys, "--prompt-tokens", "50", *PRICES)["cost"]
    assert given["prefill_tokens"] == 100 and "prompts of 50 tokens are assumed" in given["tokens_from"]


def test_groups_that_were_sampled_again_are_paid_for(capsys: pytest.CaptureFixture[str]) -> None:
    write(TINKER + "resample_dead_groups = 3\n[eval]\nevery = 5\nmax_examples = 4\n")
    write(Path("retrain.toml").read_text(), "logs/train/config.toml")
    row = {"batch_size": 2, "group_size": 4, "step_time_s": 3.0, "tokens_per_s": 80.0, "sample_time_s": 2.0}
    logged = [row | {"num_datums": 4, "prompt_tokens_mean": 10.0, "groups_sampled": groups} for groups in (3, 5)]
    write("".join(json.dumps(each) + "\n" for each in logged), "logs/train/metrics.jsonl")
    cost = plan(capsys, *PRICES)["cost"]
    # 4 prompts of 10; 160 tokens in 16 completions; 4 rows of 10 + 10.
    assert [cost[f"{kind}_tokens"] for kind in ("prefill", "sample", "train")] == [40, 160, 80]
    # Three evaluations of 4 prompts of 10, and 4 completions of 10.
    assert cost["run_price"] == pytest.approx(10 * cost["price"] + 3 * (40 * 1 + 40 * 10) / 1e6)


def test_older_logs_have_as_many_groups_as_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    write(TINKER)
    write(Path("retrain.toml").read_text(), "logs/train/config.toml")
    row = {"batch_size": 2, "group_size": 4, "step_time_s": 3.0, "tokens_per_s": 80.0, "sample_time_s": 2.0}
    logged = [row | {"num_datums": 4, "prompt_tokens_mean": 10.0} | own for own in ({"groups_sampled": 6}, {})]
    write("".join(json.dumps(each) + "\n" for each in logged), "logs/train/metrics.jsonl")
    # The mean of 6 and 2 groups, each with a prompt of 10.
    assert plan(capsys, *PRICES)["cost"]["prefill_tokens"] == 40


ENVIRONMENT = '[environment]\nprovider = "builtin"\nid = "guess-number"\n'


@pytest.mark.parametrize(
    ("tables", "problems", "included"),
    [
        ('[eval]\nevery = 10\nsource = "jsonl"\npath = "held_out.jsonl"\n', 3, "2 evaluations of 3 problems"),
        ('[data]\nsource = "arithmetic"\n[eval]\nevery = 10\n', 128, "2 evaluations of 128 problems"),
        ('[data]\nsource = "gsm8k"\n[eval]\nevery = 10\n', 128, "2 evaluations of at most 128 problems"),
        (ENVIRONMENT + "[eval]\nevery = 10\n", 128, "2 evaluations of at most 128 problems"),
        ("[eval]\nevery = 0\n", 0, ""),
    ],
)
def test_evaluations_are_paid_for_the_problems_that_there_are(
    tables: str, problems: int, included: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write('{"prompt": "2 + 2?", "answer": "4"}\n' * 3, "held_out.jsonl")
    write(TINKER + tables)
    cost = plan(capsys, "--prompt-tokens", "50", *PRICES)["cost"]
    assert cost["run_price_includes"] == included
    evaluations = 2 * problems * (50 * 1 + 100 * 10) / 1e6
    assert cost["run_price"] == pytest.approx(10 * cost["price"] + evaluations)


def test_an_earlier_run_shows_how_many_problems_an_environment_has(capsys: pytest.CaptureFixture[str]) -> None:
    write(TINKER + ENVIRONMENT + "[eval]\nevery = 10\n")
    write(Path("retrain.toml").read_text(), "logs/train/config.toml")
    write(json.dumps({"step": 0, "correct": [0] * 9, "counted": [1] * 9}) + "\n", "logs/train/eval.jsonl")
    assert plan(capsys, *PRICES)["cost"]["run_price_includes"] == "2 evaluations of 9 problems"
    other = plan(capsys, *PRICES, "--eval-max-examples", "50")["cost"]
    assert other["run_price_includes"] == "2 evaluations of at most 50 problems"


def test_turns_of_an_environment_are_not_hidden_in_the_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    write(TINKER + ENVIRONMENT)
    data = plan(capsys, *PRICES)
    assert (data["step"]["turns"], data["step"]["tokens"]) == (None, 800)
    assert data["cost"]["tokens_from"].startswith("every completion at max_tokens, in a single turn;")
    assert data["notes"] == [
        "the environment may take several turns; memory and prompt tokens are those of the first turn"
    ]
    assert run(["plan", *PRICES]) == 0
    text = capsys.readouterr().out
    assert f"note: {data['notes'][0]}" in text and "at most 800 tokens sampled per turn" in text
    bounded = plan(capsys, *PRICES, "--environment.max_turns", "3")
    assert (bounded["step"]["turns"], bounded["step"]["tokens"], bounded["cost"]["sample_tokens"]) == (3, 2400, 2400)
    assert bounded["cost"]["tokens_from"].startswith("every completion at max_tokens in 3 turns;")


def test_back_pressure_is_not_hidden_in_the_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    write('{"prompt": "2 + 2?", "answer": "4"}\n' * 7, "train.jsonl")
    write(
        '[model]\nmodel = "./model"\n[data]\nsource = "jsonl"\npath = "train.jsonl"\n[backpressure]\nenabled = true\n'
    )
    data = plan(capsys, "--batch-size", "2", "--epochs", "4")
    assert data["run"]["steps"] == 14
    assert data["notes"] == [
        "[backpressure] changes the batch size, from 1 to 64 prompts; memory, tokens and time are those of "
        "batch_size = 2; epochs take more or fewer steps accordingly"
    ]


def test_without_prices_a_service_has_tokens_and_no_price_and_a_local_run_neither(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert plan(capsys)["cost"] is None
    write(TINKER)
    data = plan(capsys)
    assert (data["cost"]["price"], data["cost"]["run_price"]) == (None, None)
    assert data["step"]["seconds"] is None
    assert run(["plan"]) == 0
    text = capsys.readouterr().out
    assert "on tinker" in text and "managed by tinker" in text
    assert "the hardware of tinker is unknown" in text
    assert "--prefill-price, --sample-price and --train-price were not given" in text
    assert run(["plan", "--sample-price", "1"]) == 2
    assert "missing: --prefill-price, --train-price" in capsys.readouterr().err


def test_a_campaign_on_a_service_costs_all_its_runs(capsys: pytest.CaptureFixture[str]) -> None:
    write(
        TINKER.replace("max_steps = 10\n", "") + "[campaign]\nseeds = [1, 2, 3]\nmax_steps = 10\n"
        '[[campaign.conditions]]\nadvantage_mode = "grpo"\n[[campaign.conditions]]\nadvantage_mode = "maxrl"\n'
    )
    cost = plan(capsys, *PRICES)["cost"]
    assert cost["campaign_price"] == pytest.approx(6 * cost["run_price"])


def test_conditions_of_other_sizes_are_planned_each_for_itself(capsys: pytest.CaptureFixture[str]) -> None:
    base = TINKER.replace("max_steps = 10\n", "").replace("group_size = 4\n", "")
    sizes = {"small": 4, "large": 64}
    alone = {}
    for name, size in sizes.items():
        write(f"{base}max_steps = 10\ngroup_size = {size}\n")
        alone[name] = plan(capsys, *PRICES)["cost"]["run_price"]
    write(
        f"{base}[campaign]\nseeds = [1, 2, 3]\nmax_steps = 10\n"
        + "".join(f"[[campaign.conditions]]\ngroup_size = {size}\n" for size in sizes.values())
        + "[[campaign.conditions]]\ngroup_size = 64\nmax_steps = 20\n"
    )
    data = plan(capsys, *PRICES)
    assert data["cost"]["campaign_price"] == pytest.approx(3 * (alone["small"] + 3 * alone["large"]))
    assert data["campaign"]["total_steps"] == 3 * (10 + 10 + 20)
    assert data["step"]["completions"] == 2 * 64
    (note,) = data["notes"]
    assert "conditions differ in size" in note and "group_size=64" in note
    assert run(["plan"]) == 0
    assert "3 conditions × 3 seeds = 120 steps" in capsys.readouterr().out


def test_the_memory_of_a_campaign_is_that_of_its_largest_condition(capsys: pytest.CaptureFixture[str]) -> None:
    base = '[model]\nmodel = "./model"\n[training]\nmax_tokens = 512\ngroup_size = 2\n'
    write(f"{base.replace('= 2', '= 64')}")
    large = plan(capsys, "--memory", "80")["memory"]["total"]
    write(f"{base}[campaign]\n[[campaign.conditions]]\ngroup_size = 2\n[[campaign.conditions]]\ngroup_size = 64\n")
    assert plan(capsys, "--memory", "80")["memory"]["total"] == large


def test_a_squeeze_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    write('[squeeze]\nadapter_path = "nowhere"\n')
    assert run(["plan"]) == 2
    assert "no training" in capsys.readouterr().err


def test_the_text_names_every_part(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--gpu", "H100"]) == 0
    text = capsys.readouterr().out
    for words in ("weights", "KV cache", "activations", "logits", "adapter", "fits", "largest batch_size", "per run"):
        assert words in text


def test_a_step_with_another_limit_is_no_measurement_and_the_text_says_which_options_count(
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_measured('[training]\nbatch_size = 3\ngroup_size = 4\nmax_tokens = 128\n[backend]\ndevices = "cpu"\n')
    assert plan(capsys)["step"]["seconds"] == 2.0
    assert run(["plan", "--max-tokens", "64"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "no step with this model, device and size (batch_size, group_size, max_tokens) has been measured" in text


def test_on_a_cpu_no_gpu_is_suggested(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--devices", "cpu"]) == 0
    text = capsys.readouterr().out
    assert "./model on the CPU" in text and "Try: run it for 5 steps (--max-steps 5)" in text
    assert "GPU" not in text and "--gpu" not in text


@pytest.mark.parametrize("devices", ["auto", "cpu"])
@pytest.mark.parametrize("gpu", [("--gpu", "H100"), ("--memory", "24"), ("--tflops", "100", "--bandwidth", "1000")])
def test_a_gpu_that_is_named_is_planned_for_where_there_is_none(
    devices: str, gpu: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    write('[model]\nmodel = "./model"\n[training]\nmax_tokens = 512\n')
    expected = plan(capsys, *gpu)
    assert plan(capsys, "--devices", devices, *gpu) == expected
    assert expected["devices"] == "gpu:0"
    assert expected["step"]["seconds"] or expected["step"]["seconds_by_gpu"]


def test_a_gpu_that_is_named_needs_the_shape_of_the_model_and_no_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    write('[model]\nmodel = "somebody/mystery"\n[backend]\ndevices = "auto"\n')
    assert run(["plan", "--gpu", "H100"]) == 0
    text = capsys.readouterr().out
    assert "on H100, 80 GB" in text and "the model's shape is unknown" in text
    assert "CPU" not in text


def test_a_step_that_takes_milliseconds_does_not_take_no_time(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    write(
        '[model]\nmodel = "builtin:tiny"\n[training]\nmax_steps = 12\nmax_tokens = 64\nbatch_size = 4\ngroup_size = 8\n'
    )
    assert run(["plan", "--gpu", "H100"]) == 0
    text = capsys.readouterr().out
    assert "seconds per step  < 0.01, from the roofline of H100" in text
    assert "12 steps, < 1 s" in text
    assert run(["plan", "--memory", "80"]) == 0
    assert "< 0.01 on H100" in capsys.readouterr().out


def test_the_keys_of_the_json_are_those_of_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    data = plan(capsys, "--gpu", "H100")
    assert run(["plan", "--help"]) == 0
    text = capsys.readouterr().out
    for key, value in data.items():
        assert key in text
        for inner in value if isinstance(value, dict) else {}:
            assert inner in text


def test_it_loads_no_torch() -> None:
    code = "import sys\nfrom retrain.cli import run\nrun(['plan'])\nassert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_a_folder_that_does_not_exist_is_not_to_be_downloaded(capsys: pytest.CaptureFixture[str]) -> None:
    write('[model]\nmodel = "./models/nothere"\n')
    assert run(["plan"]) == 0
    printed = capsys.readouterr().out
    assert "there is no folder ./models/nothere" in printed
    assert "hf download" not in printed


EPOCHS = """
[model]
model = "./model"
[training]
epochs = 2.5
batch_size = 3
group_size = 4
[data]
source = "jsonl"
path = "rows.jsonl"
"""
MEASURED = {"batch_size": 3, "group_size": 4, "step_time_s": 2.0}


def write_measured(config: str) -> None:
    write(config)
    write(config, "logs/train/config.toml")
    write(json.dumps(MEASURED) + "\n", "logs/train/metrics.jsonl")


def test_steps_of_epochs_are_counted_as_the_run_does(capsys: pytest.CaptureFixture[str]) -> None:
    write('{"question": "1+1", "answer": "2"}\n' * 7, "rows.jsonl")
    write_measured(EPOCHS)
    data = plan(capsys, "--prompt-tokens", "50", *PRICES)
    # ceil(2.5 * 7 / 3)
    assert (data["run"]["steps"], data["run"]["seconds"]) == (6, 12.0)
    assert data["cost"]["run_price"] == pytest.approx(6 * data["cost"]["price"])
    # ceil(1 * 4 / 3)
    assert plan(capsys, "--epochs", "1", "--max-examples", "4")["run"]["steps"] == 2
    # ceil(1 * 10 / 3)
    assert plan(capsys, "--epochs", "1", "--max-examples", "10", "--data-source", "arithmetic")["run"]["steps"] == 4
    assert run(["plan"]) == 0
    assert "6 steps, 12 s without start-up" in capsys.readouterr().out


@pytest.mark.parametrize(
    "source",
    ['source = "gsm8k"', 'source = "jsonl"\npath = "missing.jsonl"', 'source = "mine.Source"', 'source = "arithmetic"'],
)
def test_without_the_number_of_examples_there_is_no_total(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_measured(EPOCHS.partition("[data]")[0] + f"[data]\n{source}\n")
    data = plan(capsys, *PRICES)
    assert data["step"]["seconds"] == 2.0
    assert data["run"] == {"steps": None, "evaluations": None, "evaluation_seconds": None, "seconds": None}
    assert (data["cost"]["run_price"], data["cost"]["campaign_price"]) == (None, None)
    assert run(["plan", *PRICES]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "unknown: epochs count passes" in text
    assert "per run" not in text.replace("steps per run", "")


EVALUATED = """
[model]
model = "./model"
[training]
max_steps = 10
batch_size = 3
group_size = 4
[eval]
every = 4
samples = 4
"""


def test_measured_evaluations_are_part_of_a_runs_time(capsys: pytest.CaptureFixture[str]) -> None:
    steps = [MEASURED, MEASURED | {"step_time_s": 9.0, "eval_time_s": 7.0}]
    write(EVALUATED)
    write(EVALUATED, "logs/train/config.toml")
    write("".join(json.dumps(step) + "\n" for step in steps), "logs/train/metrics.jsonl")
    data = plan(capsys)
    assert data["step"]["seconds"] == 2.0, "without the evaluation"
    # Before steps 0, 4 and 8, and at the end.
    assert data["run"] == {"steps": 10, "evaluations": 4, "evaluation_seconds": 7.0, "seconds": 10 * 2.0 + 4 * 7.0}
    assert run(["plan"]) == 0
    text = capsys.readouterr().out
    assert "7 s, 4 per run" in text and "10 steps, 48 s without start-up" in text
    # Evaluations of another size take another time.
    assert run(["plan", "--eval-samples", "16"]) == 0
    assert "10 steps, 20 s without start-up and evaluations" in capsys.readouterr().out
    assert plan(capsys, "--eval-every", "0")["run"]["seconds"] == 20.0


def test_runs_that_are_in_memory_at_once_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    def planned(options: str) -> dict[str, Any]:
        sizes = "[training]\nmax_tokens = 512\n[campaign]\nseeds = [1, 2, 3, 4, 5, 6, 7, 8]\nmax_steps = 10\n"
        write(f'[model]\nmodel = "./model"\nlora_rank = 256\n{sizes}{options}')
        return plan(capsys, "--gpu", "RTX 4090")

    alone, shared, some = map(planned, ("", "share_model = true\n", "share_model = true\nmax_workers = 4\n"))
    adapter = alone["memory"]["adapter"]
    # Five conditions with eight seeds; only the run that steps has gradients.
    assert 25 * adapter < shared["memory"]["adapter"] < 40 * adapter
    assert adapter < some["memory"]["adapter"] < 4 * adapter
    assert alone["memory"]["fits"] and not shared["memory"]["fits"]
    assert any("40 runs share the model" in note for note in shared["notes"])
    parallel = planned("parallel = true\nmax_workers = 4\n")
    assert parallel["memory"]["adapter"] == adapter and not parallel["memory"]["fits"]
    assert any("4 runs at a time use gpu:0, and each needs this memory" in note for note in parallel["notes"])
    assert not any("at a time" in note for note in alone["notes"])
