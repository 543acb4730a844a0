"""A recursive-descent parser for final answers: lists, unions, relations and quantities over expressions."""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache

from retrain.rewards.answers.arithmetic import combine, flatten, multiply, negate
from retrain.rewards.answers.expressions import LETTER_UNITS, ExpressionParser
from retrain.rewards.answers.nodes import Group, Node, Number, Quantity, Relation, Words
from retrain.rewards.answers.notation import tidy
from retrain.rewards.answers.tokens import Unreadable, tokenize
from retrain.rewards.answers.units import CURRENCIES, DEGREE, MULTIPLIERS, PERCENT, Unit, read_unit

_RELATIONS = {
    "=": "=", "==": "=", "<": "<", ">": ">", "<=": "<=", ">=": ">=", "!=": "!=",
    r"\leq": "<=", r"\geq": ">=", r"\neq": "!=", r"\approx": "~", r"\in": "in",
}  # fmt: skip


@lru_cache(maxsize=16_384)  # a group shares its reference and most answers
def read(answer: str) -> Node | None:
    """Parse an answer; None if its notation is not supported."""
    try:
        return _Parser(tokenize(tidy(answer))).answer()
    except (Unreadable, RecursionError):
        return None


class _Parser(ExpressionParser):
    """Parses a complete answer, from the loosest binding (lists) down to expressions."""

    def answer(self) -> Node:
        """The complete answer, or Unreadable."""
        if not self.tokens:
            raise Unreadable("empty")
        found = self.listing(bare=True)
        if self.at != len(self.tokens):
            raise Unreadable(f"unexpected {self.tokens[self.at].text!r}")
        return found

    # Lists, unions, relations

    def listing(self, bare: bool = False) -> Node:
        """Entries between commas, semicolons, *and* or *or*."""
        items = [self.relation()]
        while self.take(",", ";") or self.peek().kind == "separator":
            if self.peek().kind == "separator":
                self.at += 1
            items.append(self.relation())
        items = [part for item in items for part in flatten(item)]
        return items[0] if len(items) == 1 else Group("," if bare else "", tuple(items))

    def relation(self) -> Node:
        sides, signs = [self.union()], list[str]()
        while self.peek().text in _RELATIONS and self.peek().kind in ("sign", "command"):
            sign = _RELATIONS[self.peek().text]
            self.at += 1
            if sign in ("<", ">") and self.take("="):
                sign += "="
            signs.append(sign)
            sides.append(self.union())
        return Relation(tuple(signs), tuple(sides)) if signs else sides[0]

    def union(self) -> Node:
        parts = [self.quantity()]
        while self.take(r"\cup"):
            parts.append(self.quantity())
        return Group("U", tuple(parts)) if len(parts) > 1 else parts[0]

    # Values with their units

    def quantity(self) -> Node:
        if self.peek().text == r"\approx" and self.at == 0:  # `\approx 8.24` alone means 8.24
            self.at += 1
        if self.peek().kind == "word":
            return self.words()
        sign_first = self.take("-") if self.peek(1).text in CURRENCIES else False
        currency = self.currency()
        value = self.sum()
        value = negate(value) if sign_first else value
        currency = currency or self.currency()
        while self.peek().kind == "word" and self.peek().text.strip().lower() in MULTIPLIERS:
            value = multiply(value, Number(Fraction(MULTIPLIERS[self.peek().text.strip().lower()])))
            self.at += 1
        unit = self.unit() or currency
        if unit is None or not (unit.powers or unit.factor != 1):
            return value
        return self.compound(value, unit) if self.peek().kind == "number" else Quantity(value, unit)

    def compound(self, value: Node, unit: Unit) -> Node:
        """`5 ft 3 in`: the parts of one quantity, in the unit of the last."""
        rest = self.quantity()
        if not isinstance(rest, Quantity) or rest.unit.powers != unit.powers:
            raise Unreadable("a quantity of unlike parts")
        return Quantity(combine("add", multiply(value, Number(unit.factor / rest.unit.factor)), rest.value), rest.unit)

    def currency(self) -> Unit | None:
        for sign, word in CURRENCIES.items():
            if self.take(sign):
                return read_unit(word)
        return None

    def words(self) -> Node:
        """Words alone, or words such as *the answer is* before a value."""
        words = []
        while self.peek().kind == "word":
            words.append(self.peek().text)
            self.at += 1
        text = " ".join(" ".join(words).split())
        if self.ends_here() or self.peek().text in _RELATIONS:
            return Words(text)
        if re.search(r"(?:\bis|\bare|\bequals|\babout|\bapproximately|\broughly|:|=)$", text.strip(), re.IGNORECASE):
            return self.quantity()
        raise Unreadable(f"{text!r} before a value")

    def ends_here(self) -> bool:
        token = self.peek()
        return token.kind in ("end", "separator") or token.text in (",", ";", ")", "]", r"\}")

    def unit(self) -> Unit | None:
        """Percent and degree signs, and the words after a value."""
        if self.take(r"\%", "%"):
            return PERCENT
        start = self.at
        degree = self.take("^") and self.take(r"\circ")
        if degree and self.peek().text in ("C", "F"):
            self.at += 1
            return read_unit("celsius" if self.peek(-1).text == "C" else "fahrenheit")
        if degree:
            return DEGREE
        self.at = start
        lone = self.peek()
        if lone.text in LETTER_UNITS and lone.spaced and self.peek(1).kind == "end" and self.peek(-1).kind == "number":
            self.at += 1
            return read_unit(lone.text)
        if self.peek().kind != "word":
            return None
        pieces: list[str] = []
        while self.peek().kind == "word" or (pieces and self.peek().text in ("/", "^", r"\cdot", "*", "-", ".")):
            pieces.append(self.peek().text)
            self.at += 1
            if pieces[-1] == "^":
                pieces[-1] += self.unit_power()
        unit = read_unit(" ".join(pieces))
        if unit is None:
            raise Unreadable(f"{pieces} after a value")
        return unit

    def unit_power(self) -> str:
        braced = self.take("{")
        sign = "-" if self.take("-") else ""
        power = self.peek()
        if power.kind != "number" or len(power.text) > 1:
            raise Unreadable("a unit's power")
        self.at += 1
        if braced:
            self.expect("}")
        return sign + power.text
