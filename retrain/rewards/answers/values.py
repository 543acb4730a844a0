"""Evaluation of expressions: exact where possible, else to 120 digits, at a bounded cost.

Two expressions are equal if they agree at several points. For polynomials and rational functions, rational points and
exact arithmetic make this a probabilistic proof; elsewhere they must agree to 100 digits.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Any

from mpmath.ctx_mp import MPContext

from retrain.rewards.answers.nodes import Node, Number, Operation, Symbol, variables, walk

Value = Fraction | Any
"""Exact, or a real or complex number of mpmath."""

_CONTEXT: Any = MPContext()
_CONTEXT.prec = 400
_AGREE = _CONTEXT.mpf(2) ** -330
_VANISHES = _CONTEXT.mpf(2) ** -300
# Larger exact numbers are neither computed nor rounded: rounding would hide small terms.
_MAX_BITS = 1 << 16
_MAX_MAGNITUDE = 240
_MAX_FACTORIAL = 3000
_MAX_ROOT = 12
_POINTS = 4
_STEPS = ("floor", "ceil")
NATURAL, DECIMAL = "natural", "decimal"


class Undefined(ArithmeticError):
    """The expression has no value, such as a division by zero."""


class TooLarge(ArithmeticError):
    """The value is too large to compute."""


def values_agree(one: Value, other: Value) -> bool:
    """Whether two values are equal, exactly or in all computed digits."""
    if isinstance(one, Fraction) and isinstance(other, Fraction):
        return one == other
    first, second = _rounded(one), _rounded(other)
    if _CONTEXT.isinf(first) or _CONTEXT.isinf(second):
        return bool(first == second)
    difference, size = abs(first - second), max(abs(first), abs(second))
    # After cancellation only rounding errors are left, which have no relative accuracy.
    return bool(difference <= _AGREE * size or size < _VANISHES)


def equal_expressions(one: Node, other: Node) -> bool:
    """Whether two expressions agree at all sample points; False if that cannot be determined."""
    names = sorted(variables(one) | variables(other))
    if not names:
        return _equal_constants(one, other)
    if variables(one) != variables(other) and not (_may_cancel(one) or _may_cancel(other)):
        return False
    logarithms = (NATURAL, DECIMAL) if _has_plain_log(one) or _has_plain_log(other) else (NATURAL,)
    return any(_agree_at_points(one, other, names, logarithm) for logarithm in logarithms)


def _equal_constants(one: Node, other: Node) -> bool:
    logarithms = (NATURAL, DECIMAL) if _has_plain_log(one) or _has_plain_log(other) else (NATURAL,)
    for logarithm in logarithms:
        try:
            if values_agree(evaluate(one, {}, logarithm), evaluate(other, {}, logarithm)):
                return True
        except (ArithmeticError, ValueError, RecursionError):
            continue
    return False


def _agree_at_points(one: Node, other: Node, names: list[str], logarithm: str) -> bool:
    real, complex_ = 0, 0
    imaginary = any(isinstance(part, Symbol) and part.name == "i" for node in (one, other) for part in walk(node))
    points = sample_points(tuple(names))
    if any(isinstance(part, Operation) and part.name in _STEPS for node in (one, other) for part in walk(node)):
        # Between integers, ceil(x) = floor(x) + 1.
        points += ({name: Fraction(at + 2) for at, name in enumerate(names)},)
    for point in points:
        try:
            values = evaluate(one, point, logarithm), evaluate(other, point, logarithm)
            agree = values_agree(*values)
        except TooLarge:
            return False
        except (ArithmeticError, ValueError):
            continue
        except RecursionError:
            return False
        if imaginary or all(is_real(value) for value in values):
            if not agree:
                return False
            real += 1
        else:
            # Outside the real numbers, branches of roots and logarithms may differ.
            complex_ += agree
    return real >= 2 or (real == 0 and complex_ >= 2)


def _may_cancel(node: Node) -> bool:
    """Whether a variable may cancel, as in `x - x` or `x^0`."""
    seen: set[str] = set()
    for part in walk(node):
        if isinstance(part, Symbol):
            if part.name in seen:
                return True
            seen.add(part.name)
    return any(isinstance(part, Number) and part.value == 0 for part in walk(node))


def _has_plain_log(node: Node) -> bool:
    return any(isinstance(part, Operation) and part.name == "log" for part in walk(node))


@lru_cache(maxsize=256)
def sample_points(names: tuple[str, ...]) -> tuple[Mapping[str, Fraction], ...]:
    """Fixed values for the variables: small, larger, negative, and of both signs."""
    points = []
    for number in range(_POINTS):
        draw = random.Random(f"{number} {' '.join(names)}")
        low, high = ((103, 197), (223, 907), (-907, -223), (-499, 499))[number]
        points.append({name: Fraction(2 * draw.randint(low, high) + 1, 419) for name in names})
    return tuple(points)


def is_real(value: Value) -> bool:
    """Whether a value is real up to rounding."""
    if isinstance(value, Fraction | _CONTEXT.mpf):
        return True
    return bool(abs(value.imag) <= _AGREE * abs(value.real)) or value.imag == 0


def evaluate(node: Node, point: Mapping[str, Fraction], logarithm: str = NATURAL) -> Value:
    """The value of an expression at a point."""
    match node:
        case Number(value, _):
            return value
        case Symbol(name):
            if name in point:
                return point[name]
            return _constant(name)
        case Operation(name, parts):
            return _bounded(_apply(name, [evaluate(part, point, logarithm) for part in parts], logarithm))
    raise Undefined(f"{type(node).__name__} has no value")


def _constant(name: str) -> Value:
    match name:
        case "pi":
            return +_CONTEXT.pi
        case "e":
            return +_CONTEXT.e
        case "i":
            return _CONTEXT.mpc(0, 1)
        case "infinity":
            return _CONTEXT.inf
    raise Undefined(name)


def _bounded(value: Value) -> Value:
    if isinstance(value, Fraction):
        if max(value.numerator.bit_length(), value.denominator.bit_length()) > _MAX_BITS:
            raise TooLarge
        return value
    if _CONTEXT.isnan(value):
        raise Undefined("not a number")
    if not _CONTEXT.isinf(value) and value and abs(_CONTEXT.mag(value)) > _MAX_MAGNITUDE:
        raise TooLarge
    if isinstance(value, _CONTEXT.mpc) and value.imag == 0:
        return value.real
    return value


def _rounded(value: Value) -> Any:
    """A value as an mpmath number. Raises TooLarge for exact values whose rounding would hide small terms."""
    if not isinstance(value, Fraction):
        return value
    if value and abs(value.numerator.bit_length() - value.denominator.bit_length()) > _MAX_MAGNITUDE:
        raise TooLarge
    return _CONTEXT.mpf(value.numerator) / value.denominator


def _apply(name: str, values: list[Value], logarithm: str) -> Value:
    exact = all(isinstance(value, Fraction) for value in values)
    if name in _ARITHMETIC and exact:
        return _ARITHMETIC[name](*values)
    if name in _ARITHMETIC:
        rounded = [_rounded(value) for value in values]
        result = _ARITHMETIC[name](*rounded)
        return _snap(result, max(map(abs, rounded))) if name in ("add", "sub") else result
    if name == "pow":
        return _power(*values)
    if name in ("sqrt", "root"):
        index = values[1] if name == "root" else Fraction(2)
        return _root(values[0], index)
    if name in ("factorial", "binom"):
        return _count(name, values)
    if name == "abs":
        return abs(values[0])
    if name in _STEPS:
        return _step(name, values[0])
    (value,) = map(_rounded, values)
    return _snap(_function(name, value, logarithm), 1)


def _snap(value: Any, scale: Any) -> Value:
    """Zero if the value is only the rounding error of cancelled terms."""
    return Fraction(0) if abs(value) < _VANISHES * scale else value


def _quotient(one: Value, other: Value) -> Value:
    if other == 0:
        raise Undefined("division by zero")
    return one / other


_ARITHMETIC: Mapping[str, Any] = {
    "add": lambda one, other: one + other,
    "sub": lambda one, other: one - other,
    "mul": lambda one, other: one * other,
    "neg": lambda one: -one,
    "div": _quotient,
    "ratio": _quotient,
}


def _power(base: Value, exponent: Value) -> Value:
    if isinstance(exponent, Fraction) and exponent.denominator == 1:
        power = int(exponent)
        if isinstance(base, Fraction):
            if base == 0 and power < 0:
                raise Undefined("division by zero")
            bits = max(base.numerator.bit_length(), base.denominator.bit_length())
            if base not in (0, 1, -1) and (bits - 1 or 1) * abs(power) > _MAX_BITS:
                raise TooLarge
            return base ** (power if base not in (0, 1, -1) else power % 2 or (2 if power else 0))
        if abs(power) > _MAX_BITS:
            raise TooLarge
        return base**power
    if isinstance(base, Fraction) and isinstance(exponent, Fraction) and exponent.denominator <= _MAX_ROOT:
        return _root(_power(base, Fraction(exponent.numerator)), Fraction(exponent.denominator))
    first, second = _rounded(base), _rounded(exponent)
    if first == 0 or _CONTEXT.isinf(first) or _CONTEXT.isinf(second):
        raise Undefined("an undefined power")
    return _CONTEXT.exp(second * _CONTEXT.ln(first))


def _root(value: Value, index: Value) -> Value:
    """The principal root; odd roots of negative real numbers are real."""
    if isinstance(index, Fraction) and index.denominator == 1 and isinstance(value, Fraction):
        number = int(index)
        if 0 < number < 100:
            top, bottom = (_whole_root(abs(part), number) for part in (value.numerator, value.denominator))
            if top is not None and bottom is not None and (value >= 0 or number % 2):
                return Fraction(top if value >= 0 else -top, bottom)
            if value < 0 and number % 2:
                return -_root(-value, index)
    if index == 0:
        raise Undefined("a root of order zero")
    if value == 0:
        return Fraction(0)
    return (
        _CONTEXT.exp(_CONTEXT.ln(_rounded(value)) / _rounded(index)) if index != 2 else _CONTEXT.sqrt(_rounded(value))
    )


def _whole_root(value: int, index: int) -> int | None:
    if value in (0, 1):
        return value
    if index == 2:
        root = math.isqrt(value)
    elif value.bit_length() > 900:
        return None
    else:
        root = round(value ** (1 / index)) if value.bit_length() < 50 else _search_root(value, index)
    return root if root**index == value else None


def _search_root(value: int, index: int) -> int:
    low, high = 0, 1 << (value.bit_length() // index + 1)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if middle**index <= value else (low, middle - 1)
    return low


def _count(name: str, values: list[Value]) -> Value:
    if not all(isinstance(value, Fraction) for value in values):
        raise Undefined(f"{name} of a value that is not exact")
    if all(value.denominator == 1 and value >= 0 for value in values):
        if values[0] > _MAX_FACTORIAL:
            raise TooLarge
        numbers = [int(value) for value in values]
        return Fraction(math.factorial(numbers[0]) if name == "factorial" else math.comb(*numbers))
    if name == "factorial":
        if values[0].denominator == 1:
            raise Undefined("the factorial of a negative number")
        return _CONTEXT.gamma(_rounded(values[0]) + 1)
    return _CONTEXT.binomial(*map(_rounded, values))


def _step(name: str, value: Value) -> Value:
    if not isinstance(value, Fraction):
        if not is_real(value) or _CONTEXT.isinf(value):
            raise Undefined(f"{name} of a number that is not real")
        value = value.real
        if abs(value - _CONTEXT.nint(value)) < _VANISHES:
            return Fraction(int(_CONTEXT.nint(value)))
        return Fraction(int(_CONTEXT.floor(value) if name == "floor" else _CONTEXT.ceil(value)))
    return Fraction(math.floor(value) if name == "floor" else math.ceil(value))


def _function(name: str, value: Any, logarithm: str) -> Value:
    if _CONTEXT.isinf(value):
        raise Undefined(f"{name} of infinity")
    if name == "degrees":
        return value * _CONTEXT.pi / 180
    if name in ("ln", "log", "lg"):
        if value == 0:
            raise Undefined("the logarithm of zero")
        result = _CONTEXT.ln(value)
        return result / _CONTEXT.ln(10) if name == "lg" or (name == "log" and logarithm == DECIMAL) else result
    if name in ("tan", "sec", "cot", "csc"):
        # At a pole the quotient would be a large rounding error.
        sine, cosine = _CONTEXT.sin(value), _CONTEXT.cos(value)
        top, bottom = {"tan": (sine, cosine), "sec": (1, cosine), "cot": (cosine, sine), "csc": (1, sine)}[name]
        if abs(bottom) < _VANISHES:
            raise Undefined(f"{name} at a pole")
        return top / bottom
    functions = {"arcsin": "asin", "arccos": "acos", "arctan": "atan", "arccot": "acot"}
    functions |= {f"arc{base}": f"a{base}" for base in ("sinh", "cosh", "tanh", "coth", "sec", "csc")}
    known = ("sin", "cos", "exp", "sinh", "cosh", "tanh", "coth")
    if name not in functions and name not in known:
        raise Undefined(name)
    method = getattr(_CONTEXT, functions.get(name, name))
    if name == "exp" and abs(value) > _MAX_BITS:
        raise TooLarge
    return method(value)
