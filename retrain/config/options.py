"""The options of the schema as a flat list: what flags, messages, docs and starter files are made from."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from retrain.config.declare import Section
from retrain.config.schema import TrainConfig


@dataclass(frozen=True)
class Option:
    """One option as declared in the schema."""

    section: str
    key: str
    flag: str
    kind: str
    """Name of the registry that its value is looked up in, or ""."""
    field: FieldInfo

    @property
    def where(self) -> str:
        """How messages and docs call it."""
        return f"[{self.section}] {self.key}"

    @property
    def path(self) -> str:
        """How overrides call it."""
        return f"{self.section}.{self.key}"

    @property
    def default(self) -> Any:
        """The value it has when nobody sets it."""
        return self.field.get_default(call_default_factory=True)

    @property
    def description(self) -> str:
        """The sentence that explains it."""
        return self.field.description or ""

    @property
    def choices(self) -> tuple[Any, ...]:
        """The only values it takes, or () when it is open."""
        return get_args(self.field.annotation) if get_origin(self.field.annotation) is Literal else ()

    @property
    def type_name(self) -> str:
        """Its type in the words of a TOML user."""
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
        """The keys that each table of a list may hold, or () when they are open."""
        elements = [
            arg for arg in get_args(self.field.annotation) if isinstance(arg, type) and issubclass(arg, Section)
        ]
        return tuple(elements[0].model_fields) if elements else ()


def section_type(name: str) -> type[Section]:
    """The model of a table, also of one that is absent by default."""
    annotation = TrainConfig.model_fields[name].annotation
    candidates = [annotation, *get_args(annotation)]
    return next(found for found in candidates if isinstance(found, type) and issubclass(found, Section))


OPTIONAL_SECTIONS = tuple(
    name for name, field in TrainConfig.model_fields.items() if field.default is None and not field.default_factory
)


@cache
def all_options() -> tuple[Option, ...]:
    """Every option, in the order of the schema."""
    fields = [
        (section, field.alias or name, field)
        for section in TrainConfig.model_fields
        for name, field in section_type(section).model_fields.items()
    ]
    uses = Counter(key for _, key, _ in fields)
    options = []
    for section, key, field in fields:
        extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        leaf = key if uses[key] == 1 else f"{section}_{key}"
        flag = str(extra.get("flag", "")) or "--" + leaf.replace("_", "-")
        options.append(Option(section, key, flag, str(extra.get("kind", "")), field))
    return tuple(options)


@cache
def options_by_path() -> dict[str, Option]:
    """Options by `section.key`."""
    return {option.path: option for option in all_options()}
