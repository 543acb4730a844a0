"""A cursor over the tokens of an answer: the base of the parsers."""

from __future__ import annotations

from retrain.rewards.answers.tokens import Token, Unreadable


class Cursor:
    """A position in a list of tokens, and the context of the parse."""

    def __init__(self, tokens: list[Token]) -> None:
        self.tokens = tokens
        self.at = 0
        self.depth = 0
        self.in_bars = False
        self.in_function = 0

    def peek(self, offset: int = 0) -> Token:
        """The token at an offset from the current one, without consuming it."""
        at = self.at + offset
        return self.tokens[at] if at < len(self.tokens) else Token("end", "")

    def take(self, *texts: str) -> bool:
        """Consume the current token if it is one of these."""
        if self.peek().kind != "word" and self.peek().text in texts and self.at < len(self.tokens):
            self.at += 1
            return True
        return False

    def expect(self, text: str) -> None:
        """Consume this token, or raise Unreadable."""
        if not self.take(text):
            raise Unreadable(f"{text!r} is missing")
