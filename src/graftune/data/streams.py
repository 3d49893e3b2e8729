"""Opens text files, compressed or not, in UTF-8 or in the encodings that Excel and Windows write.

Compression is recognised by a file's first bytes, not by its name. Text is read as UTF-8 unless it is invalid; another
encoding is reported in a note, and a text that could have several is refused with the command that converts it. A
detector by letter statistics would accept more files and train on wrong letters now and then.
"""

from __future__ import annotations

import bz2
import codecs
import io
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from graftune.errors import GraftuneError
from graftune.io.files import open_plain

TEXT_FORMATS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv")
FORMATS = (*TEXT_FORMATS, ".parquet")
COMPRESSED = {".gz": b"\x1f\x8b", ".zst": b"\x28\xb5\x2f\xfd", ".bz2": b"BZh", ".xz": b"\xfd7zXZ\x00"}
SCANNED = 64 << 20  # bytes looked at to tell the encoding
CHUNK = 1 << 20
PACKED = 1 << 12  # compressed bytes that are unpacked at a time: they may become a hundred megabytes
MAX_UNPACKED = 64.0  # GiB: the setting's default
CONVERT = "convert it, as with: iconv -f WINDOWS-1252 -t UTF-8 OLD > NEW (naming its true encoding)"

# Letters and signs of Western European text in Windows-1252. Those by which Polish, Czech or Turkish text in a code
# page of its own would show are not among them.
_WESTERN = bytes(
    byte
    for first, last in (
        (0x80, 0x80), (0x85, 0x85), (0x8C, 0x8C), (0x91, 0x94), (0x96, 0x97), (0x9C, 0x9C), (0xA0, 0xA1), (0xA3, 0xA3),
        (0xA7, 0xA7), (0xA9, 0xA9), (0xAB, 0xAB), (0xAE, 0xAE), (0xB0, 0xB0), (0xB4, 0xB4), (0xB7, 0xB7), (0xBB, 0xBB),
        (0xBF, 0xCF), (0xD1, 0xD6), (0xD8, 0xDC), (0xDF, 0xEF), (0xF1, 0xF6), (0xF8, 0xFC),
    )
    for byte in range(first, last + 1)
)  # fmt: skip
_OTHERS = {
    b"PAR1": ("is a Parquet file", "name it .parquet"),
    b"PK\x03\x04": ("is a zip archive or an Excel workbook", "save the sheet as CSV, or unpack it"),
    b"version https://git-lfs": ("is a Git LFS pointer, not the data", "run `git lfs pull` where it came from"),
    b"<!DOCTYPE": ("is a web page, not data", "download the file itself"),
    b"<html": ("is a web page, not data", "download the file itself"),
    b"ARROW1": ("is an Arrow file", "write it as Parquet: Dataset.to_parquet"),
}


@dataclass(frozen=True)
class TextFile:
    """A text file with its compression and encoding. `head`: its first bytes, unpacked."""

    path: Path
    shown: str
    compression: str
    encoding: str
    head: bytes
    max_unpacked: float


def format_of(path: str | Path) -> str | None:
    """The kind of a data file by its name, without the ending of a compression; None for anything else."""
    name = Path(path).name.lower()
    packed = next((ending for ending in COMPRESSED if name.endswith(ending)), "")
    known = TEXT_FORMATS if packed else FORMATS
    suffix = Path(name.removesuffix(packed)).suffix
    return suffix if suffix in known else None


def look(path: Path, shown: str, note: Callable[[str], None], max_unpacked: float) -> TextFile:
    """Finds the compression and encoding of a text file; GraftuneError if it cannot be read. `note` is called with a
    sentence about anything unusual."""
    with reading(shown):
        with open_plain(path) as file:
            head = file.read(64)
        packed = next((ending for ending, magic in COMPRESSED.items() if head.startswith(magic)), "")
        with _unpacked(path, packed, shown, max_unpacked) as stream:
            head = stream.read(CHUNK)
            if not head:
                raise GraftuneError("is empty", where=shown, fix="give a file with at least one record")
            for magic, (what, fix) in _OTHERS.items():
                if head.startswith(magic):
                    raise GraftuneError(what, where=shown, fix=fix)
            encoding = _encoding(head, stream)
    named = next((ending for ending in COMPRESSED if path.name.lower().endswith(ending)), "")
    if packed != named:
        note(f"{shown} is {'compressed (' + packed + ')' if packed else 'not compressed'}, whatever its name")
    if encoding.startswith("utf-16"):
        note(f"{shown} is UTF-16 text and was read as such")
    elif encoding == "cp1252":
        note(f"{shown} is not UTF-8 and was read as Windows-1252 (Latin-1); if letters look wrong, convert it")
    return TextFile(path, shown, packed, encoding, head, max_unpacked)


def _encoding(head: bytes, stream: BinaryIO) -> str:
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "utf-16"
    if len(head) > 1 and 0 in head[:2]:
        return "utf-16-be" if head[0] == 0 else "utf-16-le"
    decoder, chunk, seen, letters = codecs.getincrementaldecoder("utf-8")(), head, 0, False
    while chunk and seen < SCANNED:
        try:
            letters = not decoder.decode(chunk).isascii() or letters
        except UnicodeDecodeError:
            return "cp1252" if not letters and _western(chunk + stream.read(CHUNK)) else "utf-8-sig"
        seen += len(chunk)
        chunk = stream.read(CHUNK)
    return "utf-8-sig"


def _western(data: bytes) -> bool:
    """Whether Windows-1252 is the only likely reading: known letters, standing alone as accented letters do, and none
    that would be a letter in UTF-8."""
    high = data.translate(None, bytes(range(128)))
    if high.translate(None, _WESTERN):
        return False
    return re.search(rb"[\x80-\xff]{4}|[\xc2-\xdf][\x80-\xbf]|[\xe0-\xef][\x80-\xbf]{2}", data) is None


@contextmanager
def text_of(opened: TextFile) -> Iterator[io.TextIOWrapper]:
    """The file's text with its line ends as they are."""
    with binary_of(opened) as stream:
        yield io.TextIOWrapper(stream, encoding=opened.encoding, newline="\n")


@contextmanager
def binary_of(opened: TextFile) -> Iterator[BinaryIO]:
    unpacked = _unpacked(opened.path, opened.compression, opened.shown, opened.max_unpacked)
    with reading(opened.shown), unpacked as stream:
        yield stream


@contextmanager
def reading(shown: str) -> Iterator[None]:
    """Turn errors of reading, unpacking and decoding into a GraftuneError."""
    try:
        yield
    except UnicodeDecodeError:
        raise GraftuneError("is not UTF-8 text", where=shown, fix=CONVERT) from None
    except EOFError as error:
        raise GraftuneError(
            f"is damaged or cut off ({error})", where=shown, fix="download or compress it again"
        ) from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise GraftuneError(f"cannot be read ({reason})", where=shown, fix="check the file's permissions") from None


@contextmanager
def _unpacked(path: Path, packed: str, shown: str, max_unpacked: float) -> Iterator[BinaryIO]:
    with open_plain(path) as file:
        yield io.BufferedReader(_Unpacked(file, packed, shown, max_unpacked), CHUNK) if packed else file


def _opener(packed: str, shown: str) -> tuple[Callable[[], Any], type[Exception]]:
    """(a function that returns a new decompressor, with `decompress`, `eof` and `unused_data`, for this compression;
    the exception that the decompressor raises for a damaged stream)."""
    if packed == ".zst":
        try:
            import zstandard
        except ImportError:
            raise GraftuneError(
                "reading .zst needs zstandard", where=shown, fix="pip install graftune[zstd], or unpack it with zstd -d"
            ) from None
        return zstandard.ZstdDecompressor().decompressobj, zstandard.ZstdError
    openers: dict[str, tuple[Callable[[], Any], type[Exception]]] = {
        ".gz": (lambda: zlib.decompressobj(zlib.MAX_WBITS | 16), zlib.error),  # with gzip's header
        ".bz2": (bz2.BZ2Decompressor, OSError),
        ".xz": (lzma.LZMADecompressor, lzma.LZMAError),
    }
    return openers[packed]


class _Unpacked(io.RawIOBase):
    """Reads the streams of a compressed file as one, up to a limit: they may unpack to a thousand times its size.
    (zstandard's own reader accepts a file that was cut off.)"""

    def __init__(self, file: BinaryIO, packed: str, shown: str, max_unpacked: float):
        self.file, self.shown, self.limit = file, shown, max_unpacked
        self.opener, self.failure = _opener(packed, shown)
        self.left = int(max_unpacked * 2**30)
        self.stream: Any = None  # the one that is open
        self.ready, self.rest = memoryview(b""), b""

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        while not self.ready:
            packed, self.rest = self.rest or self.file.read(PACKED), b""
            if not packed:
                if self.stream is not None:
                    raise EOFError("the file ends within a compressed stream")
                return 0
            if self.stream is None and not (packed := packed.lstrip(b"\0")):  # a file may be padded with zeros
                continue
            self.stream = self.stream or self.opener()
            try:
                self.ready = memoryview(self.stream.decompress(packed))
            except self.failure as error:
                raise EOFError(str(error)) from None
            if self.stream.eof:
                self.stream, self.rest = None, self.stream.unused_data
        count = min(len(target), len(self.ready))
        target[:count], self.ready = self.ready[:count], self.ready[count:]
        self.left -= count
        if self.left < 0:
            raise too_large(self.shown, self.limit)
        return count


def too_large(shown: str, max_unpacked: float) -> GraftuneError:
    return GraftuneError(
        f"is larger than {max_unpacked:g} GiB when it is unpacked",
        where=shown,
        fix="raise max_unpacked if that is meant",
    )
