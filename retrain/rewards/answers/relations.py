"""Equations and inequalities: their values, intervals and equivalence."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise

from retrain.rewards.answers.nodes import (
    CONSTANTS,
    Group,
    Node,
    Number,
    Operation,
    Quantity,
    Relation,
    Symbol,
    Words,
    is_plain,
    rebuild,
    variables,
)
from retrain.rewards.answers.values import Value, equal_expressions, evaluate, is_real, sample_points, values_agree

Equal = Callable[[Node, Node], bool]

_MIRRORED = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}
_INFINITY = Symbol("infinity")
_FUNCTIONS = tuple(Symbol(name) for name in "fghFGHpPqQ")
_ZERO, _ONE, _TWO = (Number(Fraction(n)) for n in range(3))


def is_name(node: Node) -> bool:
    """Whether a side only names the other side: `x`, `f(x)`, `AB`, words, or a tuple of these."""
    match node:
        case Words():
            return True
        case Symbol(name):
            return name not in CONSTANTS
        case Operation("mul", (first, _)):
            return is_name(first)
        case Operation("pow", (first, Number(value, _))):
            return value == -1 and is_name(first)
        case Group("()", items):
            return all(map(is_name, items))
    return False


def is_inequality(node: Node) -> bool:
    """Whether it is a chain of `<`, `>`, `≤` and `≥`."""
    return isinstance(node, Relation) and set(node.signs) <= set(_MIRRORED)


def side_values(chain: Relation, equal: Equal) -> list[Node]:
    """The values that a chain such as `x = 2 + 3 = 5` states; none when it contradicts itself."""
    fixed: list[Node] = [side for side in chain.sides if not variables(side) and not isinstance(side, Words)]
    if fixed:
        if "~" in chain.signs:
            return fixed if all(_close(one, other) for one, other in pairwise(fixed)) else []
        agreed = all(equal(one, other) for one, other in pairwise(fixed))
        # All are equal, but maybe in different units: 0.56 = 56%.
        return fixed if agreed else []
    stated = [side for side in chain.sides if not is_name(side)] or [chain.sides[-1]]
    agreed = all(equal(one, other) for one, other in pairwise(stated))
    return stated[-1:] if agreed and "~" not in chain.signs else []


def _close(one: Node, other: Node) -> bool:
    """Whether one side of `≈` rounds the other: the difference is at most one unit of the coarser last digit."""
    values_only = (side.value if isinstance(side, Quantity) else side for side in (one, other))
    numbers = [side for side in values_only if is_plain(side)]
    places = [side.places for side in numbers if isinstance(side, Number) and side.places >= 0]
    if len(numbers) < 2:
        return False
    tolerance = Fraction(1, 10 ** min(places)) if places else Fraction(1, 2)
    try:
        values = [evaluate(side, {}) for side in numbers]
        if all(isinstance(value, Fraction) for value in values):
            return bool(abs(values[0] - values[1]) <= tolerance)
        if not all(isinstance(value, Fraction) or is_real(value) for value in values):
            return False
        return bool(abs(float(values[0].real) - float(values[1].real)) <= float(tolerance))
    except (ArithmeticError, ValueError, RecursionError):
        return False


def equal_equations(answer: Relation, gold: Relation, equal: Equal) -> bool:
    """Whether two equations are equivalent, or assign the same value to different names."""
    ends = [(chain.sides[0], chain.sides[-1]) for chain in (answer, gold)]
    if all(is_plain(side) for pair in ends for side in pair):
        if _equivalent(*(Operation("sub", pair) for pair in ends)):
            # A chain of more than two sides may contradict itself.
            return len(answer.sides) <= 2 or bool(side_values(answer, equal))
        if not _may_name_one(ends[0][0], ends[1][0]):
            return False
    if not all(is_name(pair[0]) for pair in ends):
        return all(equal(*sides) for sides in zip(*ends, strict=True))
    values = side_values(answer, equal)
    return any(equal(value, other) for value in values for other in side_values(gold, equal))


def _may_name_one(one: Node, other: Node) -> bool:
    """Whether two left-hand sides may name the same thing: words and any name, or `y` and `f(x)`."""
    if isinstance(one, Words) or isinstance(other, Words):
        return is_name(one) and is_name(other)
    plain, call = (one, other) if isinstance(one, Symbol) else (other, one)
    function = isinstance(call, Operation) and call.name == "mul" and call.parts[0] in _FUNCTIONS
    return plain == Symbol("y") and function


def _equivalent(one: Node, other: Node) -> bool:
    """Whether `one = 0` and `other = 0` are the same: solved for a variable, or one a multiple of the other."""
    shared = sorted(variables(one) & variables(other))
    if variables(one) != variables(other) or not shared:
        return False
    for name in shared:
        solutions = solve_linear(one, name), solve_linear(other, name)
        if solutions[0] is not None and solutions[1] is not None:
            return equal_expressions(solutions[0], solutions[1])
    return _constant_ratio(one, other)


def _constant_ratio(one: Node, other: Node) -> bool:
    ratios: list[Value] = []
    for point in sample_points(tuple(sorted(variables(one)))):
        try:
            ratios.append(evaluate(Operation("div", (one, other)), point))
        except (ArithmeticError, ValueError, RecursionError):
            continue
    same = all(values_agree(ratios[0], ratio) for ratio in ratios[1:])
    return len(ratios) > 1 and same and ratios[0] != 0


def solve_linear(node: Node, name: str) -> Node | None:
    """Where `node`, linear in the variable, is zero; None when it is not linear."""
    at = [substitute(node, name, value) for value in (_ZERO, _ONE, _TWO)]
    slope, second = Operation("sub", (at[1], at[0])), Operation("sub", (at[2], at[1]))
    if not equal_expressions(slope, second) or equal_expressions(slope, _ZERO):
        return None
    return Operation("div", (Operation("neg", (at[0],)), slope))


def substitute(node: Node, name: str, value: Node) -> Node:
    """The node with a variable replaced."""
    return value if node == Symbol(name) else rebuild(node, lambda part: substitute(part, name, value))


def as_region(node: Node) -> Group | None:
    """The interval, or union of intervals, that inequalities in one variable describe; intervals as they are."""
    if isinstance(node, Group):
        if node.brackets in (",", "U") and any(map(is_inequality, node.items)):
            parts = [as_region(item) for item in node.items]
            found = [part for part in parts if part is not None]
            return Group("U", tuple(found)) if len(found) == len(parts) else None
        return node if node.brackets == "U" or (len(node.brackets) == 2 and node.brackets != "{}") else None
    if isinstance(node, Relation) and node.signs == ("!=",) and is_name(node.sides[0]) and not variables(node.sides[1]):
        return Group("U", (_ray(node.sides[1], "<"), _ray(node.sides[1], ">")))
    if not (isinstance(node, Relation) and is_inequality(node)):
        return None
    if len(node.signs) == 1:
        return _half_line(node)
    if len(node.signs) == 2 and len({sign[0] for sign in node.signs}) == 1:
        return _segment(node)
    return None


def _segment(chain: Relation) -> Group | None:
    low, middle, high = chain.sides
    halves = (
        _half_line(Relation((_MIRRORED[chain.signs[0]],), (middle, low))),
        _half_line(Relation((chain.signs[1],), (middle, high))),
    )
    if halves[0] is None or halves[1] is None:
        return None
    lower, upper = halves if halves[0].items[1] == _INFINITY else halves[::-1]
    assert lower is not None and upper is not None
    return Group(lower.brackets[0] + upper.brackets[1], (lower.items[0], upper.items[1]))


def _half_line(relation: Relation) -> Group | None:
    left, right = relation.sides
    sign = relation.signs[0]
    if is_name(right) and not variables(left):
        left, right, sign = right, left, _MIRRORED[sign]
    if is_name(left) and not variables(right):
        return _ray(right, sign)
    names = variables(left) | variables(right)
    if len(names) != 1 or not (is_plain(left) and is_plain(right)):
        return None
    (name,) = names
    difference = Operation("sub", (left, right))
    root = solve_linear(difference, name)
    if root is None:
        return None
    try:
        slope = evaluate(Operation("sub", tuple(substitute(difference, name, at) for at in (_ONE, _ZERO))), {})
    except (ArithmeticError, ValueError, RecursionError):
        return None
    return _ray(root, sign if is_real(slope) and slope.real > 0 else _MIRRORED[sign])


def _ray(bound: Node, sign: str) -> Group:
    if sign[0] == ">":
        return Group("[)" if sign == ">=" else "()", (bound, _INFINITY))
    return Group("(]" if sign == "<=" else "()", (Operation("neg", (_INFINITY,)), bound))
