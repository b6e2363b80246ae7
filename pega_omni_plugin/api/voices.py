"""Cloned and described voices, kept in a folder: shared by processes, surviving restarts.

A voice is ``<id>.json``, beside it ``<id>.flac`` if it has a recording and ``<id>.<key>.npz`` for what models made of
it. Files are written under another name and renamed, so a reader sees all of a file or none; the JSON comes last when a
voice is made and goes first when it is deleted. Writers take turns by a lock on the folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import logging
import os
import re
import tempfile
import threading
import time
import unicodedata
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import orjson
import soundfile

logger = logging.getLogger(__name__)

SAMPLE_RATE = 24_000
"""Of recordings as they are given and kept, Hz."""

MAX_NAME_CHARS = 64
MAX_VOICES = 1_000

_ID = re.compile(r"voice_[0-9a-f]{24}")
_KEY = re.compile(r"[0-9A-Za-z_-]{1,64}")
_LOCK = ".lock"
_PARTIAL = ".partial"

_SETTLED_NS = 1_000_000_000
"""A folder that changed less than this before it was read is read again: file systems count time in steps, so what
changed in the same step could not be told from what was read."""

_MAX_JSON_BYTES = 1 << 20


class VoiceNameError(ValueError):
    """A voice may not have this name."""


class VoiceConflict(ValueError):
    """Another voice has this name."""


class VoiceLimit(ValueError):
    """There are as many voices as are allowed."""


class VoiceGone(LookupError):
    """The voice was deleted, maybe by another process, or its recording cannot be read."""


class VoicesUnwritable(RuntimeError):
    """The folder of voices cannot be written."""


@dataclass(frozen=True)
class StoredVoice:
    """A voice in the store. ``created_at`` is in seconds since 1970; ``transcript`` is what the recording says."""

    id: str
    name: str
    created_at: int
    transcript: str | None
    description: str | None
    language: str | None
    has_audio: bool


def voices_folder() -> Path:
    """``PEGA_VOICES_DIR``, or ``pega-omni/voices`` in the user's cache folder (``XDG_CACHE_HOME``, ``~/.cache``)."""
    named = os.environ.get("PEGA_VOICES_DIR")
    if named:
        return Path(named)
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # Relative paths there are to be ignored (XDG Base Directory Specification 0.8).
    return (cache if cache.is_absolute() else Path.home() / ".cache") / "pega-omni" / "voices"


def check_name(name: str) -> str:
    """The name as it is kept: composed (Unicode NFC), without spaces around it.

    Raises:
        VoiceNameError: it is empty, too long, has characters that do not print, or looks like an id.
    """
    kept = unicodedata.normalize("NFC", name).strip()
    if not 1 <= len(kept) <= MAX_NAME_CHARS:
        raise VoiceNameError(f"the name has {len(kept)} characters; 1 to {MAX_NAME_CHARS} are allowed")
    for position, character in enumerate(kept):
        if not character.isprintable():
            code = f"U+{ord(character):04X}"
            raise VoiceNameError(f"the name has a character that does not print, {code} at {position}; leave it out")
    if _ID.fullmatch(kept.casefold()):
        raise VoiceNameError("the name looks like a voice's id; choose another")
    return kept


class VoiceStore:
    """The voices in ``folder``, which is made when the first is kept. May be used from several threads.

    Writing waits for other writers and for the disk: call it from a thread.
    """

    def __init__(self, folder: Path, max_voices: int = MAX_VOICES) -> None:
        self.folder = folder
        self.max_voices = max_voices
        self._reading = threading.Lock()
        self._read: Sequence[StoredVoice] = ()
        self._read_of: int | None = None

    def list(self) -> Sequence[StoredVoice]:
        """All voices, the newest first. Reads their files only after the folder has changed."""
        with self._reading:
            now = time.time_ns()
            try:
                changed = self.folder.stat().st_mtime_ns
            except (FileNotFoundError, NotADirectoryError):
                return ()
            if changed != self._read_of:
                self._read = self._scan()
                self._read_of = changed if now - changed > _SETTLED_NS else None
            return self._read

    def get(self, id_or_name: str) -> StoredVoice | None:
        """The voice with this id, or else with this name in whatever case."""
        name = _folded(id_or_name)
        voices = self.list()
        for voice in voices:
            if voice.id == id_or_name:
                return voice
        return next((voice for voice in voices if _folded(voice.name) == name), None)

    def audio(self, voice: StoredVoice) -> npt.NDArray[np.float32]:
        """The recording of a voice, mono at ``SAMPLE_RATE``, shape ``[samples]``.

        Raises:
            VoiceGone: it has none, or no longer.
        """
        if not voice.has_audio:
            raise VoiceGone(f"voice {voice.id} has no recording; it is a description")
        try:
            samples, rate = soundfile.read(self._path(voice.id, ".flac"), dtype="float32")
        except soundfile.LibsndfileError as error:
            raise VoiceGone(f"the recording of voice {voice.id} is gone or damaged; create the voice again") from error
        if rate != SAMPLE_RATE or samples.ndim != 1:
            raise VoiceGone(
                f"the recording of voice {voice.id} is not mono at {SAMPLE_RATE} Hz; create the voice again"
            )
        return samples

    def create(
        self,
        *,
        name: str,
        pcm: npt.NDArray[np.float32] | None,
        transcript: str | None,
        description: str | None,
        language: str | None = None,
        now: int,
    ) -> StoredVoice:
        """Keep a voice. What makes its id is what it sounds like: given the same again, the voice has the newer name
        and language, and is as old as it was.

        Args:
            name: As ``check_name`` allows.
            pcm: The recording, mono at ``SAMPLE_RATE``, shape ``[samples]``, kept with 16 bits.
            transcript: What the recording says.
            description: What the voice sounds like; a voice has this, a recording, or both.
            language: Of the recording.
            now: Seconds since 1970.

        Raises:
            VoiceNameError: the name is not allowed.
            VoiceConflict: another voice has the name.
            VoiceLimit: there are ``max_voices``.
            VoicesUnwritable: the folder cannot be written.
            ValueError: there is neither recording nor description, or ``pcm`` is not as above.
        """
        kept = check_name(name)
        if pcm is None and not description:
            raise ValueError("a voice needs a recording or a description")
        samples = None if pcm is None else _int16(pcm)
        id = _content_id(samples, transcript, description)
        with self._writing():
            voices = self._scan()
            same = next((voice for voice in voices if voice.id == id), None)
            for other in voices:
                if other.id != id and _folded(other.name) == _folded(kept):
                    raise VoiceConflict(f"voice {other.id} has the name {other.name!r}; choose another, or delete it")
            if same is None and len(voices) >= self.max_voices:
                raise VoiceLimit(f"{len(voices)} voices are kept, which is the most allowed; delete one")
            created_at = now if same is None else same.created_at
            voice = StoredVoice(id, kept, created_at, transcript, description, language, samples is not None)
            if samples is not None:
                with self._replacing(self._path(id, ".flac")) as file:
                    file.write(_flac(samples))
            with self._replacing(self._path(id, ".json")) as file:
                file.write(orjson.dumps(asdict(voice), option=orjson.OPT_INDENT_2))
        return voice

    def delete(self, id: str) -> bool:
        """Remove a voice and all that was kept of it; whether there was one.

        Raises:
            VoicesUnwritable: the folder cannot be written.
        """
        if not _ID.fullmatch(id) or not self._path(id, ".json").exists():
            return False
        with self._writing():
            try:
                self._path(id, ".json").unlink()
            except FileNotFoundError:  # by another process, meanwhile
                return False
            for path in self.folder.glob(f"{id}.*"):
                path.unlink()
        return True

    def encoding(self, voice: StoredVoice, key: str) -> dict[str, npt.NDArray[Any]] | None:
        """What ``keep_encoding`` kept of a voice under ``key``, if anything."""
        path = self._encoding_path(voice, key)
        try:
            with np.load(path, allow_pickle=False) as arrays:
                return dict(arrays)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
            logger.warning("%s cannot be read and is made anew: %s", path, error)
            return None

    def keep_encoding(self, voice: StoredVoice, key: str, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Keep what a model made of a voice, until the voice is deleted. Nothing is kept of one that is already.

        Args:
            voice: Whose it is.
            key: Names the model and its weights: letters, digits, ``_`` and ``-``, at most 64.
            arrays: By name, of any type but objects.

        Raises:
            VoicesUnwritable: the folder cannot be written.
            ValueError: the key is of another form, or an array holds objects.
        """
        path = self._encoding_path(voice, key)
        if not self.folder.exists():
            return
        with self._writing():
            if self._path(voice.id, ".json").exists():
                with self._replacing(path) as file:
                    np.savez(file, allow_pickle=False, **dict(arrays))

    def _path(self, id: str, ending: str) -> Path:
        if not _ID.fullmatch(id):
            raise ValueError(f"voice id {id[:40]!r} is not of the form voice_ and 24 hexadecimal digits")
        return self.folder / f"{id}{ending}"

    def _encoding_path(self, voice: StoredVoice, key: str) -> Path:
        if not _KEY.fullmatch(key):
            raise ValueError(f"key {key[:70]!r} is not of 1 to 64 letters, digits, _ and -")
        return self._path(voice.id, f".{key}.npz")

    def _scan(self) -> Sequence[StoredVoice]:
        """The voices as their files say, newest first."""
        found = []
        for path in self.folder.glob("*.json"):
            try:
                voice = _parse(path)
                if voice.has_audio and not self._path(voice.id, ".flac").exists():
                    raise ValueError("its recording is missing")
            except FileNotFoundError:  # deleted since it was listed
                continue
            except (OSError, ValueError) as error:
                logger.warning("%s is skipped: %s", path, error)
                continue
            found.append(voice)
        return tuple(sorted(found, key=lambda voice: (-voice.created_at, voice.id)))

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Alone among all that write, in this process and others. Failures of the folder get its name and the fix."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(self.folder / _LOCK, "wb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                for path in self.folder.glob(f"*{_PARTIAL}"):  # of a process that was killed
                    path.unlink()
                yield
        except OSError as error:
            raise VoicesUnwritable(
                f"voices cannot be kept in {self.folder}: {error}; name a writable folder in PEGA_VOICES_DIR"
            ) from error

    @contextmanager
    def _replacing(self, path: Path) -> Iterator[IO[bytes]]:
        """A file that becomes ``path`` at once when all of it is on disk, and vanishes if that fails."""
        with tempfile.NamedTemporaryFile(dir=self.folder, prefix=".", suffix=_PARTIAL, delete=False) as file:
            try:
                yield file
                file.flush()
                os.fsync(file.fileno())
                os.replace(file.name, path)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise


def _folded(name: str) -> str:
    return unicodedata.normalize("NFC", name).strip().casefold()


def _int16(pcm: npt.NDArray[np.float32]) -> npt.NDArray[np.int16]:
    if pcm.ndim != 1 or not len(pcm) or not np.isfinite(pcm).all():
        raise ValueError(f"pcm must be finite samples of shape [samples], got shape {list(pcm.shape)}")
    # The scale by which 16-bit files are read as floats, so that what was read is written again as it was.
    return np.rint(np.clip(pcm * np.float32(32_768), -32_768, 32_767)).astype(np.int16)


def _flac(samples: npt.NDArray[np.int16]) -> bytes:
    # In memory first: what goes wrong in writing a file does not come out of libsndfile.
    file = io.BytesIO()
    soundfile.write(file, samples, SAMPLE_RATE, format="FLAC", subtype="PCM_16")
    return file.getvalue()


def _content_id(samples: npt.NDArray[np.int16] | None, transcript: str | None, description: str | None) -> str:
    digest = hashlib.sha256()
    given = (
        None if samples is None else samples.astype("<i2").tobytes(),
        None if transcript is None else transcript.encode(),
        None if description is None else description.encode(),
    )
    for part in given:
        # With lengths, so that no two contents run together to the same bytes.
        digest.update(b"-" if part is None else b"%d:" % len(part))
        digest.update(part or b"")
    return f"voice_{digest.hexdigest()[:24]}"


def _parse(path: Path) -> StoredVoice:
    """A voice from its JSON file.

    Raises:
        ValueError: the file is not of this store, or not whole.
    """
    with path.open("rb") as file:
        document = orjson.loads(file.read(_MAX_JSON_BYTES))
    if not _ID.fullmatch(path.stem):
        raise ValueError("its name is no voice's id")
    if not isinstance(document, dict) or document.keys() != StoredVoice.__annotations__.keys():
        raise ValueError(f"its fields are not {', '.join(StoredVoice.__annotations__)}")
    voice = StoredVoice(**document)
    texts = (voice.transcript, voice.description, voice.language)
    if (
        voice.id != path.stem
        or not isinstance(voice.name, str)
        or type(voice.created_at) is not int
        or not all(text is None or isinstance(text, str) for text in texts)
        or not isinstance(voice.has_audio, bool)
    ):
        raise ValueError("a field has the wrong type, or its id is another")
    return voice
