"""Equality of two parsed answers."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from retrain.rewards.answers.nodes import (
    Group,
    Matrix,
    Node,
    Number,
    Operation,
    Quantity,
    Relation,
    Symbol,
    Words,
    is_plain,
    variables,
)
from retrain.rewards.answers.relations import as_region, equal_equations, is_inequality, is_name, side_values
from retrain.rewards.answers.units import DEGREE, PERCENT
from retrain.rewards.answers.values import Value, equal_expressions, evaluate, is_real

# A decimal with this many matching digits counts as a rounding of the exact number.
_ROUNDED_DIGITS = 6
# Longer lists are compared in order: unordered matching is quadratic.
_LONGEST_UNORDERED = 40
_HUNDREDTH = Number(Fraction(1, 100))
_WORDS_OF_COUNTED = """
    zero one two three four five six seven eight nine ten eleven twelve
"""
_COUNTED = _WORDS_OF_COUNTED.split()
_VOWELS = frozenset("aeiou")
_SHORT_WORDS = frozenset({"no", "on", "in", "up", "hot", "any"})
_NO_SOLUTION = frozenset({"no solution", "no solutions", "no real solution", "no real solutions", "empty set", "none"})
_UNDEFINED = frozenset({"dne", "does not exist", "undefined", "not defined"})
_ALL_REALS = frozenset({"all real numbers", "all reals", "all real x", "all real values", "r"})


def equal_answers(answer: Node, gold: Node) -> bool:
    """Whether an answer equals the reference."""
    if isinstance(answer, Relation) and answer.signs == ("in",):
        answer = answer.sides[1]
    if isinstance(gold, Relation) and gold.signs == ("in",):
        gold = gold.sides[1]
    if isinstance(answer, Relation) or isinstance(gold, Relation) or _holds_inequalities(answer, gold):
        return _equal_relations(answer, gold)
    if isinstance(answer, Quantity) or isinstance(gold, Quantity):
        return _equal_quantities(answer, gold)
    if isinstance(answer, Words) or isinstance(gold, Words):
        return _equal_words(answer, gold)
    if isinstance(answer, Matrix) or isinstance(gold, Matrix):
        return _equal_matrices(answer, gold)
    if isinstance(answer, Group) or isinstance(gold, Group):
        return _equal_groups(answer, gold)
    return equal_expressions(answer, gold) or _is_rounded(answer, gold) or _is_rounded(gold, answer)


def _holds_inequalities(answer: Node, gold: Node) -> bool:
    return any(
        isinstance(node, Group) and node.brackets in (",", "U") and all(is_inequality(item) for item in node.items)
        for node in (answer, gold)
    )


def _equal_relations(answer: Node, gold: Node) -> bool:
    regions = as_region(answer), as_region(gold)
    if regions[0] is not None and regions[1] is not None:
        return _equal_groups(regions[0], regions[1])
    if isinstance(answer, Relation) and isinstance(gold, Relation):
        if set(answer.signs) | set(gold.signs) <= {"=", "~"}:
            return equal_equations(answer, gold, equal_answers)
        return _equal_chains(answer, gold)
    if isinstance(answer, Relation):
        if not set(answer.signs) <= {"=", "~"}:
            return False
        return any(equal_answers(value, gold) for value in side_values(answer, equal_answers))
    assert isinstance(gold, Relation | Group)
    if isinstance(gold, Group) or not set(gold.signs) <= {"=", "~"}:
        return False
    named = is_name(gold.sides[0]) or is_name(gold.sides[-1]) or not variables(gold)
    return named and any(equal_answers(answer, value) for value in side_values(gold, equal_answers))


def _equal_chains(answer: Relation, gold: Relation) -> bool:
    """Inequalities in several variables, or with `≠`: the same signs between equal sides, in either direction."""
    mirrored = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "=": "=", "!=": "!="}
    if any(sign not in mirrored for sign in answer.signs):
        return False
    backwards = Relation(tuple(mirrored[sign] for sign in reversed(answer.signs)), answer.sides[::-1])
    return any(
        form.signs == gold.signs and all(map(equal_answers, form.sides, gold.sides)) for form in (answer, backwards)
    )


def _equal_quantities(answer: Node, gold: Node) -> bool:
    """Units must agree if both sides have one; a missing unit is assumed to be the expected one."""
    if isinstance(answer, Quantity) and isinstance(gold, Quantity):
        if answer.unit.powers != gold.unit.powers:
            return False
        if answer.unit.factor == gold.unit.factor:
            return equal_answers(answer.value, gold.value)
        return equal_answers(_times(answer.value, answer.unit.factor), _times(gold.value, gold.unit.factor))
    measured, other = (answer, gold) if isinstance(answer, Quantity) else (gold, answer)
    assert isinstance(measured, Quantity)
    if equal_answers(measured.value, other):
        return True
    if not is_plain(measured.value):
        return False
    if measured.unit == PERCENT:
        return equal_answers(Operation("mul", (measured.value, _HUNDREDTH)), other)
    return measured.unit == DEGREE and equal_answers(Operation("degrees", (measured.value,)), other)


def _times(value: Node, factor: Fraction) -> Node:
    return Operation("mul", (value, Number(factor))) if is_plain(value) else value


def _equal_words(answer: Node, gold: Node) -> bool:
    one, other = _word_of(answer), _word_of(gold)
    return one is not None and one == other


def _word_of(node: Node) -> str | None:
    """Normalized words; small numbers and a few symbols are converted to words."""
    match node:
        case Words(text):
            text = " ".join(text.lower().replace(".", " ").replace('"', " ").split()).strip(" .,;:")
            text = text.removeprefix("the ")
            if text in _NO_SOLUTION:
                return "no solution"
            if text in _UNDEFINED:
                return "undefined"
            return "all real numbers" if text in _ALL_REALS else text
        case Number(value, _) if value.denominator == 1 and 0 <= value < len(_COUNTED):
            return _COUNTED[int(value)]
        case Group("{}", ()):
            return "no solution"
        case Group("()", (Operation("neg", (Symbol("infinity"),)), Symbol("infinity"))):
            return "all real numbers"
        case Symbol(name):
            return name
    return None


def _equal_matrices(answer: Node, gold: Node) -> bool:
    if isinstance(answer, Matrix) and isinstance(gold, Matrix):
        shapes = [(len(matrix.rows), len(matrix.rows[0])) for matrix in (answer, gold)]
        return shapes[0] == shapes[1] and all(map(equal_answers, _entries(answer), _entries(gold)))
    matrix, other = (answer, gold) if isinstance(answer, Matrix) else (gold, answer)
    assert isinstance(matrix, Matrix)
    entries = _entries(matrix)
    if isinstance(other, Group):
        vector = 1 in (len(matrix.rows), len(matrix.rows[0])) and other.brackets in ("()", "[]")
        return vector and len(entries) == len(other.items) and all(map(equal_answers, entries, other.items))
    return len(entries) == 1 and equal_answers(entries[0], other)


def _entries(matrix: Matrix) -> list[Node]:
    return [entry for row in matrix.rows for entry in row]


def _equal_groups(answer: Node, gold: Node) -> bool:
    if not (isinstance(answer, Group) and isinstance(gold, Group)):
        group, other = (answer, gold) if isinstance(answer, Group) else (gold, answer)
        assert isinstance(group, Group)
        # `{5}` for 5; there are no lists of one entry.
        return group.brackets == "{}" and len(group.items) == 1 and equal_answers(group.items[0], other)
    one, other_ = _open_at_infinity(answer), _open_at_infinity(gold)
    kinds = {one.brackets, other_.brackets}
    if kinds <= {"U"} or kinds <= {",", "{}"}:
        return _equal_unordered(one, other_)
    if kinds in ({",", "()"}, {one.brackets}):
        return len(one.items) == len(other_.items) and all(map(equal_answers, one.items, other_.items))
    return False


def _equal_unordered(one: Group, other: Group) -> bool:
    first, second = list(one.items), list(other.items)
    if {one.brackets, other.brackets} == {"{}"}:
        first, second = _distinct(first), _distinct(second)
    if len(first) != len(second):
        return False
    if (one.brackets, other.brackets) == (",", ",") and (words := _read_as_words((*first, *second))):
        first, second = words[: len(first)], words[len(first) :]
    if len(first) > _LONGEST_UNORDERED or all(isinstance(item, Words) for item in (*first, *second)):
        return all(map(equal_answers, first, second))
    for item in first:
        found = next((at for at, rival in enumerate(second) if equal_answers(item, rival)), None)
        if found is None:
            return False
        del second[found]
    return True


def _read_as_words(items: Sequence[Node]) -> list[Node] | None:
    """The entries of both lists as words, if all may be words and one of them certainly is; else None."""
    texts = [item.text if isinstance(item, Words) else _letters_of(item) for item in items]
    if not all(len(text) > 1 for text in texts):
        return None
    is_list_of_words = any(isinstance(item, Words) for item in items) or any(map(_is_short_word, texts))
    return [Words(text) for text in texts] if is_list_of_words else None


def _is_short_word(text: str) -> bool:
    """Whether two or three letters are a word, and not a product: `ab`, `ca`, `xyz`, or points as in `BA`."""
    in_order = list(text) == sorted(set(text))
    return (
        text.istitle()
        or text in _SHORT_WORDS
        or (len(text) == 3 and text.islower() and not in_order and not _VOWELS.isdisjoint(text))
    )


def _letters_of(node: Node) -> str:
    """The letters of a product of single letters, as they were written; "" for anything else."""
    if isinstance(node, Symbol):
        return node.name if len(node.name) == 1 else ""
    if not isinstance(node, Operation) or node.name != "mul":
        return ""
    letters = [_letters_of(part) for part in node.parts]
    return "".join(letters) if all(letters) else ""


def _distinct(items: Sequence[Node]) -> list[Node]:
    if len(items) > _LONGEST_UNORDERED:
        return list(items)
    kept: list[Node] = []
    for item in items:
        if not any(equal_answers(item, other) for other in kept):
            kept.append(item)
    return kept


def _open_at_infinity(group: Group) -> Group:
    """Treat `[-∞, 2]` as `(-∞, 2]`."""
    if len(group.brackets) != 2 or group.brackets == "{}" or len(group.items) != 2:
        return group if group.brackets != "U" else Group("U", tuple(map(_open_item, group.items)))
    left = "(" if _is_infinite(group.items[0]) else group.brackets[0]
    right = ")" if _is_infinite(group.items[1]) else group.brackets[1]
    return Group(left + right, group.items)


def _open_item(node: Node) -> Node:
    return _open_at_infinity(node) if isinstance(node, Group) else node


def _is_infinite(node: Node) -> bool:
    if isinstance(node, Operation) and node.name == "neg":
        node = node.parts[0]
    return node == Symbol("infinity")


def _is_rounded(decimal: Node, exact: Node) -> bool:
    """Whether a decimal of at least six digits is a rounded or truncated number without a finite decimal expansion."""
    if not isinstance(decimal, Number) or decimal.places < _ROUNDED_DIGITS or variables(exact):
        return False
    if isinstance(exact, Number) and exact.places >= 0:
        return False
    digits = abs(decimal.value) * 10**decimal.places
    if digits < 10 ** (_ROUNDED_DIGITS - 1):
        return False
    try:
        value = evaluate(exact, {})
    except (ArithmeticError, ValueError, RecursionError):
        return False
    if isinstance(value, Fraction):
        rest = value.denominator
        for prime in (2, 5):
            while rest % prime == 0:
                rest //= prime
        real: Value = value
        if rest == 1:
            return False
    elif is_real(value):
        real = value.real
    else:
        return False
    scaled = abs(real) * 10**decimal.places
    return (real > 0) == (decimal.value > 0) and digits in (int(scaled), int(scaled + Fraction(1, 2)))
