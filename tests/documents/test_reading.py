"""Documents are read in one place: whatever a file holds, the answer is what was promised or one sentence."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from outcore.documents.reading import read_json, read_yaml
from outcore.documents.schema import Either, Flag, ListOf, MapOf, Maybe, Number, OneOf, Record, Text, Whole, check
from outcore.errors import MachineError, OutcoreError
from outcore.machine import Machine, parse

SCHEMA = Record(
    {"name": Text(1), "sizes": ListOf(Whole(least=1), 2, 2)},
    {"rate": Maybe(Number(above=0)), "kind": OneOf(("a", "b")), "on": Flag(), "of": MapOf(Either((Text(), Whole())))},
)
GOOD = {"name": "n", "sizes": [1, 2], "rate": 0.5, "kind": "a", "on": True, "of": {"x": "y", "z": 1}}


def test_what_is_promised_comes_through() -> None:
    assert check(GOOD, SCHEMA, "file", OutcoreError) is GOOD
    check({"name": "n", "sizes": [1, 2], "rate": None}, SCHEMA, "file", OutcoreError)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"name": ""}, "a.json: name is ''; expected text that is not empty"),
        ({"name": 3}, "a.json: name is 3; expected text"),
        ({"sizes": [1, 0]}, "a.json: sizes[1] is 0; expected a whole number of at least 1"),
        ({"sizes": [1, True]}, "a.json: sizes[1] is true; expected a whole number"),
        ({"sizes": [1, 2.0]}, "a.json: sizes[1] is 2.0; expected a whole number"),
        ({"sizes": [1]}, "a.json: sizes is [1]; expected a list of 2"),
        ({"sizes": "12"}, "a.json: sizes is '12'; expected a list of 2"),
        ({"rate": 0}, "a.json: rate is 0; expected a finite number above 0, or null"),
        ({"rate": float("nan")}, "a.json: rate is nan; expected a finite number"),
        ({"rate": float("inf")}, "a.json: rate is inf; expected a finite number"),
        ({"kind": "c"}, "a.json: kind is 'c'; expected one of a, b"),
        ({"on": 1}, "a.json: on is 1; expected true or false"),
        ({"of": []}, "a.json: of is []; expected an object"),
        ({"of": {"x": 1.5}}, "a.json: of.x is 1.5; expected text or a whole number"),
        ({"nmae": "n"}, "a.json: nmae is not a name that is known here; expected name?"),
    ],
)
def test_a_refusal_says_file_place_found_and_expected(change: dict[str, Any], said: str) -> None:
    with pytest.raises(OutcoreError) as refused:
        check(GOOD | change, SCHEMA, "a.json", OutcoreError)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is not JSON: Expecting value in line 1, column 1"),
        (b"{", "is not JSON"),
        (b"\x89PNG\r\n", "is binary (byte 0x89 at 0); expected JSON in UTF-8"),
        (b'{"a": "\x00"}', "is binary (byte 0x00 at 7)"),
        ('{"name": "é"}'.encode("latin-1"), "is binary (byte 0xe9 at 10)"),
        (b"[" * 200_000, "nested|is not JSON"),
        (b"9" * 10_000, "is not JSON that can be read|the document is"),
        (b"[1]", "the document is [1]; expected an object with named values"),
        (b"null", "the document is null; expected an object"),
        (b'{"sizes": [1, 2]}', "name is not there; expected text"),
    ],
)
def test_files_that_hold_something_else(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(OutcoreError) as refused:
        read_json(path, SCHEMA, OutcoreError)
    assert any(part in str(refused.value) for part in said.split("|")) and str(path) in str(refused.value)


def test_what_is_no_file_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, said in ((tmp_path, "is a folder"), (tmp_path / "pipe", "not an ordinary"), (tmp_path / "no", "no file")):
        with pytest.raises(OutcoreError, match=said):
            read_json(path, SCHEMA, OutcoreError)
    with pytest.raises(OutcoreError, match="not an ordinary file"):
        read_yaml("/dev/zero", SCHEMA, OutcoreError)


def test_a_byte_order_mark_is_no_content(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(GOOD).encode())
    assert read_json(tmp_path / "a.json", SCHEMA, OutcoreError) == GOOD


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place inside a document."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(p for key, one in inside for p in places(one, (*path, key)))]


def put(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copied = dict(value) if isinstance(value, dict) else list(value)
    copied[path[0]] = put(copied[path[0]], path[1:], new)
    return copied


def test_a_machine_with_anything_anywhere_is_read_or_refused(tmp_path: Path) -> None:
    document = json.loads(json.dumps(parse("2x2xv100").to_json()))
    path = tmp_path / "machine.json"
    wrong = 0
    for place in places(document):
        for new in (None, [], {}, "text", -1, 0, 1.5, True, float("nan"), 10**400):
            path.write_text(json.dumps(put(document, place, new)))
            try:
                assert isinstance(Machine.load(path), Machine)
            except MachineError:
                wrong += 1
    assert wrong > 500


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"devices": "v100x4", "nodes": "four"}, "nodes is 'four'; expected a whole number"),
        ({"devices": "v100x4", "nodes": -1}, "nodes is -1"),
        ({"devices": "v100x4", "between_nodes": 7}, "between_nodes is 7; expected text"),
        ({"devices": "v100x4", "nodse": 2}, "nodse is not a name that is known here; expected nodes?"),
        ({"devices": 3}, "devices is 3; expected a list"),
    ],
)
def test_a_cluster_by_hand_is_refused_by_field(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    path = tmp_path / "lab.json"
    path.write_text(json.dumps({"version": 1, "name": "lab"} | change))
    with pytest.raises(MachineError) as refused:
        parse(str(path))
    assert said in str(refused.value) and str(path) in str(refused.value)


def test_what_is_no_yaml_is_said_with_its_place_and_without_the_parser_s_words(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("job: [\n")
    with pytest.raises(OutcoreError) as refused:
        read_yaml(path, SCHEMA, OutcoreError)
    said = f"{path} is not YAML: expected the node content, but found '<stream end>' in line 2, column 1"
    assert str(refused.value) == said
