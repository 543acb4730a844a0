"""Plugins from a file in the working directory: each shape they may have, and each way they may go wrong."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from retrain.advantages import AdvantageResult, CreditAssigner, TransformSpec, compute_advantages
from retrain.config.schema import Algorithm, TrainConfig
from retrain.errors import ConfigError, PluginError

from .groups import completion, group

README_PLUGIN = """
from retrain.advantages import TransformSpec

def _entropy_transform(entropies, planning_mask, sepa_lambda):
    return [e if m else e + sepa_lambda for e, m in zip(entropies, planning_mask)]

def make_transform_spec():
    return TransformSpec(
        name="entropy_shift",
        use_gtpo=True,
        needs_planning=True,
        uses_sepa_controller=True,
        entropy_transform=_entropy_transform,
    )
"""

LOGPROBS = [[-1.0, -3.0], [-2.0]]

Write = Callable[[str], str]
numbers = count()


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Writes a module into the working directory and returns its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    written = []

    def write_module(source: str) -> str:
        name = f"my_plugin_{next(numbers)}"
        Path(f"{name}.py").write_text(source)
        written.append(name)
        return name

    yield write_module
    for name in written:
        sys.modules.pop(name, None)


def compute(**options: object) -> AdvantageResult:
    return compute_advantages(
        [1, 0], LOGPROBS, advantage_mode=options.pop("advantage_mode", "grpo"), search_paths=["."], **options
    )


def assigner(**algorithm: object) -> CreditAssigner:
    return CreditAssigner(TrainConfig(algorithm=Algorithm(**algorithm)))


def test_the_readme_transform_works_from_the_working_directory(write: Write) -> None:
    chosen = assigner(transform_mode=f"{write(README_PLUGIN)}.make_transform_spec", advantage_mode="grpo")
    assert chosen.needs_planning
    assert chosen.uses_sepa
    masks = [[np.array([True, False]), np.array([False])]]
    credit = chosen.assign([group([completion(row) for row in LOGPROBS], [1.0, 0.0])], masks, sepa_lambda=0.5)
    # entropies 1 (planning) and 3 + 0.5: mean 2.25, weights 1 + 0.1 (1 / 2.25 - 1) and 1 + 0.1 (3.5 / 2.25 - 1)
    assert credit.token_advantages_PG[0][0] == pytest.approx([0.5 * (0.9 + 0.1 / 2.25), 0.5 * (0.9 + 0.35 / 2.25)])
    assert credit.token_advantages_PG[0][1] == pytest.approx([-0.5])


def test_a_transform_path_may_name_a_spec(write: Write) -> None:
    name = write(README_PLUGIN + "\nSPEC = make_transform_spec()\n")
    by_spec = compute(transform_mode=f"{name}.SPEC", sepa_lambda=0.5)
    by_function = compute(transform_mode=f"{name}:make_transform_spec", sepa_lambda=0.5)
    assert by_spec.token_advantages[0].tolist() == by_function.token_advantages[0].tolist()


def test_transform_params_reach_a_function_that_makes_a_spec(write: Write) -> None:
    name = write(
        "from retrain.advantages import TransformSpec\n"
        "def make(power=1):\n"
        "    return TransformSpec('power', entropy_transform=lambda e, m, s: e ** power)\n"
    )
    squared = compute(transform_mode=f"{name}.make", transform_params={"power": 2})
    assert squared.token_advantages[0] == pytest.approx([0.5 * (0.9 + 0.1 / 5), 0.5 * (0.9 + 0.9 / 5)])
    with pytest.raises(ConfigError, match=r"does not take 'powr'. It takes: power"):
        compute(transform_mode=f"{name}.make", transform_params={"powr": 2})


def test_a_transform_may_be_a_function_of_a_context(write: Write) -> None:
    name = write(
        "def last_token(context, share=1.0):\n"
        "    assert context.params == {'share': 0.5, 'other': 1}\n"
        "    earned_G = context.episode_advantages_G * share\n"
        "    return [[0.0] * (len(lp) - 1) + [a] for a, lp in zip(earned_G, context.logprobs_G)]\n"
    )
    result = compute(transform_mode=f"{name}.last_token", transform_params={"share": 0.5, "other": 1})
    assert [tokens.tolist() for tokens in result.token_advantages] == [[0.0, 0.25], [-0.25]]


def test_an_algorithm_replaces_the_whole_pipeline(write: Write) -> None:
    name = write(
        "import numpy as np\n"
        "def reinforce(context):\n"
        "    return [np.full(len(lp), r) for r, lp in zip(context.rewards_G, context.logprobs_G)]\n"
    )
    result = compute(algorithm_mode=f"{name}.reinforce", transform_mode="gtpo_sepa")
    assert [tokens.tolist() for tokens in result.token_advantages] == [[1.0, 1.0], [0.0]]
    assert result.episode_advantages.tolist() == [1.0, 0.0]
    chosen = assigner(algorithm_mode=f"{name}.reinforce")
    assert chosen.needs_planning
    assert chosen.uses_sepa


def test_contexts_hold_only_scored_completions_and_cannot_be_written_to(write: Write) -> None:
    name = write(
        "def algorithm(context):\n"
        "    assert len(context.completions_G) == 2\n"
        "    assert [len(mask) for mask in context.sampled_masks_G] == [2, 1]\n"
        "    context.logprobs_G[0][0] = 7\n"
    )
    answers = [completion([-1.0, -3.0]), completion([-9.0] * 5), completion([-2.0])]
    with pytest.raises(PluginError, match="read-only"):
        assigner(algorithm_mode=f"{name}.algorithm").assign([group(answers, [1.0, "error", 0.0])])


def test_tokens_of_an_environment_earn_nothing_from_a_plugin_either(write: Write) -> None:
    name = write("def ones(context):\n    return [[1.0] * len(lp) for lp in context.logprobs_G]\n")
    answers = [completion([-1.0, -3.0, -1.0], sampled=[True, False, True]), completion([-2.0])]
    credit = assigner(transform_mode=f"{name}.ones").assign([group(answers, [1.0, 0.0])])
    assert credit.token_advantages_PG[0][0].tolist() == [1.0, 0.0, 1.0]


def test_an_entropy_transform_sees_only_tokens_that_the_model_wrote(write: Write) -> None:
    name = write(
        "from retrain.advantages import TransformSpec\n"
        "def check(entropies, mask, lam):\n"
        "    assert 9.0 not in entropies\n"
        "    return entropies\n"
        "SPEC = TransformSpec('check', entropy_transform=check)\n"
    )
    answers = [completion([-1.0, -9.0, -3.0], sampled=[True, False, True]), completion([-2.0]), completion([])]
    credit = assigner(transform_mode=f"{name}.SPEC").assign([group(answers, [1.0, 0.0, 0.0])])
    expected = compute_advantages([1, 0, 0], [[-1.0, -3.0], [-2.0], []], transform_mode="gtpo")
    assert credit.token_advantages_PG[0][0][[0, 2]] == pytest.approx(expected.token_advantages[0])


def test_advantage_params_reach_a_custom_advantage(write: Write) -> None:
    name = write("def scaled(rewards, scale):\n    return (rewards - rewards.mean()) * scale\n")
    result = compute(advantage_mode=f"{name}.scaled", advantage_params={"scale": 4.0}, transform_mode="none")
    assert result.episode_advantages.tolist() == [2.0, -2.0]
    with pytest.raises(PluginError, match=r"must be callable as f\(rewards_G\)"):
        compute(advantage_mode=f"{name}.scaled")


def test_a_built_in_advantage_rejects_parameters() -> None:
    with pytest.raises(ConfigError, match=r"advantage 'grpo' does not take 'scale'\. It takes: nothing"):
        compute(advantage_params={"scale": 4.0})
    with pytest.raises(ConfigError, match="transform 'gtpo' takes no parameters"):
        compute(transform_mode="gtpo", transform_params={"scale": 4.0})


def test_an_uncertainty_may_be_a_function_or_a_spec_that_needs_entropies(write: Write) -> None:
    name = write(
        "from retrain.advantages import Uncertainty\n"
        "def halved(context):\n    return -context.logprobs / 2\n"
        "picky = Uncertainty('picky', lambda context: context.entropies, needs_entropies=True)\n"
    )
    assert compute(uncertainty_kind=f"{name}.halved").token_advantages[0] == pytest.approx(
        compute().token_advantages[0]
    )
    assert assigner(uncertainty_kind=f"{name}.picky").needs_entropies
    assert not assigner(uncertainty_kind=f"{name}.halved").needs_entropies


ENTROPY = (
    "from retrain.advantages import TransformSpec\nPART = TransformSpec('mine', entropy_transform=lambda e, m, s: {})\n"
)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (ENTROPY.format("[1.0]"), "returned 1 values for 2 tokens at group 0, completion 0"),
        (ENTROPY.format("[1.0] * (len(e) - 1) + [float('nan')]"), "returned nan at group 0, completion 0, token 1"),
        (ENTROPY.format("None"), "returned None at group 0, completion 0"),
        (ENTROPY.format("'high'"), "returned str, not numbers, at group 0, completion 0"),
        (ENTROPY.format("[10**400] * len(e)"), "returned list, not numbers, at group 0, completion 0"),
        (ENTROPY.format("1 / 0"), r"raised ZeroDivisionError.* at group 0, completion 0"),
        ("def PART(context):\n    return [[1.0, 2.0]]", "returned 1 arrays for 2 completions at group 0"),
        ("def PART(context):\n    return None", "returned NoneType at group 0"),
        ("import numpy\ndef PART(context):\n    return numpy.array(1.0)", "returned ndarray at group 0"),
        ("def PART(context):\n    raise SystemExit(2)", r"raised SystemExit\(2\) at group 0"),
        ("def PART():\n    raise SystemExit(2)", r"raised SystemExit\(2\) when asked for its TransformSpec"),
        ("def PART(context):\n    return [[1.0, 2.0], [1.0, 2.0]]", "2 values for 1 tokens at group 0, completion 1"),
        ("def PART(context):\n    return [[1, float('inf')], [1]]", "returned inf at group 0, completion 0, token 1"),
        ("def PART(context):\n    return [[[1.0], [2.0]], [1.0]]", r"an array of shape \(2, 1\) for 2 tokens"),
        ("def PART():\n    return 3", "returned int instead of a TransformSpec"),
        ("def PART():\n    raise RuntimeError('no')", r"raised RuntimeError\('no'\)"),
        ("def PART(a, b):\n    return 3", r"has the signature \(a, b\)"),
        ("PART = 3", "is int, not a TransformSpec"),
    ],
)
def test_a_transform_that_misbehaves_is_named(write: Write, source: str, message: str) -> None:
    name = write(source)
    with pytest.raises(PluginError, match=message) as caught:
        compute(transform_mode=f"{name}.PART")
    assert f"transform plugin '{name}.PART'" in str(caught.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def PART(rewards):\n    return rewards[:1]", "returned 1 values for 2 completions at group 0"),
        ("def PART(rewards):\n    return rewards * float('nan')", "returned nan at group 0, completion 0"),
        ("def PART(rewards):\n    raise KeyError('x')", r"raised KeyError\('x'\) at group 0"),
        ("import sys\ndef PART(rewards):\n    sys.exit('done')", r"raised SystemExit\('done'\) at group 0"),
        ("def PART():\n    return 1", "must be callable as"),
        ("PART = 3", "is int, not a function"),
    ],
)
def test_an_advantage_that_misbehaves_is_named(write: Write, source: str, message: str) -> None:
    name = write(source)
    with pytest.raises(PluginError, match=message) as caught:
        compute(advantage_mode=f"{name}.PART")
    assert f"advantage plugin '{name}.PART'" in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "source", "message"),
    [
        ("uncertainty_kind", "def PART(context):\n    return context.logprobs[:1]", r"shape \(1,\) for the 3 tokens"),
        (
            "uncertainty_kind",
            "def PART(context):\n    return [1, 2, float('nan')]",
            "returned nan at group 0, completion 1, token 0",
        ),
        ("uncertainty_kind", "def PART():\n    return 1", "must be callable as"),
        ("algorithm_mode", "def PART(a, b):\n    return 1", "must be callable as"),
        ("algorithm_mode", "def PART(context):\n    return [[1.0]]", "1 arrays for 2 completions"),
    ],
)
def test_other_plugins_that_misbehave_are_named(write: Write, kind: str, source: str, message: str) -> None:
    name = write(source)
    with pytest.raises(PluginError, match=message) as caught:
        compute(**{kind: f"{name}.PART"})
    assert f"plugin '{name}.PART'" in str(caught.value)


def test_places_in_messages_count_completions_that_were_left_out(write: Write) -> None:
    name = write("def PART(context):\n    return [[1.0] * len(lp) for lp in context.logprobs_G[:1]] + [[float('nan')]]")
    answers = [completion([-1.0]), completion([-1.0]), completion([-2.0])]
    live = group(answers, ["error", 1.0, 0.0])
    with pytest.raises(PluginError, match="group 1, completion 2, token 0"):
        assigner(transform_mode=f"{name}.PART").assign([group(answers, [0.0] * 3), live])


def test_a_spec_is_what_the_readme_shows() -> None:
    spec = TransformSpec(
        name="mine", use_gtpo=True, needs_planning=True, uses_sepa_controller=True, entropy_transform=None
    )
    assert (spec.apply_hicra, spec.batch_entropy_transform, spec.token_transform) == (False, None, None)
