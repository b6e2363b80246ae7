from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pega_omni_plugin.models.piper.text import (
    FIRST_CHARS,
    FIRST_LIMIT,
    PIECE_CHARS,
    normalise,
    speakable,
    split,
)

LISTED = (
    "the of A house Then dr. Mr. e.g. U.S. J. 3.14 1,000 No. fig. 7 etc. p.m. end. what? stop! so, but; (yes) “Ah.” "
    "- — … ... x\u200dy 🎉 [[ ]] I"
)
WORDS = st.sampled_from(LISTED.split())
PROSE = st.lists(st.tuples(WORDS, st.sampled_from([" ", " ", " ", "\n", "\n\n", "  \t"])), max_size=150).map(
    lambda pairs: "".join(word + space for word, space in pairs)
)


@settings(deadline=None)
@given(st.one_of(PROSE, st.text(max_size=600)))
def test_pieces_lose_and_repeat_nothing(text: str) -> None:
    pieces = split(text)
    spoken = normalise(text)
    assert "".join(pieces).replace(" ", "") == spoken.replace(" ", "")
    if all(len(word) <= FIRST_CHARS for word in spoken.split()):
        assert " ".join(pieces).split() == spoken.split()


@settings(deadline=None)
@given(st.one_of(PROSE, st.text(max_size=600), st.text("ab", max_size=900)))
def test_pieces_are_short_and_never_empty(text: str) -> None:
    pieces = split(text)
    assert all(piece and piece == piece.strip() for piece in pieces)
    assert all(len(piece) <= PIECE_CHARS for piece in pieces)
    assert all(len(piece) <= FIRST_LIMIT for piece in pieces[:1])


@settings(deadline=None)
@given(st.text())
def test_normalising_twice_changes_nothing(text: str) -> None:
    assert normalise(normalise(text)) == normalise(text)


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("It rained. We stayed in! Why? No idea.", ["It rained.", "We stayed in!", "Why?", "No idea."]),
        ("all lower case. it is split too.", ["all lower case.", "it is split too."]),
        ("He said “Stop.” She did.", ["He said “Stop.”", "She did."]),
        ("First line\n\nsecond paragraph", ["First line", "second paragraph"]),
        ("A wrapped\nline.", ["A wrapped line."]),
        ("Buy:\n- milk\n- bread", ["Buy:", "- milk", "- bread"]),
        ("1. Mix. 2. Bake.", ["1. Mix.", "2. Bake."]),
        ("In the U.S. The law is old.", ["In the U.S.", "The law is old."]),
        ("No. I won't.", ["No.", "I won't."]),
    ],
)
def test_sentences_are_pieces(text: str, pieces: list[str]) -> None:
    assert split(text) == pieces


@pytest.mark.parametrize(
    "text",
    [
        "Dr. Smith and Mrs. Jones met Prof. Lee.",
        "It costs 3.50 or 1,000.25 at 10.30 today.",
        "Fruit, e.g. apples, i.e. Malus, is good.",
        "The U.S. Army and the U.K. Navy.",
        "J. R. R. Tolkien wrote it.",
        "See fig. 3 in no. 12 of vol. 2.",
        "We met at 5 p.m. Monday at St. James.",
        "Acme Inc. and Sons Ltd. merged.",
        "“Really?” he said.",
        "Well... perhaps.",
        "Version 1.2.3 of example.com is out.",
    ],
)
def test_stops_inside_a_sentence_do_not_end_it(text: str) -> None:
    assert split(text) == [text]


def test_a_long_first_sentence_is_cut_after_a_clause() -> None:
    text = "When the train came at last, the people who had waited for an hour picked up their bags, and they all left."
    assert split(text)[0] == "When the train came at last,"


def test_a_first_sentence_without_clauses_is_cut_between_words_only_when_very_long() -> None:
    words = " ".join(["word"] * 23)
    assert FIRST_CHARS < len(words) <= FIRST_LIMIT
    assert split(words) == [words]
    first, rest = split(words + " word word")
    assert len(first) <= FIRST_CHARS
    assert f"{first} {rest}" == words + " word word"


def test_a_word_longer_than_a_piece_is_cut_inside() -> None:
    assert "".join(split("x" * 1000)) == "x" * 1000


def test_what_the_phonemizer_cannot_take_is_normalised() -> None:
    assert normalise("a\x00b \ud800c [[d]] [[[e") == "a b c [d]] [e"
    assert normalise("soft\u00adly 👩\u200d👧 1\ufe0f\u20e3 👍🏽 20 °C ™") == "softly 1 20 °C ™"


@pytest.mark.parametrize(("text", "expected"), [("...", False), ("— !?", False), ("", False), ("7", True), ("é", True)])
def test_only_letters_and_digits_are_speakable(text: str, expected: bool) -> None:
    assert speakable(text) is expected
