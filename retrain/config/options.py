"""The options of the schema as a flat list, each with its facets.

Flags, messages, docs and starter files are generated from it; the rules for resuming, campaigns and Tinker are lookups
in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from keyword import iskeyword
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from retrain.config.declare import IGNORED, Facets, Section
from retrain.config.schema import TrainConfig
from retrain.errors import ConfigIssue


@dataclass(frozen=True)
class Option:
    """One option as declared in the schema."""

    section: str
    key: str
    flag: str
    facets: Facets
    field: FieldInfo

    @property
    def kind(self) -> str:
        """Plugin registry that its value is looked up in, or ""."""
        return self.facets.kind or ""

    @property
    def where(self) -> str:
        """Its name in messages and docs."""
        return f"[{self.section}] {self.key}"

    @property
    def path(self) -> str:
        """Its name in overrides."""
        return f"{self.section}.{self.key}"

    @property
    def attribute(self) -> str:
        """Its name in the table's class, as `from_` for `from`."""
        return f"{self.key}_" if iskeyword(self.key) else self.key

    @property
    def default(self) -> Any:
        """Its default value."""
        return self.field.get_default(call_default_factory=True)

    @property
    def description(self) -> str:
        """One sentence about it."""
        return self.field.description or ""

    @property
    def choices(self) -> tuple[object, ...]:
        """The values it accepts, or () if any value of its type."""
        return get_args(self.field.annotation) if get_origin(self.field.annotation) is Literal else ()

    @property
    def type_name(self) -> str:
        """Its type, as docs and help name it."""
        annotation = self.field.annotation
        if self.choices:
            return " or ".join(dict.fromkeys(type(choice).__name__ for choice in self.choices))
        if get_origin(annotation) is tuple:
            element = get_args(annotation)[0]
            element = element.__origin__ if get_origin(element) is Annotated else element
            return f"list[{element.__name__}]" if element in (int, str) else "list of tables"
        return "table" if get_origin(annotation) is dict else str(annotation.__name__) if annotation else "any"

    @property
    def element_keys(self) -> tuple[str, ...]:
        """Keys that each table of a list may have, or () if any."""
        elements = [
            arg for arg in get_args(self.field.annotation) if isinstance(arg, type) and issubclass(arg, Section)
        ]
        return tuple(elements[0].model_fields) if elements else ()


def section_type(name: str) -> type[Section]:
    """The class of a table, also of one that is absent by default."""
    annotation = TrainConfig.model_fields[name].annotation
    candidates = [annotation, *get_args(annotation)]
    return next(found for found in candidates if isinstance(found, type) and issubclass(found, Section))


OPTIONAL_SECTIONS = tuple(
    name for name, field in TrainConfig.model_fields.items() if field.default is None and not field.default_factory
)


@cache
def all_options() -> tuple[Option, ...]:
    """All options, in the order of the schema."""
    fields = [
        (section, field.alias or name, field)
        for section in TrainConfig.model_fields
        for name, field in section_type(section).model_fields.items()
    ]
    uses = Counter(key for _, key, _ in fields)
    options = []
    for section, key, field in fields:
        assert isinstance(field.json_schema_extra, Facets), f"[{section}] {key} is not declared by option(...)"
        facets = field.json_schema_extra.over(section_type(section).facets)
        leaf = key if uses[key] == 1 and not facets.prefixed else f"{section}_{key}"
        options.append(Option(section, key, facets.flag or "--" + leaf.replace("_", "-"), facets, field))
    return tuple(options)


@cache
def options_by_path() -> dict[str, Option]:
    """Options by `section.key`."""
    return {option.path: option for option in all_options()}


def values_of(config: TrainConfig) -> dict[str, Any]:
    """The value of each option by `section.key`; tables that are absent are left out."""
    tables = config.model_dump(by_alias=True)
    return {path: tables[o.section][o.key] for path, o in options_by_path().items() if tables[o.section] is not None}


def replace_values(config: TrainConfig, values: Mapping[str, object]) -> TrainConfig:
    """The configuration with other values, by `section.key`; they are not validated."""
    changes: dict[str, dict[str, object]] = {}
    for path, value in values.items():
        option = options_by_path()[path]
        changes.setdefault(option.section, {})[option.attribute] = value
    tables = {name: getattr(config, name).model_copy(update=update) for name, update in changes.items()}
    return config.model_copy(update=tables)


@cache
def paths_where(facet: str) -> frozenset[str]:
    """The options, by `section.key`, for which a yes-or-no facet holds."""
    return frozenset(option.path for option in all_options() if getattr(option.facets, facet))


@cache
def replaced_paths(kind: str) -> dict[str, str]:
    """Options that a campaign or a squeeze has under the same name in its own table, and those that replace them."""
    home = {"campaign": "training", "squeeze": "backend"}.get(kind, "")
    pairs = ((f"{home}.{option.key}", option.path) for option in all_options() if option.section == kind)
    return {path: replacement for path, replacement in pairs if path in options_by_path()}


def resolve_flags(given: Iterable[str], kind: str) -> dict[str, str]:
    """The option that each flag sets: in the file of a campaign, `training.max_steps` is `campaign.max_steps`."""
    paths = {path: replaced_paths(kind).get(path, path) for path in given}
    # Both may be given; then each sets its own.
    return {path: path if meant in paths else meant for path, meant in paths.items()}


def condition_overrides(condition: Mapping[str, object]) -> Iterator[tuple[str, Any]]:
    """A condition as `section.key` overrides; a bare key belongs to the first table that has it."""
    homes = {option.key: option.path for option in reversed(all_options())}
    for key, value in condition.items():
        # `model` and `backend` are tables as well as options; neither option takes a table.
        if isinstance(value, Mapping) and (key in TrainConfig.model_fields or key not in homes):
            yield from ((f"{key}.{inner}", item) for inner, item in value.items())
        else:
            yield homes.get(key, key), value


def namesakes(option: Option) -> list[Option]:
    """The options that a condition may set and that have the same key, itself among them."""
    return [
        other
        for other in all_options()
        if other.key == option.key
        and other.section not in OPTIONAL_SECTIONS
        and other.facets.per_condition is not False
    ]


def name_in_condition(option: Option) -> str:
    """How a condition sets an option: by its key, or in its table if the key alone might mean another."""
    is_clear = len(namesakes(option)) == 1 or option.flag == f"--{option.key.replace('_', '-')}"
    return option.key if is_clear else f"{option.section} = {{ {option.key} = ... }}"


@cache
def free_on_resume() -> frozenset[str]:
    """Options that a resumed run may change, by `section.key`."""
    return frozenset(option.path for option in all_options() if option.facets.on_resume == "free")


def ignored_on_tinker(option: Option) -> bool:
    """Whether an option has no effect with the tinker backend."""
    return option.facets.on_tinker == IGNORED


def rejected_on_tinker(option: Option) -> str:
    """Why the tinker backend rejects a value other than the default, or ""."""
    return "" if ignored_on_tinker(option) else option.facets.on_tinker or ""


def option_issue(path: str, text: str, hint: str = "", compares: tuple[str, ...] = ()) -> ConfigIssue:
    """An issue with one option; `compares` names the tables whose options it compares with each other."""
    return ConfigIssue(options_by_path()[path].where, text, hint, compares)
