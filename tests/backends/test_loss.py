"""Each loss against numbers worked by hand: two rows, three tokens, ratios 1.5, 0.5 and 4."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch

from retrain.backends.local.loss import summed_loss
from retrain.config.schema import Loss
from retrain.errors import PluginError
from retrain.losses import PolicyLoss, build_loss
from retrain.losses.batch import TokenBatch
from retrain.plugins import REGISTRIES

RATIOS = (1.5, 0.5, 4.0)
SAMPLED = (-1.0, -2.0, -3.0)


def batch_of(advantages: tuple[float, ...], mask: tuple[float, ...] = (1, 1, 1)) -> TokenBatch:
    sampled = torch.tensor(SAMPLED, dtype=torch.float64)
    logprobs = (sampled + torch.tensor(RATIOS, dtype=torch.float64).log()).requires_grad_()
    return TokenBatch(
        logprobs=logprobs,
        sampled_logprobs=sampled,
        advantages=torch.tensor(advantages, dtype=torch.float64),
        mask=torch.tensor(mask, dtype=torch.float64),
        row=torch.tensor([0, 0, 1]),
        rows=2,
    )


def value_and_gradient(batch: TokenBatch, loss: Loss) -> tuple[float, list[float]]:
    total = summed_loss(batch, build_loss(loss))
    total.backward()
    assert batch.logprobs.grad is not None
    return float(total.detach()), batch.logprobs.grad.tolist()


def denominator(loss: Loss, tokens: int, rows: int, max_tokens: int) -> float:
    return build_loss(loss).average.denominator(tokens, rows, max_tokens)


def test_importance_sampling_is_the_ratio_times_the_advantage() -> None:
    value, gradient = value_and_gradient(batch_of((1.0, -2.0, 0.5)), Loss(ratio_cap=0.0))
    # -(1.5·1 + 0.5·(-2) + 4·0.5); the derivative of a ratio by its log-prob is the ratio.
    assert value == pytest.approx(-2.5)
    assert gradient == pytest.approx([-1.5, 1.0, -2.0])


def test_the_cap_bounds_a_ratio_and_keeps_its_gradient() -> None:
    value, gradient = value_and_gradient(batch_of((1.0, -2.0, 0.5)), Loss(ratio_cap=2.0))
    assert value == pytest.approx(-(1.5 - 1.0 + 1.0))
    assert gradient == pytest.approx([-1.5, 1.0, -1.0])


def test_a_masked_token_weighs_nothing() -> None:
    value, gradient = value_and_gradient(batch_of((1.0, -2.0, 0.5), mask=(1, 0, 1)), Loss(ratio_cap=0.0))
    assert value == pytest.approx(-3.5)
    assert gradient == pytest.approx([-1.5, 0.0, -2.0])


def test_ppo_takes_the_worse_of_ratio_and_clipped_ratio() -> None:
    value, gradient = value_and_gradient(batch_of((1.0, -2.0, 0.5)), Loss(type="ppo", ratio_cap=0.0))
    # min(1.5, 1.2)·1, then min(0.5·-2, 0.8·-2), then min(4, 1.2)·0.5: every token is clipped, none moves.
    assert value == pytest.approx(-(1.2 - 1.6 + 0.6))
    assert gradient == pytest.approx([0.0, 0.0, 0.0])


def test_ppo_does_not_clip_what_would_undo_a_mistake() -> None:
    value, gradient = value_and_gradient(batch_of((-1.0, 2.0, -0.5)), Loss(type="ppo", ratio_cap=0.0))
    assert value == pytest.approx(1.5 - 1.0 + 2.0)
    assert gradient == pytest.approx([1.5, -1.0, 2.0])


def test_ppo_clips_below_and_above_apart() -> None:
    loss = Loss(type="ppo", clip_low=0.1, clip_high=0.6, ratio_cap=0.0)
    value, _ = value_and_gradient(batch_of((1.0, -2.0, 0.5)), loss)
    assert value == pytest.approx(-(1.5 - 1.8 + 0.8))


def test_cispo_clips_the_weight_and_never_the_gradient() -> None:
    batch = batch_of((1.0, -2.0, 0.5))
    value, gradient = value_and_gradient(batch, Loss(type="cispo"))
    logprobs = [s + math.log(r) for s, r in zip(SAMPLED, RATIOS, strict=True)]
    assert value == pytest.approx(-(1.2 * 1.0 * logprobs[0] + 0.8 * -2.0 * logprobs[1] + 1.2 * 0.5 * logprobs[2]))
    assert gradient == pytest.approx([-1.2, 1.6, -0.6])


def test_gspo_has_one_ratio_a_sequence() -> None:
    batch = batch_of((-1.0, -1.0, 0.5))
    loss = Loss(type="gspo", clip_low=0.5, clip_high=9.0, ratio_cap=0.0)
    # The first sequence: the geometric mean of 1.5 and 0.5; the second: 4.
    first = math.sqrt(0.75)
    value, gradient = value_and_gradient(batch, loss)
    assert value == pytest.approx(2 * first - 2.0)
    # Both tokens share the mean, so each has half of the two terms' derivative.
    assert gradient == pytest.approx([first, first, -2.0])


def test_gspo_leaves_masked_tokens_out_of_the_mean() -> None:
    value, gradient = value_and_gradient(
        batch_of((-1.0, 7.0, 0.0), mask=(1, 0, 1)), Loss(type="gspo", clip_high=9.0, ratio_cap=0.0)
    )
    assert value == pytest.approx(1.5)
    assert gradient == pytest.approx([1.5, 0.0, 0.0])


def test_gspo_clips_a_sequence_as_a_whole() -> None:
    value, gradient = value_and_gradient(batch_of((1.0, 1.0, 1.0)), Loss(type="gspo", ratio_cap=0.0))
    assert value == pytest.approx(-(2 * math.sqrt(0.75) + 1.2))
    assert gradient[2] == 0.0


def test_dr_grpo_is_ppo_with_a_constant_denominator() -> None:
    ppo, _ = value_and_gradient(batch_of((1.0, -2.0, 0.5)), Loss(type="ppo"))
    dr_grpo, _ = value_and_gradient(batch_of((1.0, -2.0, 0.5)), Loss(type="dr_grpo"))
    assert dr_grpo == ppo
    assert denominator(Loss(type="dr_grpo"), tokens=3, rows=2, max_tokens=100) == 200.0
    assert denominator(Loss(type="ppo"), tokens=3, rows=2, max_tokens=100) == 3.0


def test_grpo_is_the_mean_of_each_row_and_then_of_rows() -> None:
    # Two tokens with ratios 1.5 and 0.5, then a row of one with 4: clipped to 1.2, 0.5 and 1.2.
    value, gradient = value_and_gradient(batch_of((1.0, 1.0, -1.0)), Loss(type="grpo", ratio_cap=0.0))
    assert value == pytest.approx(-((1.2 + 0.5) / 2 - 4.0))
    assert gradient == pytest.approx([0.0, -0.25, 4.0])
    masked, _ = value_and_gradient(batch_of((1.0, 1.0, -1.0), mask=(0, 1, 1)), Loss(type="grpo", ratio_cap=0.0))
    assert masked == pytest.approx(-(0.5 - 4.0))
    assert denominator(Loss(type="grpo"), tokens=3, rows=2, max_tokens=100) == 2.0


@pytest.mark.parametrize("kind", ["importance_sampling", "ppo", "cispo", "gspo", "dr_grpo", "grpo"])
def test_a_ratio_beyond_all_bounds_does_not_overflow(kind: str) -> None:
    batch = batch_of((1.0, -2.0, 0.5))
    far = TokenBatch(
        (batch.sampled_logprobs + torch.tensor([500.0, -500.0, 500.0])).detach().requires_grad_(),
        *(getattr(batch, name) for name in ("sampled_logprobs", "advantages", "mask", "row", "rows")),
    )
    value, gradient = value_and_gradient(far, Loss(type=kind))
    assert math.isfinite(value)
    assert all(map(math.isfinite, gradient))


def test_a_dotted_path_names_a_custom_loss(tmp_path: Path) -> None:
    (tmp_path / "doubled_loss.py").write_text(
        "from retrain.losses.importance_sampling import ImportanceSampling\n"
        "class Doubled(ImportanceSampling):\n"
        "    def objective(self, batch):\n        return 2 * super().objective(batch)\n"
        "def function(batch): ...\n"
        "class Broken(ImportanceSampling):\n    def __init__(self, settings): raise ValueError('no settings')\n"
    )
    settings = Loss(type="doubled_loss.Doubled", ratio_cap=0.0)
    total = summed_loss(batch_of((1.0, -2.0, 0.5)), build_loss(settings, [str(tmp_path)]))
    assert float(total.detach()) == pytest.approx(-5.0)
    with pytest.raises(PluginError, match=r"'doubled_loss.function' is .* must be a subclass of .*PolicyLoss"):
        build_loss(Loss(type="doubled_loss.function"))
    with pytest.raises(PluginError, match=r"'doubled_loss.Broken' raised ValueError\('no settings'\)"):
        build_loss(Loss(type="doubled_loss.Broken"))


@pytest.mark.parametrize("name", REGISTRIES["loss"].parts)
def test_a_built_in_loss_declares_the_options_it_reads(name: str) -> None:
    changes = {"clip_low": 0.1, "clip_high": 0.3, "ratio_cap": 1.1}
    plain = Loss(type=name, ratio_cap=0.0)
    for key, value in changes.items():
        values = [
            value_and_gradient(batch_of(advantages), loss)
            for advantages in ((1.0, -2.0, 0.5), (-1.0, -1.0, -0.5))
            for loss in (plain, plain.model_copy(update={key: value}))
        ]
        assert (values[0::2] != values[1::2]) == REGISTRIES["loss"].reads(name, key), key


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("batch.advantages.sum()", r"'odd_loss.Odd' returned a tensor of shape \(\) for 3 tokens; it must return one"),
        ("batch.advantages[:2]", r"returned a tensor of shape \(2,\) for 3 tokens"),
        ("0.5", r"'odd_loss.Odd' returned 0.5 for 3 tokens"),
        ("batch.ratios().detach()", r"'odd_loss.Odd' returned values without a gradient"),
        ("batch.ratios() > 1", r"returned bool values on cpu; they must be floating-point values on cpu"),
        ("batch.ratios().to('meta')", r"returned float64 values on meta; they must"),
        ("1 / 0", r"'odd_loss.Odd' raised ZeroDivisionError\(.*\) in objective \(odd_loss.py, line 4\)\."),
    ],
)
def test_a_loss_that_returns_something_else_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, message: str
) -> None:
    monkeypatch.delitem(sys.modules, "odd_loss", raising=False)
    (tmp_path / "odd_loss.py").write_text(
        "from retrain.losses import PolicyLoss\n"
        f"class Odd(PolicyLoss):\n    def objective(self, batch):\n        return {body}\n"
    )
    loss = build_loss(Loss(type="odd_loss.Odd"), [str(tmp_path)])
    with pytest.raises(PluginError, match=message):
        summed_loss(batch_of((1.0, -2.0, 0.5)), loss)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("full"), RuntimeError("x does not have a deterministic implementation")]
)
def test_errors_that_the_learner_acts_on_reach_it(error: Exception) -> None:
    class Full(PolicyLoss):
        def objective(self, batch: TokenBatch) -> torch.Tensor:
            raise error

    with pytest.raises(type(error)) as caught:
        summed_loss(batch_of((1.0,)), Full(Loss()))
    assert caught.value is error
