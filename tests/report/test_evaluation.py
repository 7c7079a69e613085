"""The figures of a validation against scikit-learn, and the pictures made of them."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, confusion_matrix, f1_score, roc_auc_score

from outcore.report.evaluation import evaluate
from outcore.report.evaluation_svg import confusion_svg, curves_svg
from outcore.report.run import read_run
from outcore.report.thumbnails import png, thumbnail
from outcore.train.run_folder.predictions import Predictions


def table(path: Path, count: int, classes: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (count,), generator=draw)
    output = torch.randn(count, classes, generator=draw) + torch.nn.functional.one_hot(labels, classes)
    output = (output * 4).round() / 4  # ties
    rows = Predictions()
    for start in range(0, count, 7):
        part = slice(start, start + 7)
        rows.add([f"slide-{i}.tif" for i in range(count)[part]], output[part], labels[part])
    assert rows.write(path)
    return labels.numpy(), output.softmax(1).numpy()


@pytest.mark.parametrize("classes", [2, 4])
def test_areas_and_the_matrix_are_those_of_scikit_learn(tmp_path: Path, classes: int) -> None:
    labels, scores = table(tmp_path / "p.csv", 90, classes)
    found = evaluate(tmp_path / "p.csv", ("benign",))
    assert found is not None and found.classes[:2] == ("benign", "class 1")
    assert np.array_equal(found.confusion, confusion_matrix(labels, scores.argmax(1)))
    positives = [1] if classes == 2 else range(classes)
    for curve, recall, k in zip(found.roc, found.precision_recall, positives, strict=True):
        assert curve.area == pytest.approx(roc_auc_score(labels == k, scores[:, k]), abs=1e-4)
        assert recall.area == pytest.approx(average_precision_score(labels == k, scores[:, k]), abs=1e-4)
        assert curve.area_low < curve.area < curve.area_high and recall.area_low < recall.area < recall.area_high
    assert sum(found.counts) == 90 and found.accuracy_low < found.accuracy < found.accuracy_high
    losses = [e["loss"] for e in found.examples]
    assert losses == sorted(losses, reverse=True)


def test_more_slides_give_narrower_intervals(tmp_path: Path) -> None:
    widths = []
    for count in (30, 480):
        table(tmp_path / f"{count}.csv", count, 2)
        found = evaluate(tmp_path / f"{count}.csv")
        assert found is not None
        widths.append(found.roc[0].area_high - found.roc[0].area_low)
    assert widths[1] < 0.5 * widths[0]


def test_a_class_that_never_occurs_has_no_curve_and_stops_nothing(tmp_path: Path) -> None:
    rows = Predictions()
    rows.add(["a", "b"], torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0]))
    rows.write(tmp_path / "p.csv")
    found = evaluate(tmp_path / "p.csv")
    assert found is not None and np.isnan(found.roc[0].area) and found.counts == (2, 0)
    json.dumps(found.to_json(), allow_nan=False)
    for picture in (confusion_svg(found), curves_svg(found.roc, kind="roc"), curves_svg(found.roc, kind="pr")):
        ElementTree.fromstring(picture)
    (tmp_path / "p.csv").rename(tmp_path / "predictions.csv")
    (tmp_path / "run.json").write_text("{}")
    assert list(read_run(tmp_path)["evaluation"]["pictures"]) == ["confusion"]  # no empty axes


def test_pictures_name_their_axes_and_the_areas(tmp_path: Path) -> None:
    table(tmp_path / "p.csv", 60, 3)
    found = evaluate(tmp_path / "p.csv", ("a", "b", "c & d"))
    assert found is not None
    words = [e.text or "" for e in ElementTree.fromstring(curves_svg(found.roc, kind="roc")).iter()]
    assert {"false positive rate", "true positive rate"} <= set(words)
    assert any(w.startswith("c & d: AUC 0.") for w in words)
    assert "predicted class" in [e.text for e in ElementTree.fromstring(confusion_svg(found)).iter()]


def test_maps_have_their_agreement_with_the_mask_worst_first(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    output, masks = torch.randn(3, 3, 8, 8, generator=draw), torch.randint(3, (3, 8, 8), generator=draw)
    output[1] = torch.nn.functional.one_hot(masks[1], 3).movedim(-1, 0)  # one that is right everywhere
    masks[2] = 0
    rows = Predictions()
    rows.add(["a.tif", "b.tif"], output[:2], masks[:2])
    rows.add(["glass.tif"], output[2:], masks[2:])
    rows.write(tmp_path / "predictions.csv")
    (tmp_path / "run.json").write_text("{}")
    found = read_run(tmp_path)["maps"]["examples"]
    assert [e["example"] for e in found] == ["glass.tif", "a.tif", "b.tif"]
    said, true = output[0].argmax(0).numpy().ravel(), masks[0].numpy().ravel()
    assert found[1]["dice"] == pytest.approx(f1_score(true, said, labels=[1, 2], average="macro"), abs=1e-5)
    assert found[1]["accuracy"] == pytest.approx((said == true).mean(), abs=1e-5)
    assert found[2]["dice"] == found[2]["accuracy"] == 1


def test_the_worst_maps_and_the_slides_that_are_wrong_have_a_picture_where_the_slide_is_there(tmp_path: Path) -> None:
    tifffile = pytest.importorskip("tifffile")
    for name in ("near.tif", "far.tif", "right.tif"):
        tifffile.imwrite(tmp_path / name, np.full((32, 32, 3), 99, np.uint8), tile=(16, 16))
    run = tmp_path / "runs" / "first"
    run.mkdir(parents=True)
    (tmp_path / "near.tif").rename(run / "near.tif")
    (run / "run.json").write_text("{}")
    rows = [f"{n}.tif,{dice},0.5" for n, dice in (("near", 0.1), ("gone", 0.2), ("far", 0.3), ("glass", ""))]
    (run / "maps.csv").write_text("\n".join(["example,dice,accuracy", *rows]) + "\n")
    maps = read_run(run)["maps"]
    assert [e["example"] for e in maps["examples"]] == ["near.tif", "gone.tif", "far.tif", "glass.tif"]
    assert maps["examples"][3]["dice"] is None and set(maps["thumbnails"]) == {"near.tif", "far.tif"}
    assert all(picture.startswith("data:image/png") for picture in maps["thumbnails"].values())
    predictions = Predictions()
    output = torch.tensor([[0.0, 5.0], [5.0, 0.0], [5.0, 0.0]])
    predictions.add(["near.tif", "gone.tif", "right.tif"], output, torch.tensor([0, 1, 0]))
    predictions.write(run / "predictions.csv")
    found = read_run(run)["evaluation"]
    assert set(found["thumbnails"]) == {"near.tif"} and {"confusion", "roc"} <= set(found["pictures"])
    assert read_run(run, evaluation=False)["maps"] is None


def test_maps_and_values_are_not_listed(tmp_path: Path) -> None:
    for output, targets in (
        (torch.zeros(2, 3, 4, 4), torch.zeros(2, 4, 4, dtype=torch.long)),
        (torch.zeros(2, 1), torch.zeros(2)),
        ({"scores": torch.zeros(2, 2)}, torch.zeros(2, dtype=torch.long)),
    ):
        rows = Predictions()
        rows.add(["a", "b"], output, targets)
        assert not rows.write(tmp_path / "p.csv") and not (tmp_path / "p.csv").exists()
    one = Predictions()
    one.add(["a", "b"], torch.tensor([[2.0], [-2.0]]), torch.tensor([1, 0]))
    assert one.write(tmp_path / "p.csv")
    with (tmp_path / "p.csv").open() as file:
        assert [row["predicted"] for row in csv.DictReader(file)] == ["1", "0"]


def test_a_thumbnail_is_a_png_that_others_read(tmp_path: Path) -> None:
    tifffile, image = pytest.importorskip("tifffile"), pytest.importorskip("PIL.Image")
    pixels = torch.randint(256, (3, 5, 7), dtype=torch.uint8)
    (tmp_path / "a.png").write_bytes(png(pixels))
    assert np.array_equal(np.asarray(image.open(tmp_path / "a.png")), pixels.permute(1, 2, 0).numpy())
    tifffile.imwrite(tmp_path / "s.tif", np.zeros((64, 96, 3), np.uint8), tile=(16, 16))
    made = thumbnail(tmp_path / "s.tif")
    assert made is not None and made.startswith("data:image/png;base64,")
    (tmp_path / "broken.tif").write_bytes(b"II*")
    assert thumbnail(tmp_path / "broken.tif") is None
