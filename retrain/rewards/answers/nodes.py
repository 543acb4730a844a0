"""The syntax tree of an answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction

from retrain.rewards.answers.units import Unit


@dataclass(frozen=True, slots=True)
class Number:
    """An exact number; `places` is the number of decimal places, -1 if it is not a decimal."""

    value: Fraction
    places: int = -1


@dataclass(frozen=True, slots=True)
class Symbol:
    """A variable, or a constant such as `pi`."""

    name: str


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation or function by name, and its arguments."""

    name: str
    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """Several entries: `()`, `[)` and so on for tuples and intervals, `{}` a set, `,` a bare list, `U` a union."""

    brackets: str
    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix by its rows."""

    rows: tuple[tuple[Node, ...], ...]


@dataclass(frozen=True, slots=True)
class Relation:
    """A chain such as `1 < x < 2`: one sign fewer than sides."""

    signs: tuple[str, ...]
    sides: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Quantity:
    """A value with a unit."""

    value: Node
    unit: Unit


@dataclass(frozen=True, slots=True)
class Words:
    """Plain words."""

    text: str


Node = Number | Symbol | Operation | Group | Matrix | Relation | Quantity | Words

CONSTANTS = frozenset({"pi", "e", "i", "infinity"})
PLUS_MINUS = ("pm", "mp")


def children(node: Node) -> tuple[Node, ...]:
    """The direct children of a node."""
    match node:
        case Operation(_, parts) | Group(_, parts) | Relation(_, parts):
            return parts
        case Matrix(rows):
            return tuple(entry for row in rows for entry in row)
        case Quantity(value, _):
            return (value,)
    return ()


def walk(node: Node) -> Iterator[Node]:
    """The node and all its descendants."""
    waiting = [node]
    while waiting:
        current = waiting.pop()
        yield current
        waiting.extend(children(current))


def variables(node: Node) -> frozenset[str]:
    """Names of the variables in a node."""
    return frozenset(part.name for part in walk(node) if isinstance(part, Symbol)) - CONSTANTS


def rebuild(node: Node, change: Callable[[Node], Node]) -> Node:
    """The node with `change` applied to each child."""
    match node:
        case Operation(name, parts):
            return Operation(name, tuple(map(change, parts)))
        case Group(brackets, items):
            return Group(brackets, tuple(map(change, items)))
        case Matrix(rows):
            return Matrix(tuple(tuple(map(change, row)) for row in rows))
        case Relation(signs, sides):
            return Relation(signs, tuple(map(change, sides)))
        case Quantity(value, unit):
            return Quantity(change(value), unit)
    return node


def is_plain(node: Node) -> bool:
    """Whether it is an expression: a number, a symbol or an operation."""
    return isinstance(node, Number | Symbol | Operation)


def split_signs(node: Node) -> tuple[Node, ...]:
    """Both values of `±`, or the node itself if it has none. All signs of an answer vary together."""
    if not any(isinstance(part, Operation) and part.name in PLUS_MINUS for part in walk(node)):
        return (node,)

    def choose(part: Node, sign: str) -> Node:
        part = rebuild(part, lambda inner: choose(inner, sign))
        if isinstance(part, Operation) and part.name in PLUS_MINUS:
            return Operation("add" if part.name == sign else "sub", part.parts)
        return part

    return tuple(choose(node, sign) for sign in PLUS_MINUS)
