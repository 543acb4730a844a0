"""How options are declared: the base class of tables, and `option` with the facts about one option."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic.config import JsonDict
from pydantic_core import PydanticKnownError

from retrain.config.toml import MAX_DEPTH, is_too_deep
from retrain.plugins import REGISTRIES

if TYPE_CHECKING:
    from retrain.config.schema import TrainConfig

Table = dict[str, Any]

# TOML guarantees 64-bit signed integers; up to 2**53 they are also exact as JSON numbers and floats.
LARGEST_INTEGER = 2**53


def _check_size(value: int) -> int:
    if value > LARGEST_INTEGER:
        raise PydanticKnownError("less_than_equal", {"le": LARGEST_INTEGER})
    return value


# Not Field(le=...), which would replace the bound of the option.
BoundedInt = Annotated[int, AfterValidator(_check_size)]

Reason = Callable[["TrainConfig"], str]
"""Why an option has no effect under a configuration; "" if it has one."""
IGNORED = "ignored"
"""`on_tinker` of an option that has no effect there; any other text is the reason why it is rejected."""


@dataclass(frozen=True)
class Facets:
    """Facts about an option besides its type, default, bounds and description.

    None takes the value of its table. Unless either says otherwise, an option has an effect in every run and campaign,
    is fixed on resume, may differ per condition, cannot be changed in a replay, and works on Tinker.
    """

    flag: str | None = None
    """Command-line flag, where it is not derived from the key."""
    prefixed: bool | None = None
    """Whether the name of its table comes first in its flag, even if no other table has the key."""
    synonyms: tuple[str, ...] | None = None
    """Its names in other tools, to suggest this option for; `table.key` for a name in that table only."""
    kind: str | None = None
    """Plugin registry that its value is looked up in."""
    package: str | Mapping[str, str] | None = None
    """Package that every value but the default needs, or those of some choices; components declare theirs in the
    registry."""
    unused: Reason | None = None
    """Why it has no effect on a run; a note is printed if it is set nevertheless."""
    in_campaign: Reason | None = None
    """Why it has no effect in the file of a campaign."""
    per_condition: bool | None = None
    """Whether conditions of a campaign may override it."""
    on_resume: Literal["fixed", "free"] | None = None
    """Whether a resumed run may change it: how long, where and how fast, but not what is learned."""
    on_tinker: str | None = None
    """"" works on Tinker as it does locally; see `IGNORED`."""
    unsupported: Mapping[str, str] | None = None
    """Choices that the pytorch engine does not implement, each with the reason."""
    shared_model: bool | None = None
    """Whether runs must agree on it to share one model in memory."""
    held_out: bool | None = None
    """Whether evaluations must agree on it to be comparable."""
    step_time: bool | None = None
    """Whether the time per step depends on it."""
    identity: bool | None = None
    """Whether it names one run rather than its method: seed, folders, run names."""
    path: Literal["as_given", "absolute", "or_id"] | None = None
    """Set for a path: whether a run saves it as given or made absolute; `or_id` may also be the id of a model."""
    replay: bool | None = None
    """Whether `retrain replay` may change it, since it affects credit assignment alone."""
    multi_process: str | None = None
    """Why runs on several processes support its default only."""
    variables: Mapping[str, bool] | None = None
    """Variables of a template, and whether it must contain them."""

    def __call__(self, schema: JsonDict) -> None:
        """Pydantic calls this for the JSON schema, to which the facets add nothing."""

    def over(self, table: "Facets") -> "Facets":
        """These facts, completed by those of the table."""
        missing = {each.name for each in fields(self) if getattr(self, each.name) is None}
        return replace(self, **{name: getattr(table, name) for name in missing})


class Section(BaseModel):
    """One TOML table: frozen, strict, and closed to unknown keys."""

    # defer_build: the first use of TrainConfig builds all tables at once, which halves the import time.
    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", allow_inf_nan=False, populate_by_name=True, defer_build=True
    )
    facets: ClassVar[Facets] = Facets()
    """Facts about every option of the table that does not declare its own."""


_READERS = re.compile(r"\{(\w+)\.(\w+) (and|or)\}")


def _list_readers(found: re.Match[str]) -> str:
    *others, last = REGISTRIES[found[1]].readers(found[2])
    return f"{', '.join(others)} {found[3]} {last}" if others else last


def option(default: Any, description: str, **settings: Any) -> Any:
    """Declare an option: its default, one sentence, and as keywords its facets and pydantic's bounds.

    In the sentence, `{names}` stands for the built-in components of its `kind`, and `{data.path or}` for the data
    sources that read `path`, joined by "or"; the other word is `and`.
    """
    kind = settings.get("kind")
    if kind:
        description = description.format(names=", ".join(REGISTRIES[kind].builtins))
    description = _READERS.sub(_list_readers, description)
    extra = Facets(**{each.name: settings.pop(each.name, None) for each in fields(Facets)})
    if isinstance(default, dict | list):
        return Field(
            default_factory=lambda: default.copy(), description=description, json_schema_extra=extra, **settings
        )
    return Field(default, description=description, json_schema_extra=extra, **settings)


# Far more open brackets than any table has.
_HOPELESS_DEPTH = 500


def table_or_json(value: object) -> object:
    """Parse a table given as a JSON string; the type check handles any other value."""
    if not isinstance(value, str):
        return value
    try:
        table = json.loads(value) if value.strip() else {}
    except json.JSONDecodeError as error:
        # Python 3.13 parses thousands of levels before it gives up, so there is no RecursionError.
        read = value[: error.pos]
        if sum(map(read.count, "[{")) - sum(map(read.count, "]}")) > _HOPELESS_DEPTH:
            raise ValueError("is nested too deeply") from error
        raise ValueError(f"is not valid JSON ({error.msg} at character {error.pos})") from error
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error
    except ValueError as error:
        raise ValueError("holds a number that is too large") from error
    if is_too_deep(table):
        raise ValueError(f"is nested more than {MAX_DEPTH} levels deep")
    return table
