"""From the text of an answer to its structure: a recursive-descent parser of what final answers are written in."""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache, reduce

from retrain.rewards.answers.arithmetic import (
    combine,
    divide,
    flatten,
    is_proper,
    is_whole,
    mix,
    multiply,
    negate,
    operate,
    read_number,
)
from retrain.rewards.answers.nodes import (
    Group,
    Matrix,
    Node,
    Number,
    Quantity,
    Relation,
    Symbol,
    Words,
    is_plain,
)
from retrain.rewards.answers.notation import tidy
from retrain.rewards.answers.tokens import Token, Unreadable, tokenize
from retrain.rewards.answers.units import DEGREE, MULTIPLIERS, PERCENT, Unit, read_unit

DEEPEST = 40
"""Most brackets inside each other; what nests deeper is not read."""

_RELATIONS = {
    "=": "=", "==": "=", "<": "<", ">": ">", "<=": "<=", ">=": ">=", "!=": "!=",
    r"\leq": "<=", r"\geq": ">=", r"\neq": "!=", r"\approx": "~", r"\in": "in",
}  # fmt: skip
_WORDS_OF_GREEK = """
    alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau
    upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega ell hbar
"""
_GREEK = frozenset(_WORDS_OF_GREEK.split())
_CONSTANTS = {r"\pi": "pi", r"\infty": "infinity", r"\infinity": "infinity", r"\imath": "i"}
_CLOSING = {"(": ")", "[": "]", r"\{": r"\}", r"\langle": r"\rangle", r"\lfloor": r"\rfloor", r"\lceil": r"\rceil"}
# A unit of one letter is told from a variable by the blank after a number, at the end of the answer.
_LETTER_UNITS = frozenset("mgshlLJWVNK")
_WORDS_OF_FACTORS = r"\frac \sqrt \binom \lfloor \lceil \mathbb \overline \emptyset \angle"
_FACTORS = frozenset(_WORDS_OF_FACTORS.split())
_ZERO = Number(Fraction(0))
_WORDS_OF_MATRICES = """
    matrix pmatrix bmatrix Bmatrix vmatrix smallmatrix array
"""
_MATRICES = frozenset(_WORDS_OF_MATRICES.split())


@lru_cache(maxsize=16_384)  # a group shares its reference, and mostly its answers
def read(answer: str) -> Node | None:
    """Read an answer; None when it is not in a notation that is known here."""
    try:
        return _Parser(tokenize(tidy(answer))).answer()
    except (Unreadable, RecursionError):
        return None


class _Parser:
    """Reads one list of tokens, from the loosest binding (lists) to the tightest (atoms)."""

    def __init__(self, tokens: list[Token]) -> None:
        self.tokens = tokens
        self.at = 0
        self.depth = 0
        self.in_bars = False
        self.in_function = 0

    def answer(self) -> Node:
        """All of it, or Unreadable."""
        if not self.tokens:
            raise Unreadable("nothing there")
        found = self.listing(bare=True)
        if self.at != len(self.tokens):
            raise Unreadable(f"unexpected {self.tokens[self.at].text!r}")
        return found

    # Looking ahead

    def peek(self, offset: int = 0) -> Token:
        at = self.at + offset
        return self.tokens[at] if at < len(self.tokens) else Token("end", "")

    def take(self, *texts: str) -> bool:
        if self.peek().kind != "word" and self.peek().text in texts and self.at < len(self.tokens):
            self.at += 1
            return True
        return False

    def expect(self, text: str) -> None:
        if not self.take(text):
            raise Unreadable(f"{text!r} is missing")

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
        if self.peek().text == r"\approx" and self.at == 0:  # `\approx 8.24` alone says 8.24
            self.at += 1
        if self.peek().kind == "word":
            return self.words()
        sign_first = self.take("-") if self.peek(1).text in (r"\$", "€", "£") else False
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
        for sign, word in ((r"\$", "dollar"), ("€", "euro"), ("£", "gbp")):
            if self.take(sign):
                return read_unit(word)
        return None

    def words(self) -> Node:
        """Words alone, or words such as *the answer is* before a value."""
        spoken = []
        while self.peek().kind == "word":
            spoken.append(self.peek().text)
            self.at += 1
        text = " ".join(" ".join(spoken).split())
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
        if lone.text in _LETTER_UNITS and lone.spaced and self.peek(1).kind == "end" and self.peek(-1).kind == "number":
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

    # Arithmetic

    def sum(self) -> Node:
        self.depth += 1
        if self.depth > DEEPEST:
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
        """The factor that follows without a sign; after a whole number a proper fraction makes a mixed number."""
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
        token = self.peek()
        if token.kind in ("letter", "function"):
            lone_unit = token.text in _LETTER_UNITS and token.spaced and self.peek(1).kind == "end"
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
        minus = False
        while self.peek().text in ("-", "+") and self.peek().kind == "sign":
            minus ^= self.peek().text == "-"
            self.at += 1
        value = self.power()
        return negate(value) if minus else value

    def power(self) -> Node:
        base = self.postfix(self.atom())
        if self.peek().text == "^" and self.peek(1).text == r"\circ":
            return base
        if self.take("^", "**"):
            return self.postfix(operate("pow", base, self.script()))
        return base

    def postfix(self, value: Node) -> Node:
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
        """What stands raised or lowered: a braced group, or one token; `2^-3` is taken as meant."""
        if self.peek().text == "{":
            return self.braced()
        if self.peek().text == "-":
            self.at += 1
            return negate(self.script())
        if self.peek().text == "(":
            return self.atom()
        # Between `^` and what follows LaTeX takes one digit, but people who write `2^10` mean ten.
        return self.power_atom()

    def power_atom(self) -> Node:
        base = self.atom()
        if self.take("^", "**"):
            return operate("pow", base, self.script())
        return base

    def braced(self) -> Node:
        self.expect("{")
        value = self.sum()
        self.expect("}")
        return value

    # Atoms

    def atom(self) -> Node:
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
        if not self.take("_"):
            return value
        start = self.at
        if self.take("{"):
            while not self.take("}"):
                if self.peek().kind == "end":
                    raise Unreadable("a subscript without an end")
                self.at += 1
        else:
            self.at += 1
        lower = "".join(token.text for token in self.tokens[start : self.at]).strip("{}")
        if isinstance(value, Symbol):
            return Symbol(f"{value.name}_{lower}")
        raise Unreadable("a number with a base")  # whose digits are text, not a value

    def bracket(self, opening: str) -> Node:
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
            raise Unreadable("a bracket without an end")
        if isinstance(inner, Group) and inner.brackets == "":
            return Group(opening + closing, inner.items)
        if closing != _CLOSING[opening] or not (is_plain(inner) or isinstance(inner, Words | Matrix)):
            raise Unreadable("a bracket around one odd entry")
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
        if self.in_bars:
            raise Unreadable("bars in bars")
        self.in_bars = True
        value = self.sum()
        self.expect("|")
        self.in_bars = False
        return operate("abs", value)

    def command(self, name: str) -> Node:
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
        raise Unreadable(f"{name} is not known")

    def named(self, name: str) -> Node:
        """A thing that is only a name: `\\mathbb{R}`, `\\overline{AB}`, `\\angle ABC`."""
        braced = self.take("{")
        letters = ""
        while self.peek().kind == "letter" and (braced or not self.peek().spaced or not letters):
            letters += self.peek().text
            self.at += 1
        if braced:
            self.expect("}")
        if not letters:
            raise Unreadable(f"{name} without a name")
        if name == r"\overline" and len(letters) > 1:  # a segment by its ends; over one letter it is a conjugate
            ends: list[Node] = [Symbol(letter) for letter in letters]
            return reduce(multiply, ends)
        if name == r"\mathbb" and letters == "R":
            infinity = Symbol("infinity")
            return Group("()", (operate("neg", infinity), infinity))
        return Symbol(f"{name}{letters}")

    def collection(self, opening: str) -> Node:
        if self.take(_CLOSING[opening]):
            return Group("{}", ())
        builder = self.peek().kind == "letter" and self.peek(1).text in ("|", ":")
        self.at += 2 if builder else 0  # `{x | x > 2}` is what its condition says
        inner = self.listing()
        self.expect(_CLOSING[opening])
        if builder:
            return inner
        items = inner.items if isinstance(inner, Group) and inner.brackets == "" else (inner,)
        return Group("{}" if opening == r"\{" else "()", items)

    def argument(self) -> Node:
        """An argument of a command: braced, or a single digit or letter as LaTeX has it."""
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
        index: Node | None = None
        if self.take("["):
            index = self.sum()
            self.expect("]")
        token = self.peek()
        if token.text == "(":
            value = self.atom()
        elif token.kind == "number":  # `\sqrt 12` is twelve's to whoever writes it so, `\sqrt12` is LaTeX's one digit
            value = self.atom() if token.spaced or self.in_plain_root() else self.argument()
        else:
            value = self.argument()
        return operate("root", value, index) if index is not None else operate("sqrt", value)

    def in_plain_root(self) -> bool:
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
        if self.peek().text in ("(", "{", "|", "["):
            return self.postfix(self.atom())
        minus = self.take("-")
        value = self.power()
        # `\sin 2x` takes the product, `\sin x \cos x` does not take the next function.
        while self.starts_factor() and self.peek().kind != "function" and self.peek().text not in ("(", "["):
            value = multiply(value, self.power())
        if self.take("/"):  # `\sin pi/6`
            value = divide(value, self.power())
        return negate(value) if minus else value

    def matrix(self, beginning: str) -> Node:
        name = beginning[beginning.index("{") + 1 : beginning.index("}")]
        if not beginning.startswith(r"\begin") or name not in _MATRICES:
            raise Unreadable(f"{beginning} is not known")
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
                raise Unreadable("a matrix without an end")
        self.at += 1
        if len({len(entries) for entries in rows}) != 1 or name == "vmatrix":
            raise Unreadable("rows of different lengths")
        return Matrix(tuple(rows))
