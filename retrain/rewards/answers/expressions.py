"""Parsing of expressions: sums, products, powers, functions, brackets and matrices."""

from __future__ import annotations

import re
from abc import abstractmethod
from fractions import Fraction
from functools import reduce

from retrain.rewards.answers.arithmetic import (
    combine,
    divide,
    is_proper,
    is_whole,
    mix,
    multiply,
    negate,
    operate,
    read_number,
)
from retrain.rewards.answers.cursor import Cursor
from retrain.rewards.answers.nodes import Group, Matrix, Node, Number, Symbol, Words, is_plain
from retrain.rewards.answers.tokens import Token, Unreadable

MAX_DEPTH = 40
"""Maximum nesting of brackets."""
# A single letter is a unit, not a variable, if it follows a number and a space at the end of the answer.
LETTER_UNITS = frozenset("mgshlLJWVNK")

_WORDS_OF_GREEK = """
    alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau
    upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega ell hbar
"""
_GREEK = frozenset(_WORDS_OF_GREEK.split())
_CONSTANTS = {r"\pi": "pi", r"\infty": "infinity", r"\infinity": "infinity", r"\imath": "i"}
_CLOSING = {"(": ")", "[": "]", r"\{": r"\}", r"\langle": r"\rangle", r"\lfloor": r"\rfloor", r"\lceil": r"\rceil"}
_WORDS_OF_FACTORS = r"\frac \sqrt \binom \lfloor \lceil \mathbb \overline \emptyset \angle"
_FACTORS = frozenset(_WORDS_OF_FACTORS.split())
_ZERO = Number(Fraction(0))
_WORDS_OF_MATRICES = """
    matrix pmatrix bmatrix Bmatrix vmatrix smallmatrix array
"""
_MATRICES = frozenset(_WORDS_OF_MATRICES.split())


class ExpressionParser(Cursor):
    """Parses expressions, from sums to atoms. Subclasses add lists and relations, which brackets may contain."""

    @abstractmethod
    def listing(self, bare: bool = False) -> Node:
        """Entries between separators."""

    # Arithmetic

    def sum(self) -> Node:
        """Terms joined by `+`, `-` and `±`."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unreadable("nested too deeply")
        if self.take(r"\pm", r"\mp"):
            value: Node = operate(self.peek(-1).text[1:], _ZERO, self.product())
        else:
            value = self.product()
        while True:
            if self.take("+"):
                value = combine("add", value, self.product())
            elif self.peek().text == "-" and self.peek().kind == "sign" and self.peek(1).kind != "end":
                self.at += 1
                value = combine("sub", value, self.product())
            elif self.take(r"\pm", r"\mp"):
                value = operate(self.peek(-1).text[1:], value, self.product())
            else:
                self.depth -= 1
                return value

    def product(self) -> Node:
        """Factors joined by a sign or side by side."""
        value = self.signed()
        while True:
            if self.take("*", r"\cdot", r"\times", r"\ast"):
                value = multiply(value, self.signed())
            elif self.take("/", r"\div"):
                value = divide(value, self.signed())
            elif self.peek().text == ":" and self.peek(1).kind in ("number", "letter"):
                self.at += 1
                if re.fullmatch(r"\d\d", self.peek().text):
                    raise Unreadable("a time of day")
                value = operate("ratio", value, self.signed())
            elif self.starts_factor():
                value = self.beside(value)
            else:
                return value

    def beside(self, value: Node) -> Node:
        """The next factor without a sign; an integer before a proper fraction is a mixed number."""
        alone = self.peek(-1).kind == "number"
        stacked = self.peek().text == r"\frac"
        slashed = self.peek().kind == "number" and self.peek(-1).text not in ("}", "!")
        if slashed and not (alone and self.peek(1).text == "/" and self.peek(2).kind == "number"):
            raise Unreadable("two numbers side by side")
        if slashed:
            top, bottom = self.power(), (self.take("/"), self.power())[1]
            factor: Node = operate("div", top, bottom)
            if not is_proper(factor) or not is_whole(value):
                raise Unreadable("two numbers side by side")
            return mix(value, factor)
        factor = self.power()
        if alone and stacked and is_whole(value) and is_proper(factor):
            return mix(value, factor)
        return multiply(value, factor)

    def starts_factor(self) -> bool:
        """Whether the next token starts a factor."""
        token = self.peek()
        if token.kind in ("letter", "function"):
            lone_unit = token.text in LETTER_UNITS and token.spaced and self.peek(1).kind == "end"
            return not (lone_unit and self.peek(-1).kind == "number")
        if token.kind == "number":
            return token.spaced or self.peek(-1).text in ("}", "!")
        if token.kind == "sign":
            return token.text in ("(", "[", "{") or (token.text == "|" and not self.in_bars)
        if token.kind == "environment":
            return token.text.startswith(r"\begin")
        return token.kind == "command" and (
            token.text in _FACTORS or token.text in _CONSTANTS or token.text[1:] in _GREEK
        )

    def signed(self) -> Node:
        """A power with leading signs."""
        minus = False
        while self.peek().text in ("-", "+") and self.peek().kind == "sign":
            minus ^= self.peek().text == "-"
            self.at += 1
        value = self.power()
        return negate(value) if minus else value

    def power(self) -> Node:
        """An atom with its exponent."""
        base = self.postfix(self.atom())
        if self.peek().text == "^" and self.peek(1).text == r"\circ":
            return base
        if self.take("^", "**"):
            return self.postfix(operate("pow", base, self.script()))
        return base

    def postfix(self, value: Node) -> Node:
        """Factorials and degree signs after a value."""
        while True:
            if self.peek().text == "!" and self.peek().kind == "sign":
                self.at += 1
                value = operate("factorial", value)
            elif self.in_function and self.peek().text == "^" and self.peek(1).text == r"\circ":
                self.at += 2
                value = operate("degrees", value)
            else:
                return value

    def script(self) -> Node:
        """An exponent or index: a braced group, or one token; `2^-3` is accepted."""
        if self.peek().text == "{":
            return self.braced()
        if self.peek().text == "-":
            self.at += 1
            return negate(self.script())
        if self.peek().text == "(":
            return self.atom()
        # LaTeX takes only one digit after `^`, but `2^10` is meant as ten.
        return self.power_atom()

    def power_atom(self) -> Node:
        """An atom with an exponent, inside a script."""
        base = self.atom()
        if self.take("^", "**"):
            return operate("pow", base, self.script())
        return base

    def braced(self) -> Node:
        """A sum in braces."""
        self.expect("{")
        value = self.sum()
        self.expect("}")
        return value

    # Atoms

    def atom(self) -> Node:
        """A number, symbol, function, bracket or command."""
        token = self.peek()
        self.at += 1
        if token.kind == "number":
            return self.subscripted(read_number(token.text))
        if token.kind == "letter":
            return self.subscripted(Symbol(token.text))
        if token.kind == "function":
            return self.function(token.text)
        if token.kind == "environment":
            return self.matrix(token.text)
        if token.kind == "sign":
            return self.bracket(token.text)
        if token.kind == "command":
            return self.command(token.text)
        raise Unreadable(f"unexpected {token.text!r}")

    def subscripted(self, value: Node) -> Node:
        """A symbol with its subscript."""
        if not self.take("_"):
            return value
        start = self.at
        if self.take("{"):
            while not self.take("}"):
                if self.peek().kind == "end":
                    raise Unreadable("a subscript is not closed")
                self.at += 1
        elif self.peek().kind == "end":
            raise Unreadable("a subscript is missing")
        else:
            self.at += 1
        lower = "".join(token.text for token in self.tokens[start : self.at]).strip("{}")
        if isinstance(value, Symbol):
            return Symbol(f"{value.name}_{lower}")
        raise Unreadable("a number with a base")  # compared as text

    def bracket(self, opening: str) -> Node:
        """A parenthesized value, tuple or interval."""
        if opening == "{":
            self.at -= 1
            return self.inside_braces()
        if opening == "|":
            return self.bars()
        if opening not in ("(", "["):
            raise Unreadable(f"unexpected {opening!r}")
        was_in_bars, self.in_bars = self.in_bars, False
        self.depth += 1
        inner = self.listing()
        self.depth -= 1
        self.in_bars = was_in_bars
        closing = self.peek().text
        if not self.take(")", "]"):
            raise Unreadable("a bracket is not closed")
        if isinstance(inner, Group) and inner.brackets == "":
            return Group(opening + closing, inner.items)
        if closing != _CLOSING[opening] or not (is_plain(inner) or isinstance(inner, Words | Matrix)):
            raise Unreadable("a bracket around an unsupported entry")
        return inner

    def inside_braces(self) -> Node:
        """`{…}` groups; `{n \\choose k}` is a binomial."""
        self.expect("{")
        value = self.listing()
        if self.take(r"\choose"):
            value = operate("binom", value, self.sum())
        self.expect("}")
        if isinstance(value, Group) and value.brackets == "":  # `\\{1,2\\}` whose backslashes were lost
            return Group(",", value.items)
        return value

    def bars(self) -> Node:
        """An absolute value."""
        if self.in_bars:
            raise Unreadable("bars in bars")
        self.in_bars = True
        value = self.sum()
        self.expect("|")
        self.in_bars = False
        return operate("abs", value)

    def command(self, name: str) -> Node:
        """A LaTeX command."""
        if name in _CONSTANTS:
            return Symbol(_CONSTANTS[name])
        if name[1:] in _GREEK:
            return self.subscripted(Symbol(name[1:]))
        if name in (r"\{", r"\langle"):
            return self.collection(name)
        if name in (r"\lfloor", r"\lceil"):
            value = self.sum()
            self.expect(_CLOSING[name])
            return operate(name[2:], value)
        match name:
            case r"\frac":
                return divide(self.argument(), self.argument())
            case r"\binom":
                return operate("binom", self.argument(), self.argument())
            case r"\sqrt":
                return self.root()
            case r"\emptyset":
                return Group("{}", ())
            case r"\mathbb" | r"\overline" | r"\angle" | r"\triangle" | r"\vec":
                return self.named(name)
        raise Unreadable(f"{name} is unknown")

    def named(self, name: str) -> Node:
        """A name: `\\mathbb{R}`, `\\overline{AB}`, `\\angle ABC`."""
        braced = self.take("{")
        letters = ""
        while self.peek().kind == "letter" and (braced or not self.peek().spaced or not letters):
            letters += self.peek().text
            self.at += 1
        if braced:
            self.expect("}")
        if not letters:
            raise Unreadable(f"{name} without a name")
        if name == r"\overline" and len(letters) > 1:  # a segment; over one letter it is a conjugate
            ends: list[Node] = [Symbol(letter) for letter in letters]
            return reduce(multiply, ends)
        if name == r"\mathbb" and letters == "R":
            infinity = Symbol("infinity")
            return Group("()", (operate("neg", infinity), infinity))
        return Symbol(f"{name}{letters}")

    def collection(self, opening: str) -> Node:
        """A set or a vector."""
        if self.take(_CLOSING[opening]):
            return Group("{}", ())
        builder = self.peek().kind == "letter" and self.peek(1).text in ("|", ":")
        self.at += 2 if builder else 0  # `{x | x > 2}` is its condition
        inner = self.listing()
        self.expect(_CLOSING[opening])
        if builder:
            return inner
        items = inner.items if isinstance(inner, Group) and inner.brackets == "" else (inner,)
        return Group("{}" if opening == r"\{" else "()", items)

    def argument(self) -> Node:
        """An argument of a command: braced, or a single digit or letter as in LaTeX."""
        token = self.peek()
        if token.text == "{":
            return self.braced()
        if token.kind == "number" and token.text.isdigit() and len(token.text) > 1:
            self.tokens[self.at] = Token("number", token.text[1:], False)
            return read_number(token.text[0])
        if token.kind == "letter" or token.kind == "number" or (token.kind == "command" and token.text in _CONSTANTS):
            return self.atom()
        if token.kind == "command" and (token.text[1:] in _GREEK or token.text == r"\sqrt"):
            return self.atom()
        raise Unreadable("a missing argument")

    def root(self) -> Node:
        """A square root or a root with an index."""
        index: Node | None = None
        if self.take("["):
            index = self.sum()
            self.expect("]")
        token = self.peek()
        if token.text == "(":
            value = self.atom()
        elif token.kind == "number":  # `\sqrt 12` is meant as 12, `\sqrt12` takes one digit as in LaTeX
            value = self.atom() if token.spaced or self.in_plain_root() else self.argument()
        else:
            value = self.argument()
        return operate("root", value, index) if index is not None else operate("sqrt", value)

    def in_plain_root(self) -> bool:
        """Whether the root was written without a backslash."""
        return self.peek(-1).text != r"\sqrt"

    def function(self, name: str) -> Node:
        """A function with an optional power or base and an argument in brackets or beside it."""
        base: Node | None = None
        exponent: Node | None = None
        if name == "sqrt":
            return self.root()
        for _ in range(2):
            if self.take("_"):
                base = self.script()
            elif self.peek().text == "^" and self.peek(1).text != r"\circ":
                self.at += 1
                exponent = self.script()
        self.in_function += 1
        value = self.function_argument()
        self.in_function -= 1
        if name == "log" and base is not None:
            result: Node = operate("div", operate("ln", value), operate("ln", base))
        elif base is not None:
            raise Unreadable(f"{name} with a base")
        elif exponent == Number(Fraction(-1)):
            return operate(f"arc{name}", value)
        else:
            result = operate(name, value)
        return result if exponent is None else operate("pow", result, exponent)

    def function_argument(self) -> Node:
        """The argument of a function, in brackets or beside it."""
        if self.peek().text in ("(", "{", "|", "["):
            return self.postfix(self.atom())
        minus = self.take("-")
        value = self.power()
        # `\sin 2x` applies to the product, `\sin x \cos x` not to the next function.
        while self.starts_factor() and self.peek().kind != "function" and self.peek().text not in ("(", "["):
            value = multiply(value, self.power())
        if self.take("/"):  # `\sin pi/6`
            value = divide(value, self.power())
        return negate(value) if minus else value

    def matrix(self, beginning: str) -> Node:
        """A matrix environment."""
        name = beginning[beginning.index("{") + 1 : beginning.index("}")]
        if not beginning.startswith(r"\begin") or name not in _MATRICES:
            raise Unreadable(f"{beginning} is unknown")
        rows: list[tuple[Node, ...]] = []
        row: list[Node] = []
        while True:
            row.append(self.sum())
            if self.take("&"):
                continue
            ended = self.take("\\\\")
            rows.append(tuple(row))
            row = []
            if self.peek().kind == "environment":
                break
            if not ended:
                raise Unreadable("a matrix is not closed")
        self.at += 1
        if len({len(entries) for entries in rows}) != 1 or name == "vmatrix":
            raise Unreadable("rows of different lengths")
        return Matrix(tuple(rows))
