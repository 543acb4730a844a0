"""What options are declared with."""

import json
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidatorFunctionWrapHandler
from pydantic.config import JsonDict
from pydantic_core import PydanticKnownError

from retrain.config.toml import MAX_DEPTH, is_too_deep

Table = dict[str, Any]

# A 64-bit signed integer is the widest that TOML guarantees; numpy and torch seeds fit well inside it.
LARGEST_COUNT = 2**53


def _fits(value: int) -> int:
    if value > LARGEST_COUNT:
        raise PydanticKnownError("less_than_equal", {"le": LARGEST_COUNT})
    return value


# Not Field(le=...), which would take the place of an option's own bound.
Count = Annotated[int, AfterValidator(_fits)]


class Section(BaseModel):
    """One TOML table: frozen, strict, and closed to keys it does not know."""

    # defer_build: the first use of TrainConfig builds all tables at once, which halves the time to import this page.
    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", allow_inf_nan=False, populate_by_name=True, defer_build=True
    )


def option(default: Any, description: str, *, flag: str = "", kind: str = "", **bounds: Any) -> Any:
    """Declare an option. `kind` names the registry its value is looked up in; `flag` overrides the derived spelling."""
    extra: JsonDict = {key: value for key, value in (("flag", flag), ("kind", kind)) if value}
    if isinstance(default, dict | list):
        return Field(default_factory=lambda: default.copy(), description=description, json_schema_extra=extra, **bounds)
    return Field(default, description=description, json_schema_extra=extra, **bounds)


# Far more brackets left open than any table has.
_HOPELESS_DEPTH = 500


def table_or_json(value: object) -> object:
    """Seed files may give a table as a JSON string; anything else is left for the type check to judge."""
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


def whole_number(value: object, choose: ValidatorFunctionWrapHandler) -> object:
    """A choice among integers compares with ==, to which true and 1.0 are 1."""
    if type(value) is not int:
        raise ValueError("must be a whole number")
    return choose(value)
