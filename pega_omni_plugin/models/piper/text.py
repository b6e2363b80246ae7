"""Text to pieces: what the voice is given to speak at a time.

A piece is a sentence, so that the first one is heard while the rest is still made. Long sentences are cut at clauses,
else between words, and the first piece of all is kept short because nothing is heard before it is encoded.
"""

from __future__ import annotations

import re
import unicodedata

FIRST_CHARS = 80
"""Wanted length of the first piece, in characters: about five seconds of speech, heard after 0.15 s on one core."""

FIRST_LIMIT = 120
"""Longest first piece. A sentence without a clause to cut at may be this long, because a cut elsewhere is heard as a
pause of 0.3 s; each character more delays the first sound by 2 ms."""

PIECE_CHARS = 200
"""Longest later piece, in characters. Encoding holds a thread for about 2 ms a character."""


def _words(listed: str) -> frozenset[str]:
    return frozenset(listed.split())


_CLOSERS = "\"'\u201d\u2019)]}\u00bb"
_OPENERS = "\"'\u201c\u2018([{\u00ab"
_PARAGRAPH = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*•]|\d+[.)])\s)")
_CLAUSE = re.compile(rf"(?:[,;:)\u2013\u2014]|\s-)[{re.escape(_CLOSERS)}]*\s")
_DOTTED = re.compile(r"\d*[^\W\d_](?:\.[^\W\d_])*")
_PICTURES = 0x2300
"""Symbols (category So) from here on are pictures; below are signs that are read out, such as ° and ™."""

_NEVER_LAST = _words(
    "mr mrs ms mx dr prof rev hon gen col sgt capt cpt lt cmdr maj sen rep gov st mt messrs e.g i.e cf viz vs"
)
"""Words with a full stop that always go on."""

_BEFORE_NUMBER = _words("no nos fig figs vol vols ch sec art eq p pp jan feb mar apr jun jul aug sep sept oct nov dec")
"""Words with a full stop that go on when a number follows."""

_SOMETIMES_LAST = _words("etc inc ltd co corp jr sr dept est approx ave blvd rd ft al")
"""Words with a full stop that end a sentence only where the next word is one that starts sentences."""

_STARTERS = _words(
    "The A An This That These Those There It He She We They You I His Her My Our Their And But So Or If When While "
    "Then In On At For After Before What Who Where Why How Please"
)


def normalise(text: str) -> str:
    """Return ``text`` as the voice reads it: words with one space between them.

    Control characters and lone surrogates (which the phonemizer cannot take) and emoji (which it would name one by
    one) count as space; invisible format characters are dropped. ``[[`` becomes ``[``: it would switch the
    phonemizer from text to phoneme input.
    """
    return re.sub(r"\[{2,}", "[", " ".join("".join(map(_readable, text)).split()))


def speakable(text: str) -> bool:
    """Whether there is a letter or a digit; marks alone would be named one by one."""
    return any(map(str.isalnum, text))


def split(text: str) -> list[str]:
    """Cut ``text`` into pieces to speak one after another.

    The pieces joined by spaces have exactly the words of ``normalise(text)``; only a single word longer than a piece
    is cut inside. The first piece has at most ``FIRST_LIMIT`` characters, the others ``PIECE_CHARS``.
    """
    pieces: list[str] = []
    for paragraph in _PARAGRAPH.split(text):
        for sentence in _sentences(normalise(paragraph)):
            rest = sentence
            while rest:
                end = _cut(rest, PIECE_CHARS, PIECE_CHARS) if pieces else _cut(rest, FIRST_CHARS, FIRST_LIMIT)
                pieces.append(rest[:end].rstrip())
                rest = rest[end:].lstrip()
    return pieces


def _readable(character: str) -> str:
    category = unicodedata.category(character)
    if category == "Cf" or character in "\ufe0e\ufe0f\u20e3":  # joiners and the variants of emoji
        return ""
    if category in ("Cc", "Cs", "Co") or "\U0001f3fb" <= character <= "\U0001f3ff":  # the last are skin tones
        return " "
    return " " if category == "So" and ord(character) >= _PICTURES else character


def _sentences(text: str) -> list[str]:
    sentences: list[str] = []
    sentence: list[str] = []
    words = text.split()
    for word, following in zip(words, [*words[1:], ""], strict=False):
        sentence.append(word)
        if not following or _ends_sentence(word, following, first=len(sentence) == 1):
            sentences.append(" ".join(sentence))
            sentence = []
    return sentences


def _ends_sentence(word: str, following: str, first: bool) -> bool:
    core = word.rstrip(_CLOSERS)
    if not core.endswith((".", "!", "?", "…")):
        return False
    goes_on = following.lstrip(_OPENERS)[:1].islower()
    if goes_on and core != word:  # "Really?" he said
        return False
    if core.endswith(("..", "…")):
        return not goes_on
    if not core.endswith("."):
        return True
    stem = core[:-1].lstrip(_OPENERS)
    known = stem.lower()
    if known in _NEVER_LAST or (first and stem.isdigit()):  # the number of a list item belongs to the item
        return False
    if known in _BEFORE_NUMBER:
        return not following[:1].isdigit()
    if known in _SOMETIMES_LAST or _DOTTED.fullmatch(stem):  # etc.  J.  U.S.  5p.m.
        return following.rstrip(",") in _STARTERS
    return True


def _cut(text: str, wanted: int, limit: int) -> int:
    """Where the first piece of ``text`` ends: with it, else after a clause, else after a word, else inside the word."""
    if len(text) <= wanted:
        return len(text)
    clauses = [match.end() for match in _CLAUSE.finditer(text, 0, limit + 1) if match.end() > wanted // 4]
    if clauses:
        return max((end for end in clauses if end <= wanted), default=clauses[0])
    if len(text) <= limit:
        return len(text)
    space = text.rfind(" ", 0, wanted + 1)
    return space if space > 0 else wanted
