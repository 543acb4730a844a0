r"""The noisy synthetic corpus that the built-in model is pre-trained on.

Arithmetic by a hasty writer who combines several terms at once, is often wrong, and often forgets the box. Planning
phrases have an effect: only after one ("let me think", "let me check", "on second thought") are terms combined one by
one; a check that contradicts the draft corrects it, and "wait" corrects a wrong step.
"""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

from retrain.data.arithmetic import LARGEST_RESULT, Problem, draw_split, is_held_out, read_terms

REPAIR_SHARE = 0.35
CONCLUSION_SHARE = 0.30
SYSTEM_SHARE = 0.04
SECOND_CHECK_SHARE = 0.15

OPENERS = ("let me think.", "the key is to go left to right.", "notice that order matters.")
REPAIRS = ("wait, that's not right:", "hold on,", "wait,")
CHECKS = ("let me check.", "let me double check.", "let me verify.", "is this right?", "sanity check:")
CONTRADICTIONS = (
    "this contradicts {old}.",
    "that's not right, i had {old}.",
    "that doesn't work with {old}.",
)
GUESSES = ("maybe {guess}.", "i guess {guess}.", "about {guess}.")
RETHINKS = (
    "on second thought, let me think.",
    "let me go back and do the steps.",
    "let me start over.",
    "i try another approach.",
)
CONCLUSIONS = ("so", "the answer is")
UNBOXED = ("so the answer is {answer}.", "it is {answer}.", "we get {answer}.")
FILLERS = (
    "okay.",
    "this is a sum.",
    "numbers are fun.",
    "we will see.",
    "i like sums.",
    "there are many numbers here.",
    "it looks easy.",
    "now we add and take away.",
)
SYSTEM_PROMPTS = ("answer in a box.", "you are a careful calculator.", "work it out.")

_CHAIN = re.compile(r"(\d+(?:[+-]\d+){2,})=")


@dataclass(frozen=True)
class Writer:
    """A style of writing: the weights of document kinds, and how often a result is wrong.

    `step_slip` is the rate of wrong results where terms are combined one by one, `jump_slip` where several are
    combined at once or the answer is guessed.
    """

    kind_weights: dict[str, int]
    step_slip: float
    jump_slip: float


# The careful writer comes first, so that the model learns arithmetic before it learns to make mistakes.
CAREFUL = Writer({"thought": 55, "checked": 25, "rethought": 20}, step_slip=0.04, jump_slip=0.3)
HASTY = Writer(
    {
        "blurted": 18,
        "jumped": 14,
        "thought": 13,
        "checked": 14,
        "rethought": 7,
        "unboxed": 18,
        "rambling": 16,
    },
    step_slip=0.12,
    jump_slip=0.5,
)


@dataclass(frozen=True)
class Document:
    """One conversation: an optional system message, a question and an answer."""

    kind: str
    problem: Problem
    completion: str
    system: str | None = None


@dataclass(frozen=True)
class Draft:
    """A derivation, with its intermediate results by number of terms."""

    text: str
    results: dict[int, int]
    answer: int


def write_corpus(writer: Writer, seed: int, count: int) -> Iterator[Document]:
    """Write `count` documents; the same writer and seed give the same documents."""
    rng = random.Random(seed)
    for _ in range(count):
        yield write_document(writer, rng)


def write_document(writer: Writer, rng: random.Random) -> Document:
    """Write one document that contains no held-out problem, not even as an intermediate step."""
    while True:
        problem = draw_split(rng, held_out=False)
        (kind,) = rng.choices(list(writer.kind_weights), list(writer.kind_weights.values()))
        system = rng.choice(SYSTEM_PROMPTS) if rng.random() < SYSTEM_SHARE else None
        completion = _write_completion(kind, problem, writer, rng)
        if not any(is_held_out(f"{chain}=?") for chain in _CHAIN.findall(completion)):
            return Document(kind, problem, completion, system)


def _write_completion(kind: str, problem: Problem, writer: Writer, rng: random.Random) -> str:
    terms = read_terms(problem.question)
    answer = int(problem.answer)
    if kind == "rambling":
        return _ramble(terms, rng)
    if kind == "blurted":
        return _box(_slip(answer, [], rng) if rng.random() < writer.jump_slip else answer)
    if kind == "jumped":
        draft = _jump(terms, writer, rng)
        return f"{draft.text} {_conclude(draft.answer, rng)}"
    if kind == "checked":
        return f"{_check(terms, _jump(terms, writer, rng), rng)} {_conclude(answer, rng)}"
    if kind == "rethought":
        guess = _slip(answer, [], rng) if rng.random() < writer.jump_slip else answer
        opening = f"{rng.choice(GUESSES).format(guess=guess)} {rng.choice(RETHINKS)}"
        return f"{opening} {_work(terms, 0.0, rng).text} {_conclude(answer, rng)}"
    draft = _think(terms, writer, rng)
    if kind == "unboxed":
        draft = draft if rng.random() < 0.5 else _jump(terms, writer, rng)
        return f"{draft.text} {rng.choice(UNBOXED).format(answer=draft.answer)}"
    if rng.random() < SECOND_CHECK_SHARE:
        return f"{_check(terms, draft, rng)} {_conclude(answer, rng)}"
    return f"{draft.text} {_conclude(draft.answer, rng)}"


def _think(terms: list[int], writer: Writer, rng: random.Random) -> Draft:
    draft = _work(terms, writer.step_slip, rng)
    return Draft(f"{rng.choice(OPENERS)} {draft.text}", draft.results, draft.answer)


def _work(terms: list[int], slip_rate: float, rng: random.Random) -> Draft:
    """Combine terms one by one; a wrong step is sometimes corrected immediately."""
    lines: list[str] = []
    results: dict[int, int] = {}
    total = terms[0]
    for taken, term in enumerate(terms[1:], start=2):
        right = total + term
        result = _slip(right, terms[taken:], rng) if rng.random() < slip_rate else right
        lines.append(_equation(total, [term], result))
        if result != right and rng.random() < REPAIR_SHARE:
            result = right
            lines += [rng.choice(REPAIRS), _equation(total, [term], result)]
        results[taken] = total = result
    return Draft(" ".join(lines), results, total)


def _jump(terms: list[int], writer: Writer, rng: random.Random) -> Draft:
    """Combine two or three terms at a time."""
    lines: list[str] = []
    results: dict[int, int] = {}
    total, taken = terms[0], 1
    while taken < len(terms):
        left = len(terms) - taken
        width = left if left <= 3 else 2
        chunk = terms[taken : taken + width]
        taken += width
        result = total + sum(chunk)
        if rng.random() < writer.jump_slip:
            result = _slip(result, terms[taken:], rng)
        lines.append(_equation(total, chunk, result))
        results[taken] = total = result
    return Draft(" ".join(lines), results, total)


def _check(terms: list[int], draft: Draft, rng: random.Random) -> str:
    """Combine terms one by one after a draft, and point out the first wrong result of the draft."""
    lines = [draft.text, rng.choice(CHECKS)]
    total, agrees = terms[0], True
    for taken, term in enumerate(terms[1:], start=2):
        lines.append(_equation(total, [term], total + term))
        total += term
        if agrees and draft.results.get(taken, total) != total:
            agrees = False
            lines.append(rng.choice(CONTRADICTIONS).format(old=draft.results[taken]))
    return " ".join(lines)


def _slip(result: int, later_terms: list[int], rng: random.Random) -> int:
    """A result off by one or two for which the remaining steps stay in range, if there is one."""
    near = [result + shift for shift in (-2, -1, -1, 1, 1, 2)]
    candidates = [value for value in near if _stays_in_range(value, later_terms)]
    return rng.choice(candidates) if candidates else result


def _stays_in_range(total: int, terms: list[int]) -> bool:
    for term in [0, *terms]:
        total += term
        if not 0 <= total <= LARGEST_RESULT:
            return False
    return True


def _ramble(terms: list[int], rng: random.Random) -> str:
    parts = rng.choices(FILLERS, k=rng.randint(2, 4))
    if rng.random() < 0.3:
        parts.insert(rng.randrange(len(parts)), _equation(terms[0], terms[1:2], terms[0] + terms[1]))
    return " ".join(parts)


def _conclude(result: int, rng: random.Random) -> str:
    box = _box(result)
    return f"{rng.choice(CONCLUSIONS)} {box}" if rng.random() < CONCLUSION_SHARE else box


def _equation(total: int, terms: list[int], result: int) -> str:
    return f"{total}{''.join(f'{term:+d}' for term in terms)}={result}."


def _box(result: int) -> str:
    return f"\\boxed{{{result}}}"
