"""Tables and folders of slides: one table of results, continued where it stopped, never mixed with another."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from outcore.errors import DataError
from outcore.infer import find_slides, one_slide
from outcore.infer.results import ResultsFolder
from tests.infer.slides import infer, write_work


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_folder_gives_a_row_a_mask_and_a_picture_for_each_slide(tmp_path: Path) -> None:
    folder = write_work(tmp_path / "work", slides=3)
    (folder / "more").mkdir()
    (folder / "slide2.tif").rename(folder / "more" / "slide1.tif")
    shown = infer(folder, "--data", ".", "-o", "../out", "--heat", "stroma", "--classes", "glass,tumour,stroma")
    assert shown.returncode == 0, shown.stderr
    out = tmp_path / "out"
    found = rows(out / "results.csv")
    assert [row["path"] for row in found] == ["slide0.tif", "slide1.tif", "more/slide1.tif"]
    assert all(
        sum(float(row[f"share_{n}"]) for n in ("glass", "tumour", "stroma")) == pytest.approx(1) for row in found
    )
    assert all((out / row[name]).is_file() for row in found for name in ("output", "heat", "overlay"))
    assert len({row["output"] for row in found}) == 3 and found[0]["output"] == "slide0.mask.tif"
    assert "(1 of 3" in shown.stderr and "(3 of 3" in shown.stderr and "3 of 3 slides" in shown.stdout
    assert not list(out.glob(".*"))
    (out / "slide0.mask.tif").rename(folder / "result.tif")  # a map under a name of one's own is no slide
    assert [slide.given for slide in find_slides(folder)] == ["slide0.tif", "slide1.tif", "more/slide1.tif"]
    again = infer(folder, "--data", ".", "-o", "../out", "--heat", "stroma", "--classes", "glass,tumour,stroma")
    assert again.returncode == 0 and "3 of 3 slides are done already" in again.stderr
    assert "results.csv has 3 of 3 slides" in again.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("-a", "pooled=True", "--heat", "1"), "--heat 1 is drawn of maps, and this network gives classes"),
        (("--heat", "tumor", "--classes", "glass,tumour,stroma"), "no such class; did you mean tumour"),
        (("-a", "outputs=dict"), "the model returns 2 outputs (out, aux); infer writes one: say --key out"),
    ],
    ids=lambda value: value[-1] if isinstance(value, tuple) else "",
)
def test_what_no_slide_could_change_is_said_once(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    folder = write_work(tmp_path / "work", slides=2)
    shown = infer(folder, "--data", ".", "-o", "../out", *words)
    assert shown.returncode == 1 and shown.stderr.count(said) == 1 and "slide1" not in shown.stderr, shown.stderr
    assert not (tmp_path / "out" / "failed.csv").exists()


def test_a_table_goes_on_where_it_stopped_and_tries_again_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_work(tmp_path / "work", slides=3)
    (folder / "bad.tif").write_text("no slide")
    names = ["slide0.tif", "bad.tif", "slide1.tif", "slide2.tif"]
    (folder / "t.csv").write_text("path,label\n" + "".join(f"{name},x\n" for name in names))
    scores, calls = one_slide.class_scores, []

    def stop(*args):
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(1)
        return scores(*args)

    told = ("--data", "t.csv", "-a", "pooled=True", "-o", "out", "--json")
    with monkeypatch.context() as patch:
        patch.setattr("outcore.infer.runner.class_scores", stop)
        assert infer(folder, *told).returncode == 130
    assert [row["path"] for row in rows(folder / "out/results.csv")] == ["slide0.tif", "slide1.tif"]
    assert [row["path"] for row in rows(folder / "out/failed.csv")] == ["bad.tif"]
    with (folder / "out/results.csv").open("a") as file:
        file.write("slide2.tif,x,1")  # as a kill in the middle of a row leaves it
    again = infer(folder, *told)
    assert again.returncode == 1 and "1 of 4 slides could not be run; the reasons are in out/failed.csv" in again.stderr
    assert json.loads(again.stdout)["from_before"] == 2
    found = rows(folder / "out/results.csv")
    assert [row["path"] for row in found] == ["slide0.tif", "slide1.tif", "slide2.tif"]
    assert all(sum(float(row[f"probability_{n}"]) for n in range(3)) == pytest.approx(1, abs=1e-5) for row in found)
    (folder / "slide0.tif").rename(folder / "bad.tif")
    (folder / "bad.tif").rename(folder / "slide0.tif")
    (folder / "bad.tif").write_bytes((folder / "slide0.tif").read_bytes())
    assert infer(folder, *told).returncode == 0
    assert len(rows(folder / "out/results.csv")) == 4 and not (folder / "out/failed.csv").exists()


def test_results_of_other_weights_or_settings_are_not_mixed(tmp_path: Path) -> None:
    folder = write_work(tmp_path / "work", slides=2)
    told = ("--data", ".", "-a", "pooled=True", "-o", "../out")
    assert infer(folder, *told).returncode == 0
    before = (tmp_path / "out/results.csv").read_bytes()
    other = infer(folder, *told, "--classes", "a,b,c")
    assert other.returncode == 1 and "holds the results of other weights or settings" in other.stderr
    assert (tmp_path / "out/results.csv").read_bytes() == before
    assert infer(folder, *told, "--classes", "a,b,c", "--overwrite").returncode == 0
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("years of work")
    refused = infer(folder, *told[:-1], "../mine", "--overwrite")
    assert refused.returncode == 1 and "other files in it" in refused.stderr
    missing = infer(folder, "--data", ".")
    assert missing.returncode == 1 and "say a folder for their results: -o results" in missing.stderr
    for name in ("found.csv", "found.tif"):  # each was made a folder of that name
        refused = infer(folder, "--data", ".", "-o", name)
        assert refused.returncode == 1 and "-o found" in refused.stderr.rsplit("results.csv", 1)[1], refused.stderr
        assert not (folder / name).exists()


def test_slides_are_found_once_in_a_stable_order(tmp_path: Path) -> None:
    for name in (
        "b/x.tif",
        "a/x.svs",
        "a/.hidden.tif",
        "c.zarr/zarr.json",
        "notes.txt",
        ".git/y.tif",
        "b/x-mask.tif",
        "a/x_mask.png",
        "b/my-mask.tif",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    found = find_slides(tmp_path)
    assert [slide.given for slide in found] == ["c.zarr", "a/x.svs", "b/my-mask.tif", "b/x.tif"]
    assert found[0].name == "c" and found[1].name != found[3].name and found[1].name.startswith("x-")


def test_two_runs_do_not_write_into_one_folder(tmp_path: Path) -> None:
    about = {"weights": "a"}
    with ResultsFolder(tmp_path / "out", about):
        with (
            pytest.raises(DataError, match="is being written by another process"),
            ResultsFolder(tmp_path / "out", about),
        ):
            pass
        assert (tmp_path / "out" / ".lock").exists()
    with ResultsFolder(tmp_path / "out", about):
        pass
    assert not (tmp_path / "out" / ".lock").exists()
