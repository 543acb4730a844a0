"""Full fine-tuning: gradients of every weight, the sampler's view of them, files, and a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from e2e.tiny import (
    PlainTokenizer,
    config_for,
    datums_of,
    gradients,
    learner_for,
    policy_for,
    random_datums,
    random_prompts,
    write_model,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

from retrain.backends.local import build
from retrain.backends.local.learner import Learner
from retrain.inference_engine.pytorch import PyTorchEngine
from retrain.modeling.logprobs import TemperedLogprobs
from retrain.modeling.packing import length_of
from retrain.modeling.tokens import load_tokenizer
from retrain.storage.checkpoint import publish_adapter
from retrain.types import Sampling

from .test_learner import plain_logprobs

SIZES = ((3, 9), (11, 2), (1, 17), (6, 6), (3, 1), (8, 13))


def learner(model: Path, **overrides: Any) -> Learner:
    config = config_for(model, **{"model__lora_rank": 0, "loss__ratio_cap": 0.0, "training__lr": 1e-3} | overrides)
    return learner_for(policy_for(config), config)


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gpt2"])
def test_every_weight_has_the_gradient_that_the_plain_model_gives_it(family: str, tmp_path: Path) -> None:
    folder, datums = write_model(tmp_path / "model", family), random_datums(SIZES)
    made = learner(folder)
    made._backward(made.split(datums))
    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    tokens = sum(len(datum.completion_ids_T) for datum in datums)
    for datum in datums:
        ratio = (plain_logprobs(plain, datum, made.sampling.temperature) - torch.as_tensor(datum.logprobs_T)).exp()
        (-(ratio * torch.as_tensor(datum.advantages_T, dtype=torch.float32)).sum() / tokens).backward()
    found, expected = gradients(made.policy), {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-4 * float(gradient.abs().max()))


def test_the_head_of_a_gpu_gives_its_matrix_the_gradient_of_plain_autograd() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(11, 6, generator=generator, requires_grad=True)
    weight = torch.randn(17, 6, generator=generator, requires_grad=True)
    targets, scale = torch.randint(17, (11,), generator=generator), torch.randn(11, generator=generator)
    (TemperedLogprobs.apply(hidden, weight, targets, 0.7, 4) * scale).sum().backward()  # type: ignore[no-untyped-call]
    found = hidden.grad, weight.grad
    hidden.grad = weight.grad = None
    logprobs = (hidden @ weight.T / 0.7).log_softmax(1).gather(1, targets[:, None]).squeeze(1)
    (logprobs * scale).sum().backward()
    torch.testing.assert_close(found, (hidden.grad, weight.grad), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"inference__dtype": "bf16"}], ids=["shared", "another precision"])
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bf16 instructions takes a slower path
def test_the_sampler_sees_every_update(tiny: Path, options: dict[str, Any]) -> None:
    made = learner(tiny, training__lr=0.02, training__temperature=1.0, **options)
    engine = PyTorchEngine(made.policy, made.config.inference, PlainTokenizer(), lambda *_: None)
    prompts, sampling = random_prompts((5, 9, 3)), Sampling(max_tokens=12, n=4, temperature=1.0, seed=1)
    for step in range(3):
        engine.sync(made.policy)
        datums = datums_of(prompts, engine.generate(prompts, sampling), seed=step)
        metrics = made.step(datums, step)
        assert metrics["ratio_mean"] == pytest.approx(1.0, abs=2e-2 if options else 1e-4)
        assert metrics["kl_sample_train"] == pytest.approx(0.0, abs=1e-2 if options else 1e-7)


def test_save_and_load_restore_weights_and_optimizer_to_the_bit(tiny: Path, tmp_path: Path) -> None:
    made, other = learner(tiny), learner(tiny)
    made.step(random_datums(SIZES))
    made.save(tmp_path)
    other.load(tmp_path)
    assert made.step(random_datums(SIZES[:3]), 1) == other.step(random_datums(SIZES[:3]), 1)
    pairs = zip(made.policy.adapter_state().items(), other.policy.adapter_state().values(), strict=True)
    assert all(torch.equal(tensor, restored) for (_, tensor), restored in pairs)


def test_what_is_saved_loads_as_a_plain_model_with_its_tokenizer(tiny: Path, tmp_path: Path) -> None:
    config = config_for(tiny, model__lora_rank=0, training__lr=0.05)
    backend = build(config, load_tokenizer(str(tiny)), lambda line: None, lambda *_: None)
    datums = random_datums(SIZES)
    backend.train_step(datums, 0)
    (tmp_path / "step").mkdir()
    backend.save(tmp_path / "step")
    published = tmp_path / "published"
    for _ in range(2):
        publish_adapter(tmp_path / "step", published, print)
    plain = AutoModelForCausalLM.from_pretrained(published, attn_implementation="eager").eval()
    learned = backend.learner  # type: ignore[attr-defined]
    with torch.no_grad():
        found = learned.logprobs(learned.pack(datums[:1]))
        expected = plain_logprobs(plain, datums[0], config.training.temperature)
    torch.testing.assert_close(found, expected, rtol=0, atol=5e-5)
    assert len(AutoTokenizer.from_pretrained(published)) > 0


def test_a_folder_with_somebody_elses_model_is_never_replaced(tiny: Path, tmp_path: Path) -> None:
    made = learner(tiny)
    made.save(tmp_path)
    mine = write_model(tmp_path / "mine")
    before = sorted(path.name for path in mine.iterdir())
    logged: list[str] = []
    publish_adapter(tmp_path, mine, logged.append)
    assert sorted(path.name for path in mine.iterdir()) == before
    assert "holds files that retrain did not write" in logged[0]


@pytest.mark.parametrize(("option", "value", "most"), [("micro_batches", 4, 1), ("micro_batch_rows", 2, 2)])
@pytest.mark.parametrize("rank", [0, 4], ids=["whole", "adapter"])
def test_micro_batches_of_few_rows_have_the_gradient_of_one(
    tiny: Path, option: str, value: int, most: int, rank: int
) -> None:
    datums = random_datums(SIZES)
    one, cut = (
        learner(tiny, model__lora_rank=rank),
        learner(tiny, model__lora_rank=rank, **{f"memory__{option}": value}),
    )
    batches = cut.split(datums)
    assert max(map(len, batches)) <= most
    assert sum(length_of(d) for batch in batches for d in batch) == sum(map(length_of, datums))
    one._backward([datums])
    cut._backward(batches)
    expected = gradients(one.policy)
    for name, gradient in gradients(cut.policy).items():
        largest = float(expected[name].abs().max())
        np.testing.assert_allclose(gradient.numpy() / largest, expected[name].numpy() / largest, rtol=0, atol=1e-6)
