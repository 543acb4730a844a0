"""Generated option values, derived from the types and bounds that the schema declares."""

from __future__ import annotations

import datetime
from typing import Annotated, Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from hypothesis import strategies as st
from pydantic.fields import FieldInfo

from retrain.config.declare import LARGEST_INTEGER
from retrain.config.options import OPTIONAL_SECTIONS, Option, all_options
from retrain.config.schema import RewardTerm
from retrain.plugins import REGISTRIES

# Everything but lone surrogates, which are no text; control characters and DEL are in.
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    ["\x00\x1f\x7f\x85", "\"\\'\n\t", "𝔘é"]
)
offsets = st.integers(-23 * 60, 23 * 60).map(lambda minutes: datetime.timezone(datetime.timedelta(minutes=minutes)))
dates = st.datetimes(timezones=st.none() | offsets) | st.dates() | st.times()
scalars = st.one_of(
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False),
    texts,
    dates,
)
tables = st.dictionaries(
    texts,
    st.recursive(
        scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=6
    ),
    max_size=4,
)


def values_for(option: Option) -> st.SearchStrategy[Any]:
    """Values that the option takes on its own; rules across options are not considered."""
    if option.kind:
        return st.sampled_from(
            [option.default, *REGISTRIES[option.kind].builtins, "my_package.part", "my_package:part"]
        )
    if option.key == "devices":
        return st.sampled_from(["auto", "cpu", "gpu:0", "gpu:0,gpu:1"])
    return _of_type(option.field.annotation, _metadata(option.field))


def _metadata(field: FieldInfo) -> list[Any]:
    return list(field.metadata)


def _of_type(annotation: Any, metadata: list[Any]) -> st.SearchStrategy[Any]:
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *more = get_args(annotation)
        return _of_type(inner, [*(rule for item in more for rule in _rules(item)), *metadata])
    if origin is Literal:
        return st.sampled_from(get_args(annotation))
    if origin is tuple:
        least = max((rule.min_length for rule in metadata if isinstance(rule, MinLen)), default=0)
        return st.lists(_of_type(get_args(annotation)[0], []), min_size=least, max_size=4).map(tuple)
    if origin is dict:
        return tables
    if annotation is RewardTerm:
        return st.builds(RewardTerm, type=st.sampled_from(["match", "math"]), weight=st.floats(-9, 9))
    if annotation is bool:
        return st.booleans()
    if annotation is str:
        least = max((rule.min_length for rule in metadata if isinstance(rule, MinLen)), default=0)
        return texts.filter(lambda text: len(text) >= least)
    return _number(annotation, metadata)


def _rules(item: Any) -> list[Any]:
    return _metadata(item) if isinstance(item, FieldInfo) else [item]


def _number(annotation: type, metadata: list[Any]) -> st.SearchStrategy[Any]:
    low = max(
        [rule.ge for rule in metadata if isinstance(rule, Ge)] + [r.gt for r in metadata if isinstance(r, Gt)]
        or [-1e300]
    )
    high = min(
        [rule.le for rule in metadata if isinstance(rule, Le)] + [r.lt for r in metadata if isinstance(r, Lt)]
        or [1e300]
    )
    if annotation is int:
        return st.integers(max(int(low), -LARGEST_INTEGER), min(int(high), LARGEST_INTEGER))
    return st.floats(
        float(low),
        float(high),
        exclude_min=any(isinstance(rule, Gt) for rule in metadata),
        exclude_max=any(isinstance(rule, Lt) for rule in metadata),
    )


@st.composite
def sections(draw: st.DrawFn, most: int) -> dict[str, dict[str, Any]]:
    """Some options of some tables, by section and field name."""
    wanted = draw(st.lists(st.sampled_from(all_options()), max_size=most, unique_by=lambda option: option.path))
    chosen: dict[str, dict[str, Any]] = {name: {} for name in draw(st.sets(st.sampled_from(OPTIONAL_SECTIONS)))}
    for option in wanted:
        chosen.setdefault(option.section, {})[option.key] = draw(values_for(option))
    return chosen
