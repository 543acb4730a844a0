"""Building blocks of the parser: numbers from digits, and arithmetic on nodes."""

from __future__ import annotations

import re
from fractions import Fraction

from retrain.rewards.answers.nodes import Group, Matrix, Node, Number, Operation, is_plain, split_signs
from retrain.rewards.answers.tokens import Unreadable

_NUMBER = re.compile(
    r"(\d*)\.?(\d*)(?:\\(?:overline|bar|dot)\s*\{?\s*(\d+)\s*\}?|\((\d+)\))?(\\ldots)?(?:[eE]([+-]?\d+))?"
)
_LARGEST_EXPONENT = 5000


def read_number(text: str) -> Number:
    """The exact value of a number literal."""
    found = _NUMBER.fullmatch(text)
    if found is None:
        raise Unreadable(f"{text!r} is not a number")
    whole, digits, exponent = found[1], found[2], int(found[6] or 0)
    if abs(exponent) > _LARGEST_EXPONENT:
        raise Unreadable("an exponent too large")
    repeated = found[3] or found[4] or ""
    if found[5]:  # `0.333…`: the last digit repeats if it was written three times
        if len(digits) < 3 or len(set(digits[-3:])) != 1:
            raise Unreadable("an ambiguous repeating decimal")
        repeated = digits[-1]
    value = Fraction(int((whole + digits) or 0), 10 ** len(digits))
    if repeated:
        value += Fraction(int(repeated), (10 ** len(repeated) - 1) * 10 ** len(digits))
    places = len(digits) if "." in text and not repeated else -1
    return Number(value * Fraction(10) ** exponent, places if exponent == 0 else -1)


def flatten(item: Node) -> tuple[Node, ...]:
    """Both values of a `±`, and the entries of nested lists."""
    return tuple(part for node in split_signs(item) for part in _entries(node))


def _entries(node: Node) -> tuple[Node, ...]:
    return node.items if isinstance(node, Group) and node.brackets == "," else (node,)


def is_whole(node: Node) -> bool:
    """Whether it is an integer literal, possibly negative."""
    if isinstance(node, Operation) and node.name == "neg":
        node = node.parts[0]
    return isinstance(node, Number) and node.value.denominator == 1 and node.places < 0


def is_proper(node: Node) -> bool:
    """Whether it is a proper fraction of two integers."""
    if not (isinstance(node, Operation) and node.name == "div"):
        return False
    top, bottom = node.parts
    return isinstance(top, Number) and isinstance(bottom, Number) and 0 < top.value < bottom.value


def mix(value: Node, fraction: Node) -> Node:
    """A mixed number."""
    negative = value.value < 0 if isinstance(value, Number) else isinstance(value, Operation) and value.name == "neg"
    return Operation("sub" if negative else "add", (value, fraction))


def _broadcast(name: str, node: Node, factor: tuple[Node, ...]) -> Node:
    """Apply an operation with a scalar to each entry of a tuple or a matrix."""
    if isinstance(node, Group) and node.brackets in ("()",):
        return Group("()", tuple(_broadcast(name, item, factor) for item in node.items))
    if isinstance(node, Matrix):
        return Matrix(tuple(tuple(_broadcast(name, item, factor) for item in row) for row in node.rows))
    return operate(name, node, *factor)


def negate(value: Node) -> Node:
    """The negation."""
    if isinstance(value, Number):
        return Number(-value.value, value.places)
    return _broadcast("neg", value, ())


def operate(name: str, *parts: Node) -> Node:
    """An operation on expressions; Unreadable on anything else."""
    if not all(map(is_plain, parts)):
        raise Unreadable(f"{name} of something that is not an expression")
    return Operation(name, parts)


def combine(name: str, one: Node, other: Node) -> Node:
    """The sum or difference; tuples and matrices of the same shape are added elementwise."""
    if is_plain(one) and is_plain(other):
        return Operation(name, (one, other))
    match one, other:
        case Group("()", first), Group("()", second) if len(first) == len(second):
            return Group("()", tuple(combine(name, *pair) for pair in zip(first, second, strict=True)))
        case Matrix(first), Matrix(second) if [len(row) for row in first] == [len(row) for row in second]:
            rows = zip(first, second, strict=True)
            return Matrix(tuple(tuple(combine(name, *pair) for pair in zip(*row, strict=True)) for row in rows))
    raise Unreadable("a sum of incompatible values")


def multiply(one: Node, other: Node) -> Node:
    """The product; a scalar is broadcast over tuples and matrices."""
    if is_plain(one):
        return Operation("mul", (one, other)) if is_plain(other) else _broadcast("mul", other, (one,))
    if is_plain(other):
        return _broadcast("mul", one, (other,))
    raise Unreadable("a product of two collections")


def divide(one: Node, other: Node) -> Node:
    """The quotient by an expression."""
    if not is_plain(other):
        raise Unreadable("division by a collection")
    return _broadcast("div", one, (other,))
