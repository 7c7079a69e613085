"""Documents that people and programs write: JSON and YAML, read into what a schema says or refused in one sentence.

A file can hold anything: binary, a list where an object belongs, a word where a number does, a million nested lists. It
may be a folder, a pipe, or larger than the memory. Code that takes such a document apart by hand answers with a
KeyError. Here it is read and compared with a schema (`outcore.documents.schema`) once, at the border; a refusal names
the file, the place inside it, what was found and what was expected. What is written is written whole or not at all:
text goes aside first, so a full disk leaves what was there before.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import stat
import zlib
from pathlib import Path
from typing import Any

import yaml

from outcore.documents.schema import Schema, check
from outcore.errors import OutcoreError

_MOST_BYTES = 256 << 20
_MOST_NODES = 100_000
"""Values of a YAML document with its aliases written out."""


def read_text(path: str | Path, error: type[OutcoreError], kind: str = "text") -> str:
    """The characters of a file; what is no file, too large or binary is refused in a sentence."""
    path = Path(path)
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise error(f"{path} is a folder; expected a file with {kind}")
        if not stat.S_ISREG(status.st_mode):
            raise error(f"{path} is not an ordinary file; expected a file with {kind}")
        if status.st_size > _MOST_BYTES:
            raise error(f"{path} has {status.st_size:,} bytes; expected {kind} of at most {_MOST_BYTES:,}")
        content = path.read_bytes()
        text = (_decompressed(content) if path.suffix == ".gz" else content).decode("utf-8-sig")
    except FileNotFoundError:
        raise error(f"no file {path}; expected one with {kind}") from None
    except (zlib.error, EOFError, gzip.BadGzipFile) as trouble:
        raise error(f"{path} is not compressed {kind}, or is cut off: {trouble}") from None
    except OSError as trouble:
        raise error(f"{path} cannot be read: {trouble.strerror or trouble}") from trouble
    except UnicodeDecodeError as trouble:
        byte = trouble.object[trouble.start]
        raise error(f"{path} is binary (byte 0x{byte:02x} at {trouble.start}); expected {kind} in UTF-8") from None
    if "\0" in text:
        raise error(f"{path} is binary (byte 0x00 at {text.index(chr(0))}); expected {kind} in UTF-8")
    return text


def _decompressed(content: bytes) -> bytes:
    """The inside of a gzip file; not more of it than a document may have."""
    stream = zlib.decompressobj(16 + zlib.MAX_WBITS)
    found = stream.decompress(content, _MOST_BYTES)
    if not stream.eof:
        raise EOFError(f"it does not end within {_MOST_BYTES:,} bytes")
    return found


def read_json(path: str | Path, schema: Schema, error: type[OutcoreError]) -> Any:
    """A JSON file that is what the schema says."""
    text = read_text(path, error, "JSON")
    try:
        value = json.loads(text)
    except json.JSONDecodeError as trouble:
        raise error(f"{path} is not JSON: {trouble.msg} in line {trouble.lineno}, column {trouble.colno}") from None
    except (RecursionError, ValueError) as trouble:  # nested too deeply, or a number of thousands of digits
        raise error(f"{path} is not JSON that can be read: {str(trouble).splitlines()[0]}") from None
    return check(value, schema, path, error)


def read_yaml(path: str | Path, schema: Schema, error: type[OutcoreError]) -> Any:
    """A YAML file that is what the schema says; aliases may be used, but not to build a document without end."""
    text = read_text(path, error, "YAML")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as trouble:
        mark, problem = getattr(trouble, "problem_mark", None), getattr(trouble, "problem", None)
        where = f" in line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        raise error(f"{path} is not YAML: {problem or ' '.join(str(trouble).split())}{where}") from None
    except (RecursionError, ValueError, OverflowError) as trouble:  # a date of month 13 is a ValueError
        raise error(f"{path} is not YAML that can be read: {str(trouble).splitlines()[0]}") from None
    if _nodes(value, {}) > _MOST_NODES:
        raise error(f"{path} holds more than {_MOST_NODES:,} values with its aliases written out; write fewer")
    return check(value, schema, path, error)


def write_text(path: str | Path, text: str) -> None:
    """Write a file as UTF-8, whole or not at all.

    Raises:
        OutcoreError: it cannot be written; names the file and the cause.
    """
    path = Path(path)
    aside = None
    try:
        if path.exists() and not path.is_file():  # /dev/stdout, a pipe
            path.write_text(text, encoding="utf-8")
            return
        target = path.resolve() if path.is_symlink() else path
        aside = target.with_name(f".{target.name}.{os.getpid()}")
        aside.write_text(text, encoding="utf-8")
        aside.replace(target)
    except OSError as trouble:
        if aside is not None:
            with contextlib.suppress(OSError):
                aside.unlink(missing_ok=True)
        raise OutcoreError(f"{path} cannot be written: {trouble.strerror or trouble}; name another file") from None


def _nodes(value: Any, known: dict[int, int]) -> int:
    """Values inside a value, those that are shared counted as often as they are used; endless ones are too many."""
    if not isinstance(value, (dict, list)):
        return 1
    if id(value) not in known:
        known[id(value)] = _MOST_NODES + 1  # met again inside itself
        inside = [*value.keys(), *value.values()] if isinstance(value, dict) else value
        known[id(value)] = min(_MOST_NODES + 1, 1 + sum(_nodes(one, known) for one in inside))
    return known[id(value)]
