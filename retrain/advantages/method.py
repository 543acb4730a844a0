"""Methods of credit assignment: what a transform is, and how the configured functions are found and checked.

Contexts describe one group. They have only scored completions, and their arrays are read-only views.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import cast

from numpy.typing import ArrayLike

from retrain.advantages.episode import AdvantageFn, grpo
from retrain.advantages.ragged import Ragged
from retrain.advantages.token import sepa_pool
from retrain.advantages.uncertainty import Uncertainty, UncertaintyFn
from retrain.errors import ConfigError, PluginError
from retrain.plugins import REGISTRIES
from retrain.types import BoolArray, Completion, FloatArray


@dataclass(frozen=True, kw_only=True)
class AlgorithmContext:
    """One group, for an algorithm plugin. Token arrays: one per completion."""

    rewards_G: FloatArray
    logprobs_G: tuple[FloatArray, ...]
    uncertainties_G: tuple[FloatArray, ...]
    """Uncertainties of the kind `[algorithm] uncertainty_kind`; 0 on tokens that were not sampled."""
    planning_masks_G: tuple[BoolArray, ...]
    sampled_masks_G: tuple[BoolArray, ...]
    """False on tokens that an environment inserted; values returned there become 0."""
    entropies_G: tuple[FloatArray, ...] | None = None
    """True entropies, from engines that return them."""
    sepa_lambda: float = 0.0
    gtpo_beta: float = 0.0
    hicra_alpha: float = 0.0
    params: Mapping[str, object] = field(default_factory=dict)
    """`[algorithm.transform_params]`."""
    completions_G: tuple[Completion, ...] = ()
    """The completions; with `compute_advantages` they have no text and no real token ids."""


@dataclass(frozen=True, kw_only=True)
class TransformContext(AlgorithmContext):
    """One group, for a function that distributes episode advantages over tokens."""

    episode_advantages_G: FloatArray


EntropyTransform = Callable[[FloatArray, BoolArray, float], ArrayLike]
"""`(entropies, planning_mask, sepa_lambda)` of one completion -> its new entropies, a list or an array."""

BatchEntropyTransform = Callable[[FloatArray, BoolArray, Ragged, float], FloatArray]
"""`(entropies, execution_mask, tokens, sepa_lambda)` of all completions at once, flat."""

TokenTransform = Callable[[TransformContext], Sequence[ArrayLike]]
"""A group's context -> token advantages, one list or array per completion."""

AlgorithmFn = Callable[[AlgorithmContext], Sequence[ArrayLike]]
"""A group's context -> token advantages, with no episode advantage computed before."""


@dataclass(frozen=True)
class TransformSpec:
    """A token transform: entropy transform, GTPO weights and HICRA amplification, each optional."""

    name: str
    use_gtpo: bool = True
    """Weight tokens by their (transformed) entropies; otherwise each token gets the episode advantage."""
    needs_planning: bool = False
    """Run the planning detector; otherwise no token counts as planning."""
    uses_sepa_controller: bool = False
    """Let the SEPA schedule choose `sepa_lambda`; otherwise it is 0."""
    entropy_transform: EntropyTransform | None = None
    """Changes the entropies of one completion before GTPO."""
    apply_hicra: bool = False
    """Amplify planning tokens after GTPO."""
    batch_entropy_transform: BatchEntropyTransform | None = None
    """The same step for all completions at once, for speed; takes the place of `entropy_transform`."""
    token_transform: TokenTransform | None = None
    """Computes token advantages itself; the GTPO and HICRA fields are then unused."""


NONE = TransformSpec("none", use_gtpo=False)
"""Every token gets its completion's advantage."""

GTPO = TransformSpec("gtpo")
"""Uncertain tokens get more."""

GTPO_HICRA = TransformSpec("gtpo_hicra", needs_planning=True, apply_hicra=True)
"""GTPO, then planning tokens amplified."""

GTPO_SEPA = TransformSpec(
    "gtpo_sepa", needs_planning=True, uses_sepa_controller=True, batch_entropy_transform=sepa_pool
)
"""GTPO on uncertainties, with those of execution tokens pooled by the SEPA schedule."""


Params = Mapping[str, object]


@dataclass(frozen=True)
class Choice:
    """The configured names and parameters of a method."""

    advantage_mode: str = "maxrl"
    transform_mode: str = "gtpo_sepa"
    algorithm_mode: str = ""
    uncertainty_kind: str = "surprisal"
    advantage_params: Params = field(default_factory=dict)
    transform_params: Params = field(default_factory=dict)
    gtpo_beta: float = 0.1
    hicra_alpha: float = 0.2
    search_paths: Sequence[str] = ()


@dataclass(frozen=True)
class Method:
    """A choice with its functions loaded. With an `algorithm`, `advantage` and `transform` are unused."""

    choice: Choice
    advantage: AdvantageFn
    transform: TransformSpec
    algorithm: AlgorithmFn | None
    uncertainty: Uncertainty

    @property
    def needs_planning(self) -> bool:
        """Whether planning masks are used. An algorithm plugin always gets them."""
        return self.algorithm is not None or self.transform.needs_planning

    @property
    def uses_sepa(self) -> bool:
        """Whether the SEPA schedule is used. An algorithm plugin always gets its lambda."""
        return self.algorithm is not None or self.transform.uses_sepa_controller


def load_method(choice: Choice) -> Method:
    """Load the functions of a choice; raises for a missing or invalid one."""
    uncertainty = load_uncertainty(choice)
    if choice.algorithm_mode:
        return Method(choice, grpo, NONE, load_algorithm(choice), uncertainty)
    return Method(choice, load_advantage(choice), load_transform(choice), None, uncertainty)


def load_advantage(choice: Choice) -> AdvantageFn:
    """The episode advantage, with `[algorithm.advantage_params]` bound."""
    name, params = choice.advantage_mode, choice.advantage_params
    function = _load_function("advantage", name, choice.search_paths)
    if not _takes(function, 1, params):
        if _takes(function, 1, {}):
            raise ConfigError(
                f"[algorithm.advantage_params] advantage {name!r} does not take {_listed(params)}. "
                f"It takes: {_keywords(function, 1)}."
            )
        raise PluginError(
            f"advantage plugin {name!r} must be callable as f(rewards_G{''.join(f', {key}=…' for key in params)}), "
            f"but its signature is {_signature(function)}.  Try: give other parameters in [algorithm.advantage_params]"
        )
    return cast(AdvantageFn, partial(function, **params)) if params else cast(AdvantageFn, function)


def load_transform(choice: Choice) -> TransformSpec:
    """The token transform: a TransformSpec, a factory of one, or a function of a context."""
    name, params = choice.transform_mode, choice.transform_params
    found = REGISTRIES["transform"].load(name, choice.search_paths)
    if isinstance(found, TransformSpec):
        if params:
            raise ConfigError(
                f"[algorithm.transform_params] transform {name!r} takes no parameters, got {_listed(params)}."
            )
        return found
    if not callable(found):
        raise PluginError(
            f"transform plugin {name!r} is {type(found).__name__}, not a TransformSpec, a function that returns one, "
            "or a function of a TransformContext."
        )
    if _takes(found, 0, params):
        return _call_factory(name, found, params)
    if _takes(found, 0, {}):
        raise ConfigError(
            f"[algorithm.transform_params] transform {name!r} does not take {_listed(params)}. "
            f"It takes: {_keywords(found, 0)}."
        )
    if not _takes(found, 1, {}) and not _takes(found, 1, params):
        raise PluginError(
            f"transform plugin {name!r} has the signature {_signature(found)}. "
            "Try: f() returning a TransformSpec, or f(context) returning token advantages."
        )
    bound = cast(TokenTransform, _with_accepted(found, params))
    return TransformSpec(name, use_gtpo=False, needs_planning=True, uses_sepa_controller=True, token_transform=bound)


def load_algorithm(choice: Choice) -> AlgorithmFn:
    """The function that replaces the pipeline."""
    name = choice.algorithm_mode
    function = _load_function("algorithm", name, choice.search_paths)
    bound = _with_accepted(function, choice.transform_params)
    if not _takes(bound, 1, {}):
        raise PluginError(
            f"algorithm plugin {name!r} must be callable as f(context), but its signature is {_signature(function)}."
        )
    return cast(AlgorithmFn, bound)


def load_uncertainty(choice: Choice) -> Uncertainty:
    """The uncertainty; a plain function is assumed not to need true entropies."""
    name = choice.uncertainty_kind
    found = REGISTRIES["uncertainty"].load(name, choice.search_paths)
    if isinstance(found, Uncertainty):
        return found
    function = _load_function("uncertainty", name, choice.search_paths)
    if not _takes(function, 1, {}):
        raise PluginError(
            f"uncertainty plugin {name!r} must be callable as f(context), but its signature is {_signature(function)}."
        )
    return Uncertainty(name, cast(UncertaintyFn, function))


def _call_factory(name: str, factory: Callable[..., object], params: Params) -> TransformSpec:
    try:
        spec = factory(**params)
    except (Exception, SystemExit) as error:
        raise PluginError(f"transform plugin {name!r} raised {error!r} when asked for its TransformSpec.") from error
    if not isinstance(spec, TransformSpec):
        raise PluginError(
            f"transform plugin {name!r} returned {type(spec).__name__} instead of a TransformSpec. "
            "Try: give it one parameter, the context, if it returns token advantages."
        )
    return spec


def _load_function(kind: str, name: str, search_paths: Sequence[str]) -> Callable[..., object]:
    found = REGISTRIES[kind].load(name, search_paths)
    if not callable(found):
        raise PluginError(f"{kind} plugin {name!r} is {type(found).__name__}, not a function.")
    return found


def _takes(function: Callable[..., object], positional: int, keywords: Params) -> bool:
    """Whether a call with these arguments would bind."""
    try:
        _signature(function).bind(*([None] * positional), **keywords)
    except TypeError:
        return False
    return True


def _with_accepted(function: Callable[..., object], params: Params) -> Callable[..., object]:
    """Bind the params that the function accepts; the rest are in `context.params`."""
    parameters = _signature(function).parameters.values()
    named = {one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters)
    accepted = {key: value for key, value in params.items() if takes_all or key in named}
    return partial(function, **accepted) if accepted else function


def _signature(function: Callable[..., object]) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except ValueError:
        # Functions written in C may have no signature; they are assumed to take one array.
        return inspect.Signature([inspect.Parameter("values", inspect.Parameter.POSITIONAL_ONLY)])


def _keywords(function: Callable[..., object], positional: int) -> str:
    return ", ".join(list(_signature(function).parameters)[positional:]) or "nothing"


def _listed(params: Params) -> str:
    return ", ".join(repr(key) for key in params)
