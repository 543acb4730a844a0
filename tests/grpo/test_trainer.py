"""retrain.grpo.GRPOTrainer against trl.GRPOTrainer: the same numbers, and a line where TRL's own code runs."""

from __future__ import annotations

import contextlib
import gc
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from peft import LoraConfig, PromptTuningConfig
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GenerationMixin,
    PretrainedConfig,
    Qwen3ForCausalLM,
    TrainerCallback,
)

from retrain.builtin import resolve_model
from retrain.errors import SamplingMemoryError
from retrain.grpo import GRPOConfig, GRPOTrainer
from retrain.grpo.engine import TrainerEngine, UnsupportedModelError, read_sampling
from retrain.grpo.packed import AttentionSwitch
from tests.cases import slow

MODEL = resolve_model("builtin:tiny")
LORA = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
FILTERS = {"top_p": 0.5, "min_p": 0.1, "repetition_penalty": 1.3}
ROWS = [f"{number} + {number * 7} =" for number in range(8)]
pytestmark = pytest.mark.filterwarnings("default")

Make = Callable[..., GRPOTrainer]


def by_length(completions: list[Any], **_: Any) -> list[float]:
    return [float(len(completion)) for completion in completions]


@pytest.fixture(autouse=True, scope="module")
def earlier_objects_stay() -> None:
    """After every training, accelerate looks through all objects for garbage, those of other tests included."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def build(
        kind: Any = GRPOTrainer, peft: Any = None, reward: Any = by_length, model: Any = MODEL, **given: Any
    ) -> Any:
        usual = {
            "use_cpu": True, "bf16": False, "report_to": [], "save_strategy": "no", "max_steps": 1, "logging_steps": 1,
            "per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 8, "learning_rate": 1e-3,
            "temperature": 0.9, "beta": 0.0, "disable_tqdm": True,
        }  # fmt: skip
        own = GRPOConfig if kind is GRPOTrainer else trl.GRPOConfig
        prompts = given.pop("prompts", ROWS)
        args = own(str(tmp_path / "out"), **{**usual, **given})
        return kind(MODEL, reward, args, train_dataset=Dataset.from_dict({"prompt": prompts}), peft_config=peft)

    return build


def batch(trainer: Any) -> tuple[Tensor, Tensor, int]:
    """Two rows of one prompt, one of another, and one whose completion is masked."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(5, 200, (4, 9 + 6), generator=generator)
    ids[1, :9] = ids[0, :9]
    mask = torch.ones_like(ids)
    mask[:2, :2], mask[2, :5], mask[1, 12:], mask[3, 9:] = 0, 0, 0, 0
    return ids, mask, 6


def logps(trainer: Any) -> tuple[Tensor, Tensor, Tensor]:
    found, entropies, _ = trainer._get_per_token_logps_and_entropies(
        trainer.model, *batch(trainer), compute_entropy=True
    )
    weights = torch.linspace(-1, 1, found.numel()).view_as(found)
    trainer.model.zero_grad()
    (found * weights).sum().backward()
    gradients = [p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None]
    trainer._attention.restore() if isinstance(trainer, GRPOTrainer) else None
    return found.detach(), entropies.detach(), torch.cat(gradients)


@pytest.mark.parametrize("peft", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize(
    "given",
    [{}, {"backprop_accumulation_micro_batch_size": 2}, *slow({"gradient_checkpointing": False})],
    ids=["recomputed", "in parts", "stored"],
)
def test_packed_logprobs_and_gradients_equal_those_of_trl(make: Make, peft: Any, given: dict[str, Any]) -> None:
    ours = make(peft=peft, **given)
    theirs = make(trl.GRPOTrainer, peft, gradient_checkpointing=given.get("gradient_checkpointing", True))
    theirs.model.load_state_dict(ours.model.state_dict())
    for own, other in zip(logps(ours), logps(theirs), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-3, atol=1e-4)
    assert ours._reasons == {}
    assert ours.model.config._attn_implementation == theirs.model.config._attn_implementation


@pytest.mark.parametrize("peft", [None, LORA], ids=["full", "lora"])
def test_the_engine_samples_and_ratios_are_one_on_fresh_weights(make: Make, peft: Any) -> None:
    trainer = make(peft=peft, max_steps=2, gradient_accumulation_steps=2)
    trainer.train()
    assert trainer._reasons == {} and trainer._engine is not None
    rows = [row for row in trainer.state.log_history if "importance_ratio/mean" in row]
    assert len(rows) == 2
    for row in rows:
        assert row["importance_ratio/mean"] == pytest.approx(1, abs=1e-3)
        assert row["importance_ratio/max"] == pytest.approx(1, abs=1e-2)


@pytest.mark.parametrize(
    ("peft", "given"),
    [*slow((None, {}), (None, {"beta": 0.1})), (LORA, {"beta": 0.1})],
    ids=["full", "full-kl", "lora-kl"],
)
def test_a_resumed_run_equals_an_uninterrupted_one(make: Make, peft: Any, given: dict[str, Any]) -> None:
    given |= {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "save_completions_probability": 1.0}
    whole = make(peft=peft, **given)
    whole.train()
    completions = Path(whole.args.output_dir) / "completions.jsonl"
    written = completions.read_text()
    held_out = json.dumps({"step": 2, "split": "eval"}) + "\n"
    completions.write_text(written + held_out)
    resumed = make(peft=peft, **given)
    resumed.train(resume_from_checkpoint=str(Path(whole.args.output_dir) / "checkpoint-2"))
    rows = [
        [
            {key: value for key, value in row.items() if not key.endswith("_time")}
            for row in one.state.log_history
            if "loss" in row and row["step"] > 2
        ]
        for one in (whole, resumed)
    ]
    assert len(rows[0]) == 2 and rows[0] == rows[1]
    found = completions.read_text()
    assert held_out in found and found.replace(held_out, "") == written
    weights = [one.model.state_dict() for one in (whole, resumed)]
    assert all(torch.equal(weight, weights[1][name]) for name, weight in weights[0].items())


@pytest.mark.slow
@pytest.mark.parametrize("steps", [*slow(4), 5], ids=["at its start", "within it"])
def test_a_run_resumed_in_a_later_epoch_sees_the_prompts_of_an_uninterrupted_one(make: Make, steps: int) -> None:
    seen: list[str] = []

    def noting(prompts: list[str], completions: list[Any], **_: Any) -> list[float]:
        seen.extend(prompts[::4])
        return by_length(completions)

    given = {"prompts": ROWS[:4], "max_steps": 8, "save_strategy": "steps", "save_steps": 1, "reward": noting}
    whole = make(**given)
    whole.train()
    made, seen[:] = list(seen), []
    assert len(made) == 8 and sorted(made[:4]) == sorted(made[4:]) == sorted(ROWS[:4]) and made[:4] != made[4:]
    resumed = make(**given)
    resumed.train(resume_from_checkpoint=str(Path(whole.args.output_dir) / f"checkpoint-{steps}"))
    assert seen == made[steps:]
    weights = [one.model.state_dict() for one in (whole, resumed)]
    assert all(torch.equal(weight, weights[1][name]) for name, weight in weights[0].items())
    # An uninterrupted run sees them as with TRL.
    order = trl.GRPOTrainer._get_train_sampler(resumed)
    assert [ROWS[at] for _ in range(2) for at in list(order)[::4]] == made


@pytest.mark.parametrize(
    ("given", "sampling"),
    [
        *slow(({"top_k": 1}, {"top_k": 1})),
        (
            {"top_p": 0.5, "min_p": 0.1, "repetition_penalty": 1.3},
            {"top_p": 0.5, "min_p": 0.1, "repetition_penalty": 1.3},
        ),
        ({"generation_kwargs": {"do_sample": False}}, {"temperature": 0.0}),
        *slow(({"generation_kwargs": {"eos_token_id": [7, 9]}}, {})),
    ],
    ids=["top_k", "filters", "greedy", "stops"],
)
def test_sampling_options_reach_the_engine(make: Make, given: dict[str, Any], sampling: dict[str, Any]) -> None:
    trainer = make(**given)
    engine = trainer._build_engine()
    seen: list[Any] = []
    original = engine.generate
    engine.generate = lambda *args: seen.append(args) or original(*args)  # type: ignore[method-assign]
    trainer._build_engine = lambda: engine
    trainer.train()
    # The first call checks the engine.
    (_, options, stops) = seen[1]
    assert {key: getattr(options, key) for key in sampling} == sampling
    assert options.max_tokens == 8 and trainer._reasons == {}
    if "eos_token_id" in given.get("generation_kwargs", {}):
        assert stops == (7, 9)


@pytest.mark.parametrize(
    ("given", "part", "reason"),
    [
        ({"generation_kwargs": {"num_beams": 2}}, "sampling", "num_beams"),
        ({"model_init_kwargs": {"attn_implementation": "eager"}}, "log-probs", "eager"),
    ],
    ids=["generation setting", "attention"],
)
def test_trl_is_used_where_ours_cannot_serve(make: Make, given: dict[str, Any], part: str, reason: str) -> None:
    trainer = make(**given, max_steps=1)
    trainer.train()
    assert reason in trainer._reasons[part] and len(trainer._reasons) == 1
    assert math.isfinite(trainer.state.log_history[0]["loss"])


def test_one_batch_that_does_not_fit_is_sampled_by_trl(make: Make) -> None:
    trainer = make(max_steps=2)
    engine = trainer._engine = trainer._build_engine()
    context = engine.engine.policy.context_length
    engine.engine.policy.context_length = 3
    ids, logprobs = trainer._generate_single_turn([[5] * 6] * 4, None, {}, 4)
    assert len(ids) == 4 and logprobs is None and trainer._reasons == {}
    engine.engine.policy.context_length = context
    assert trainer._generate_single_turn([[5] * 6] * 4, None, {}, 4)[1] is not None


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "the copy of the model that samples does not fit into memory"),
        (SamplingMemoryError("the cache does not fit.  Try: a smaller max_tokens"), "the cache does not fit"),
    ],
)
def test_no_memory_for_the_copy_that_samples_means_trl(
    make: Make, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str
) -> None:
    def too_large(*_: Any) -> None:
        raise error

    trainer = make()
    monkeypatch.setattr(trainer, "_build_engine", too_large)
    trainer.train()
    assert trainer._reasons["sampling"] == reason


def test_a_generate_of_the_script_is_called(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make()
    monkeypatch.setattr(GenerationMixin, "generate", lambda self, input_ids, **_: torch.cat([input_ids, input_ids], 1))
    ids, logprobs = trainer._generate_single_turn([[5, 6, 7]] * 2, None, {}, 2)
    assert ids == [[5, 6, 7]] * 2 and logprobs is None and trainer._reasons == {}


def test_a_sharded_model_is_sampled_by_trl_and_a_line_says_so(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make()
    monkeypatch.setattr(GRPOTrainer, "is_sharded", True)
    # As FSDP does.
    trainer.model.generate = trainer.model.generate
    trainer.train()
    assert trainer._reasons == {"sampling": "the weights are sharded (FSDP or ZeRO-3)"}


def test_another_version_of_trl_runs_as_trl_runs(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trl, "__version__", "1.99.0")
    trainer = make()
    assert set(trainer._reasons) == {"sampling", "log-probs"} and "this is 1.99.0" in trainer._reasons["sampling"]
    trainer.train()
    assert trainer._engine is None


def test_logprobs_that_differ_from_those_of_trl_are_not_used(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make()
    original = trainer._forward
    monkeypatch.setattr(trainer, "_forward", lambda *given: tuple(value + 0.5 for value in original(*given)))
    trainer.train()
    assert "differ from TRL's by 0.5 per token" in trainer._reasons["log-probs"]


def test_long_prompts_are_cut_from_the_left_and_counted(make: Make) -> None:
    trainer = make(max_prompt_length=3)
    ids, *_ = trainer._tokenize_prompts(ROWS)
    full = [trainer.processing_class(row)["input_ids"] for row in ROWS]
    assert ids == [row[-3:] for row in full] and trainer._cut_prompts == sum(len(row) > 3 for row in full) > 0


def test_extras_of_the_specification(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = make(
        artificial_epochs=3, save_completions_probability=1.0, activate_debugging_logs=True,
        offload_untrained_models=True, beta=0.04,
    )  # fmt: skip
    assert len(trainer.train_dataset) == 3 * len(ROWS)
    trainer.train()
    assert "4 completions, tokens [" in capsys.readouterr().out
    rows = [json.loads(line) for line in (Path(trainer.args.output_dir) / "completions.jsonl").read_text().splitlines()]
    assert len(rows) == 4 and rows[0]["rewards"] == {"by_length": float(len(rows[0]["completion"]))}
    assert {(row["step"], row["split"]) for row in rows} == {(0, "train")}
    assert next(trainer.ref_model.parameters()).device.type == "cpu"


def test_teaching_is_rewarded_by_what_it_changes(make: Make) -> None:
    asked: list[str] = []

    def digits(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        asked.extend(prompts)
        return [float(len(text) % 2) for text in completions]

    trainer = make(peft=LORA, reward=digits, adaptive_teaching=True, efficiency_weight=0.5)
    prompts: list[str] = []
    generate = trainer._generate
    trainer._generate = lambda given: prompts.extend(given) or generate(given)
    trainer.train()
    assert set(asked) <= set(ROWS), "rewards see the question, not the teacher's prompt"
    assert all(row.startswith("A student is going to be asked this") for row in prompts)
    (row,) = [row for row in trainer.state.log_history if "teaching/student_reward" in row]
    change = row["teaching/student_reward"] - row["teaching/baseline_reward"]
    assert (
        row["reward"] <= change + 0.5 + 1e-6
        and row["reward"] >= 2 * min(change, -row["teaching/degradation_rate"]) - 1e-6
    )


def test_callbacks_loss_overrides_and_a_loaded_model_work_as_in_trl(make: Make) -> None:
    seen: list[str] = []

    class Watch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            seen.append(type(given["model"]).__name__)

    class Own(GRPOTrainer):
        def compute_loss(self, *given: Any, **others: Any) -> Any:
            seen.append("loss")
            return super().compute_loss(*given, **others)

    loaded = AutoModelForCausalLM.from_pretrained(MODEL)
    before = [p.detach().clone() for p in loaded.parameters()]
    args = make().args
    trainer = Own(loaded, by_length, args, train_dataset=Dataset.from_dict({"prompt": ROWS}), callbacks=[Watch()])
    trainer.train()
    assert seen == ["loss", type(loaded).__name__]
    assert any(not torch.equal(old, new) for old, new in zip(before, loaded.parameters(), strict=True))


def test_a_plain_trl_config_is_accepted(tmp_path: Path) -> None:
    args = trl.GRPOConfig(
        str(tmp_path), use_cpu=True, bf16=False, report_to=[], save_strategy="no", max_steps=1, max_completion_length=6,
        per_device_train_batch_size=4, num_generations=4, disable_tqdm=True,
    )  # fmt: skip
    trainer = GRPOTrainer(MODEL, by_length, args, train_dataset=Dataset.from_dict({"prompt": ROWS}))
    trainer.train()
    assert trainer._reasons == {}


def test_settings_of_the_model_count_as_in_generate(make: Make) -> None:
    trainer = make()
    trainer.model.generation_config.min_p = 0.9
    sampling, _ = read_sampling(trainer.generation_config, trainer.model.generation_config)
    assert sampling.min_p == 0.9
    for neutral in ({"output_attentions": False}, {"num_beams": 1, "typical_p": 1.0}, {"bad_words_ids": []}):
        read_sampling(trainer.generation_config, GenerationConfig(**neutral))
    with pytest.raises(UnsupportedModelError, match="forced_eos_token_id"):
        read_sampling(trainer.generation_config, GenerationConfig(forced_eos_token_id=0))
    trainer.model.generation_config.suppress_tokens = [1, 2]
    trainer.train()
    assert "suppress_tokens" in trainer._reasons["sampling"]


def replace_tensors(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.5


def replace_by_state(model: Any) -> None:
    state = {name: tensor * 1.5 for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def replace_buffer(model: Any) -> None:
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq * 3


@pytest.mark.parametrize("change", [replace_tensors, replace_buffer, *slow(replace_by_state)])
def test_tensors_that_were_replaced_are_sampled_from(make: Make, change: Callable[[Any], None]) -> None:
    trainer = make(top_k=5, generation_kwargs={"do_sample": False})
    prompts = [[5, 6, 7], [9, 8, 7]]
    trainer._generate_single_turn(prompts, None, {}, 1)
    change(trainer.model)
    after, _ = trainer._generate_single_turn(prompts, None, {}, 1)
    fresh = make(top_k=5, generation_kwargs={"do_sample": False})
    change(fresh.model)
    assert after == fresh._generate_single_turn(prompts, None, {}, 1)[0]
    assert trainer._reasons == {}


@pytest.mark.parametrize("late", [False, True])
def test_a_hook_that_changes_a_layer_is_noticed_with_filters(make: Make, late: bool) -> None:
    trainer = make(top_k=5)
    prompts = [[5, 6, 7], [9, 8, 7]]
    if late:
        trainer._generate_single_turn(prompts, None, {}, 1)
        assert trainer._reasons == {}
    trainer.model.model.layers[0].mlp.register_forward_hook(lambda module, inputs, output: output * 3)
    trainer._generate_single_turn(prompts, None, {}, 1)
    assert "differ from TRL's" in trainer._reasons["sampling"]


def test_with_gradient_checkpointing_the_engine_is_built_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    build = GRPOTrainer._build_engine
    monkeypatch.setattr(GRPOTrainer, "_build_engine", lambda trainer: built.append(1) or build(trainer))
    make(peft=LORA, gradient_checkpointing=True, max_steps=3).train()
    assert len(built) == 1


@pytest.mark.parametrize("trained", ["lm_head", "norm"])
def test_parameters_that_are_trained_beside_an_adapter_are_sampled_from(make: Make, trained: str) -> None:
    trainer = make(peft=LORA, learning_rate=0.05, max_steps=3)
    for name, parameter in trainer.model.named_parameters():
        if trained in name:
            parameter.requires_grad_(True)
    trainer.train()
    ratios = [row["importance_ratio/max"] for row in trainer.state.log_history if "importance_ratio/max" in row]
    assert len(ratios) == 3 and ratios == pytest.approx([1.0] * 3, abs=1e-2)


def test_copies_in_another_precision_follow_what_is_trained_beside_an_adapter(make: Make) -> None:
    model = make(peft=LORA).model
    norm = model.get_base_model().model.norm.weight.requires_grad_(True)
    engine = TrainerEngine(model, None, torch.device("cpu"), in_bf16=True)
    with torch.no_grad():
        norm += 1
    assert engine.engine.model is not None
    engine.engine.model.refresh()
    torch.testing.assert_close(engine.engine.model.causal_lm.model.norm.weight, norm.detach().bfloat16())


def test_another_active_adapter_is_sampled_by_trl(make: Make) -> None:
    trainer = make(peft=LORA)
    trainer._generate_single_turn([[5, 6, 7]], None, {}, 1)
    trainer.model.add_adapter("other", LORA)
    trainer.model.set_adapter("other")
    trainer._generate_single_turn([[5, 6, 7]], None, {}, 1)
    assert "its active adapter" in trainer._reasons["sampling"]


def test_prompt_tuning_with_a_reference_is_left_to_trl(make: Make) -> None:
    numbers = []
    for kind in (trl.GRPOTrainer, GRPOTrainer):
        tuning = PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")
        trainer = make(kind, peft=tuning, beta=0.1)
        trainer.train()
        numbers.append(trainer.state.log_history[0]["grad_norm"])
    assert numbers[0] > 0 and numbers[1] > 0
    assert set(trainer._reasons) == {"sampling", "log-probs"}


def test_packing_is_checked_with_the_adapter_on(make: Make) -> None:
    trainer = make(peft=LORA, beta=0.1)
    with torch.no_grad(), trainer.model.disable_adapter():
        trainer._get_per_token_logps_and_entropies(trainer.model, *batch(trainer))
    assert trainer._checked == {False}
    logps(trainer)
    assert trainer._checked == {False, True} and trainer._reasons == {}


def test_a_batch_that_falls_back_between_turns_keeps_its_logprobs(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL wants log-probs of every turn of a conversation, or of none."""
    trainer, prompts = make(), [[5, 6, 7], [9, 8]]
    trainer._generate_single_turn(prompts, None, {}, 1)

    def run_out_of_memory(*_: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(trainer, "_sample", run_out_of_memory)
    ids, logprobs = trainer._generate_single_turn(prompts, None, {}, 1)
    assert "does not fit" in trainer._reasons["sampling"]
    assert [len(row) for row in logprobs] == [len(row) for row in ids]
    assert all(value < 0 for row in logprobs for value in row)


def test_a_rotary_embedding_that_depends_on_the_batch_is_left_to_trl() -> None:
    config = AutoConfig.from_pretrained(MODEL, attn_implementation="sdpa")
    assert AttentionSwitch(config).reason == ""
    config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    assert "depends on the length of the batch" in AttentionSwitch(config).reason


def test_another_attention_after_the_first_batch_is_noticed(make: Make) -> None:
    trainer = make()
    logps(trainer)
    trainer.model.set_attn_implementation("eager")
    logps(trainer)
    assert trainer.model.config._attn_implementation == "eager"


def test_an_activated_lora_is_left_to_trl(make: Make) -> None:
    activated = LoraConfig(r=4, target_modules="all-linear", alora_invocation_tokens=[7], task_type="CAUSAL_LM")
    trainer = make(peft=activated)
    assert "alora_invocation_tokens" in trainer._reasons["log-probs"]
    trainer.train()
    assert "alora_invocation_tokens" in trainer._reasons["sampling"]


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"attention_dropout": 0.1}, "attention_dropout"),
        ({"layer_types": ["full_attention", "conv"]}, "layers of kind conv"),
        ({"mamba_d_ssm": 8}, "layers of kind mamba_d_ssm"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ""),
    ],
)
def test_layers_that_rows_cannot_share_are_recognized(values: dict[str, Any], reason: str) -> None:
    config = PretrainedConfig(**values)
    config._attn_implementation = "sdpa"
    found = AttentionSwitch(config).reason
    assert reason in found and bool(found) == bool(reason)


@pytest.mark.parametrize("given", [{"temperature": -1.0}, {"top_p": 2.0}, {"top_k": -3}, {"repetition_penalty": 0.0}])
def test_values_that_sampling_is_not_defined_for_are_left_to_trl(make: Make, given: dict[str, float]) -> None:
    trainer = make(**given)
    # What TRL and transformers make of it is theirs.
    with contextlib.suppress(ValueError, RuntimeError, IndexError):
        trainer.train()
    assert next(iter(given)) in trainer._reasons["sampling"]


def test_a_model_without_a_name_needs_beta_0(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    model.config.name_or_path = ""
    args = GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to=[])
    with pytest.raises(ValueError, match=r"beta = 0\.04 needs a reference model.*Try: beta=0\.0"):
        GRPOTrainer(model, by_length, args, train_dataset=Dataset.from_dict({"prompt": ROWS}))


def test_a_reward_of_none_is_null_in_the_saved_completions(make: Make, tmp_path: Path) -> None:
    def sometimes(completions: list[Any], **_: Any) -> list[float | None]:
        return [None if index % 2 else 1.0 for index in range(len(completions))]

    make(reward=[sometimes, by_length], save_completions_probability=1.0).train()
    rows = [json.loads(line) for line in (tmp_path / "out" / "completions.jsonl").read_text().splitlines()]
    assert {row["rewards"]["sometimes"] for row in rows} == {1.0, None}


def test_a_model_made_in_memory_is_sampled_by_the_engine(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(MODEL))
    args = GRPOConfig(
        str(tmp_path), use_cpu=True, bf16=False, report_to=[], beta=0.0, max_steps=1, max_completion_length=4,
        per_device_train_batch_size=4, num_generations=4, save_strategy="no",
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    rows = Dataset.from_dict({"prompt": ROWS})
    trainer = GRPOTrainer(model, by_length, args, train_dataset=rows, processing_class=tokenizer)
    trainer.train()
    assert trainer._reasons == {}


def test_a_class_of_the_scripts_own_is_sampled_by_trl(tmp_path: Path) -> None:
    class Louder(Qwen3ForCausalLM):  # type: ignore[misc]
        def forward(self, *arguments: Any, **others: Any) -> Any:
            output = super().forward(*arguments, **others)
            output.logits = output.logits * 3
            return output

    args = GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to=[], beta=0.0, top_k=5, max_completion_length=4)
    rows = Dataset.from_dict({"prompt": ROWS})
    trainer = GRPOTrainer(Louder.from_pretrained(MODEL), by_length, args, train_dataset=rows)
    trainer._generate_single_turn([[5, 6, 7]], None, {}, 1)
    assert "Louder is not the class" in trainer._reasons["sampling"]


def test_a_precision_of_vllm_does_not_matter_without_it(make: Make) -> None:
    make(vllm_dtype="bfloat16")
