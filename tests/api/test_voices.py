from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pytest
import soundfile
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pega_omni_plugin.api import voices
from pega_omni_plugin.api.voices import (
    SAMPLE_RATE,
    StoredVoice,
    VoiceConflict,
    VoiceGone,
    VoiceLimit,
    VoiceNameError,
    VoiceStore,
    VoicesUnwritable,
    check_name,
    voices_folder,
)

HOUR_NS = 3_600 * 10**9


def noise(seed: int = 0, samples: int = 2_400) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).uniform(-0.5, 0.5, samples).astype(np.float32)


@pytest.fixture
def store(tmp_path: Path) -> VoiceStore:
    return VoiceStore(tmp_path / "voices")


def keep(store: VoiceStore, name: str = "Anna", seed: int = 0, now: int = 100, **fields: Any) -> StoredVoice:
    given = {"pcm": noise(seed), "transcript": "Hello.", "description": None} | fields
    return store.create(name=name, now=now, **given)


def age(folder: Path) -> None:
    """As if nothing had been written here for an hour."""
    at = folder.stat().st_mtime_ns - HOUR_NS
    os.utime(folder, ns=(at, at))


def files(store: VoiceStore) -> set[str]:
    return {path.name for path in store.folder.iterdir()} - {".lock"}


def test_a_voice_is_found_by_id_and_by_name_in_any_case(store: VoiceStore) -> None:
    voice = keep(store, "Änna", language="de")
    assert voice == StoredVoice(voice.id, "Änna", 100, "Hello.", None, "de", True)
    for name in (voice.id, "Änna", "änNA", " Änna ", "A\u0308nna"):
        assert store.get(name) == voice
    assert store.get("Anna") is None and store.get("") is None


def test_voices_survive_a_restart_and_are_listed_newest_first(store: VoiceStore) -> None:
    kept = [keep(store, f"Voice {number}", number, now=number) for number in range(3)]
    assert list(VoiceStore(store.folder).list()) == kept[::-1]


def test_a_store_without_a_folder_is_empty_and_makes_none(store: VoiceStore, tmp_path: Path) -> None:
    assert list(store.list()) == [] and store.get("Anna") is None and not store.delete("voice_" + "0" * 24)
    assert not store.folder.exists()
    (tmp_path / "file").touch()
    assert list(VoiceStore(tmp_path / "file" / "voices").list()) == []


@given(
    pcm=st.integers(1, 500).flatmap(lambda n: st.binary(min_size=2 * n, max_size=2 * n)),
    transcript=st.none() | st.text(st.characters(codec="utf-8"), max_size=40),
    description=st.none() | st.text(st.characters(codec="utf-8"), max_size=40),
    now=st.integers(0, 2**40),
)
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_kept_comes_back(
    tmp_path: Path, pcm: bytes, transcript: str | None, description: str | None, now: int
) -> None:
    samples = np.frombuffer(pcm, dtype=np.int16).astype(np.float32) / 32_768
    store = VoiceStore(tmp_path)
    voice = store.create(name="Anna", pcm=samples, transcript=transcript, description=description, now=now)
    again = VoiceStore(tmp_path).get("anna")
    assert again == voice
    assert np.array_equal(VoiceStore(tmp_path).audio(again), samples)
    # What was read makes the same voice.
    same = store.create(
        name="Anna", pcm=store.audio(voice), transcript=transcript, description=description, now=now + 1
    )
    assert same == voice
    assert store.delete(voice.id)


def test_the_recording_is_16_bit_flac_at_24_khz_and_clipped(store: VoiceStore) -> None:
    voice = keep(store, pcm=np.array([-2.0, -1.0, 0.25, 1.0, 2.0], dtype=np.float32))
    info = soundfile.info(store.folder / f"{voice.id}.flac")
    assert (info.format, info.subtype, info.samplerate, info.channels) == ("FLAC", "PCM_16", SAMPLE_RATE, 1)
    assert store.audio(voice).tolist() == [-1, -1, 0.25, 32_767 / 32_768, 32_767 / 32_768]
    assert store.audio(voice).dtype == np.float32


def test_the_same_content_is_the_same_voice_with_the_newer_name(store: VoiceStore) -> None:
    first = keep(store, "Anna", now=100, language="en")
    second = keep(store, "Berta", now=200, language="de")
    assert second == StoredVoice(first.id, "Berta", 100, "Hello.", None, "de", True)
    assert list(store.list()) == [second]
    assert store.get("Anna") is None


def test_each_part_of_the_content_makes_another_voice(store: VoiceStore) -> None:
    ids = {
        keep(store, name, **fields).id
        for name, fields in {
            "a": {},
            "b": {"seed": 1},
            "c": {"transcript": None},
            "d": {"transcript": ""},
            "e": {"transcript": None, "description": "Hello."},
            "f": {"transcript": "Hel", "description": "lo."},
            "g": {"pcm": None, "description": "Hello."},
        }.items()
    }
    assert len(ids) == 7
    assert all(len(id) == 30 and id.startswith("voice_") for id in ids)


def test_a_described_voice_has_no_recording(store: VoiceStore) -> None:
    voice = keep(store, pcm=None, transcript=None, description="A calm old man.")
    assert not voice.has_audio and files(store) == {f"{voice.id}.json"}
    with pytest.raises(VoiceGone, match="no recording"):
        store.audio(voice)


def test_a_voice_of_nothing_is_refused(store: VoiceStore) -> None:
    with pytest.raises(ValueError, match="a recording or a description"):
        keep(store, pcm=None, transcript=None)


@pytest.mark.parametrize("pcm", [np.zeros((2, 2)), np.zeros(0), np.array([0.1, np.nan]), np.array([np.inf])])
def test_what_is_no_mono_audio_is_refused(store: VoiceStore, pcm: npt.NDArray[Any]) -> None:
    with pytest.raises(ValueError, match=r"shape \[samples\]"):
        keep(store, pcm=pcm.astype(np.float32))
    assert not store.folder.exists()


def test_a_name_in_use_is_a_conflict_in_any_case_and_changes_nothing(store: VoiceStore) -> None:
    anna = keep(store, "Anna", 0)
    with pytest.raises(VoiceConflict, match=f"{anna.id} has the name 'Anna'"):
        keep(store, "ANNA ", 1)
    other = keep(store, "Berta", 1)
    with pytest.raises(VoiceConflict):
        keep(store, "anna", 1)
    assert set(store.list()) == {anna, other}


def test_a_full_store_takes_no_other_voice_but_a_new_name_for_its_own(tmp_path: Path) -> None:
    store = VoiceStore(tmp_path, max_voices=2)
    keep(store, "a", 0), keep(store, "b", 1)
    with pytest.raises(VoiceLimit, match="2 voices"):
        keep(store, "c", 2)
    assert keep(store, "c", 1).name == "c"
    assert store.delete(keep(store, "a", 0).id)
    assert keep(store, "d", 2).name == "d"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("", "0 characters; 1 to 64"),
        (" \t ", "0 characters"),
        ("a" * 65, "65 characters; 1 to 64"),
        ("a\0b", r"U\+0000 at 1"),
        ("a\nb", r"U\+000A"),
        ("a\x7f", r"U\+007F"),
        ("a\u202eb", r"U\+202E"),
        ("a\u2028b", r"U\+2028"),
        ("\ud800", r"U\+D800"),
        ("voice_" + "0" * 24, "looks like a voice's id"),
        ("VOICE_" + "A" * 24, "looks like a voice's id"),
    ],
)
def test_names_that_are_not_allowed_are_refused_by_reason(store: VoiceStore, name: str, reason: str) -> None:
    with pytest.raises(VoiceNameError, match=reason):
        keep(store, name)
    assert not store.folder.exists()


@pytest.mark.parametrize("name", ["a", "a" * 64, "../../etc/passwd", "Zoë 2 (warm)", "小明", "'; --", "%s {0}", "👩"])
def test_any_other_name_is_kept_as_it_is(store: VoiceStore, name: str) -> None:
    voice = keep(store, name)
    assert voice.name == name
    assert files(store) == {f"{voice.id}.json", f"{voice.id}.flac"}


@given(name=st.text(max_size=70))
def test_a_checked_name_is_bounded_printable_and_stays(name: str) -> None:
    try:
        kept = check_name(name)
    except VoiceNameError:
        return
    assert 1 <= len(kept) <= 64 and kept.isprintable()
    assert check_name(kept) == kept
    kept.encode()


HOSTILE = ["", ".", "../x", "voice_../../../etc/passwd00000", "voice_" + "0" * 23, "voice_" + "0" * 24 + "\n"]
HOSTILE += [
    "voice_" + "G" * 24,
    "voice_" + "0" * 25,
    "/etc/passwd",
    "voice_" + "\u0660" * 24,
    "voice_" + "*" * 24,
    "a\0b",
]


@given(id=st.sampled_from(HOSTILE) | st.text(max_size=40))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_ids_of_another_form_touch_no_path(tmp_path: Path, id: str) -> None:
    store = VoiceStore(tmp_path / "voices")
    if not (tmp_path / "voices").exists():
        keep(store)
    (tmp_path / "x.json").touch()
    before = files(store)
    assert not store.delete(id)
    assert store.get(id) is None or id.strip().casefold() == "anna"
    stranger = StoredVoice(id, "x", 0, None, None, None, True)
    for touch in (
        lambda: store.audio(stranger),
        lambda: store.encoding(stranger, "k"),
        lambda: store.keep_encoding(stranger, "k", {}),
    ):
        with pytest.raises(ValueError, match="24 hexadecimal digits"):
            touch()
    assert files(store) == before and (tmp_path / "x.json").exists()


def test_a_deleted_voice_is_gone_with_all_of_it(store: VoiceStore) -> None:
    voice, other = keep(store, "Anna", 0), keep(store, "Berta", 1)
    store.keep_encoding(voice, "model", {"codes": np.arange(4)})
    assert store.delete(voice.id)
    assert not store.delete(voice.id)
    assert files(store) == {f"{other.id}.json", f"{other.id}.flac"}
    assert list(store.list()) == [other]
    with pytest.raises(VoiceGone, match="create the voice again"):
        store.audio(voice)


def test_encodings_are_kept_per_key_until_the_voice_is_deleted(store: VoiceStore) -> None:
    voice = keep(store)
    arrays = {"codes": np.arange(32).reshape(2, 16), "speaker": noise().astype(np.float16)}
    assert store.encoding(voice, "a") is None
    store.keep_encoding(voice, "a", arrays)
    found = VoiceStore(store.folder).encoding(voice, "a")
    assert found is not None and found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert np.array_equal(found[name], array) and found[name].dtype == array.dtype
    assert store.encoding(voice, "b") is None
    store.delete(voice.id)
    store.keep_encoding(voice, "a", arrays)
    assert store.encoding(voice, "a") is None and files(store) == set()


@pytest.mark.parametrize("key", ["", "../x", "a/b", "a.b", "a" * 65, "é"])
def test_keys_of_another_form_are_refused(store: VoiceStore, key: str) -> None:
    voice = keep(store)
    with pytest.raises(ValueError, match="letters, digits"):
        store.keep_encoding(voice, key, {})
    with pytest.raises(ValueError, match="letters, digits"):
        store.encoding(voice, key)


def test_objects_are_not_kept(store: VoiceStore) -> None:
    voice = keep(store)
    with pytest.raises(ValueError, match="Object arrays"):
        store.keep_encoding(voice, "a", {"bad": np.array([{}], dtype=object)})
    assert files(store) == {f"{voice.id}.json", f"{voice.id}.flac"}


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"no zip at all", b"\x80\x04K\x01."])
def test_a_damaged_encoding_is_made_anew(store: VoiceStore, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    voice = keep(store)
    store.keep_encoding(voice, "a", {"codes": np.arange(4)})
    (store.folder / f"{voice.id}.a.npz").write_bytes(content)
    assert store.encoding(voice, "a") is None
    assert "made anew" in caplog.text


def test_a_damaged_recording_says_so(store: VoiceStore) -> None:
    voice = keep(store)
    (store.folder / f"{voice.id}.flac").write_bytes(b"fLaC")
    with pytest.raises(VoiceGone, match="create the voice again"):
        store.audio(voice)


FOREIGN_ID = "voice_" + "a" * 24
FIELDS = {
    "id": FOREIGN_ID, "name": "x", "created_at": 1, "transcript": None, "description": "d", "language": None,
    "has_audio": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (FOREIGN_ID, b""),
        (FOREIGN_ID, orjson.dumps(FIELDS)[:40]),
        (FOREIGN_ID, b"\xff\xfe"),
        (FOREIGN_ID, b"[]"),
        (FOREIGN_ID, b"{}"),
        (FOREIGN_ID, b"[" * 100_000),
        (FOREIGN_ID, orjson.dumps(FIELDS | {"more": 1})),
        (FOREIGN_ID, orjson.dumps(FIELDS | {"id": "../x"})),
        (FOREIGN_ID, orjson.dumps(FIELDS | {"name": 3})),
        (FOREIGN_ID, orjson.dumps(FIELDS | {"created_at": True})),
        (FOREIGN_ID, orjson.dumps(FIELDS | {"transcript": []})),
        (FOREIGN_ID, orjson.dumps(FIELDS | {"has_audio": "yes"})),
        (FOREIGN_ID, orjson.dumps(FIELDS | {"has_audio": True})),
        ("notes", orjson.dumps(FIELDS)),
    ],
)
def test_a_half_written_or_foreign_file_is_skipped_with_a_warning(
    store: VoiceStore, name: str, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    voice = keep(store)
    (store.folder / f"{name}.json").write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert list(VoiceStore(store.folder).list()) == [voice]
    assert f"{name}.json is skipped" in caplog.text
    assert keep(store, "Berta", 1).name == "Berta"


def test_the_file_that_the_tests_of_foreign_files_damage_is_a_voice(store: VoiceStore) -> None:
    keep(store)
    (store.folder / f"{FOREIGN_ID}.json").write_bytes(orjson.dumps(FIELDS))
    assert store.get("x") == StoredVoice(**FIELDS)  # type: ignore[arg-type]


def test_a_folder_in_the_way_is_skipped(store: VoiceStore, caplog: pytest.LogCaptureFixture) -> None:
    voice = keep(store)
    (store.folder / f"{FOREIGN_ID}.json").mkdir()
    assert list(store.list()) == [voice]
    assert "is skipped" in caplog.text


def test_files_are_read_again_only_after_a_change(store: VoiceStore, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []

    def parse(path: Path, original: Any = voices._parse) -> StoredVoice:
        read.append(path)
        voice: StoredVoice = original(path)
        return voice

    keep(store)
    age(store.folder)
    monkeypatch.setattr(voices, "_parse", parse)
    for _ in range(5):
        assert len(store.list()) == 1
    assert len(read) == 1
    keep(VoiceStore(store.folder), "Berta", 1)
    assert len(store.list()) == 2
    age(store.folder)
    VoiceStore(store.folder).delete(store.list()[0].id)
    assert len(store.list()) == 1


def test_a_change_in_the_same_tick_of_the_file_systems_clock_is_seen(store: VoiceStore) -> None:
    first = keep(store)
    at = store.folder.stat().st_mtime_ns
    assert list(store.list()) == [first]
    second = keep(VoiceStore(store.folder), "Berta", 1, now=200)
    os.utime(store.folder, ns=(at, at))
    assert list(store.list()) == [second, first]


def test_a_folder_that_cannot_be_written_is_an_error_on_writing_only(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    store = VoiceStore(tmp_path / "file" / "voices")
    assert list(store.list()) == []
    with pytest.raises(VoicesUnwritable, match="PEGA_VOICES_DIR"):
        keep(store)


def test_a_write_that_fails_leaves_nothing(store: VoiceStore, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(store)
    before = files(store)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(voices.os, "fsync", full)
    with pytest.raises(VoicesUnwritable, match="No space left"):
        keep(store, "Berta", 1)
    assert files(store) == before


def test_leftovers_of_a_killed_process_go_with_the_next_write(store: VoiceStore) -> None:
    keep(store)
    (store.folder / ".abc.partial").write_bytes(b"half")
    voice = keep(store)
    assert files(store) == {f"{voice.id}.json", f"{voice.id}.flac"}


WRITER = """
import sys
from pathlib import Path
import numpy as np
from pega_omni_plugin.api.voices import VoiceConflict, VoiceStore

store, worker, refused = VoiceStore(Path(sys.argv[1])), int(sys.argv[2]), 0
for number in range(20):
    pcm = np.full(2_400, (20 * worker + number) / 100, dtype=np.float32)
    try:
        store.create(name=f"Name {number}", pcm=pcm, transcript=None, description=None, now=0)
    except VoiceConflict:
        refused += 1
print(refused)
"""


def test_processes_that_write_at_once_keep_names_unique_and_files_whole(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    writers = [
        subprocess.Popen([*command, str(worker)], stdout=subprocess.PIPE, stderr=subprocess.PIPE) for worker in range(2)
    ]
    store = VoiceStore(tmp_path)
    while any(writer.poll() is None for writer in writers):
        for voice in store.list():
            assert len(store.audio(voice)) == 2_400
    refused = [int(writer.communicate()[0]) for writer in writers]
    assert sorted(voice.name for voice in store.list()) == sorted(f"Name {number}" for number in range(20))
    assert sum(refused) == 20


def test_the_folder_is_the_one_named_or_in_the_users_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEGA_VOICES_DIR", "/data/voices")
    assert voices_folder() == Path("/data/voices")
    monkeypatch.delenv("PEGA_VOICES_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert voices_folder() == Path("/cache/pega-omni/voices")
    monkeypatch.setenv("HOME", "/home/me")
    for ignored in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert voices_folder() == Path("/home/me/.cache/pega-omni/voices")
