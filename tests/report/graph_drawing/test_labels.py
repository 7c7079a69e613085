import pytest

from outcore.report.graph_drawing.labels import count, kind_of, shape_label, shorten, summary, text_width


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (999, "999"),
        (9408, "9.41k"),
        (999_999, "1M"),
        (25_557_032, "25.6M"),
        (1_750_000_000, "1.75G"),
    ],
)
def test_counts_are_short(number: int, text: str) -> None:
    assert count(number) == text


def test_the_batch_is_left_out_only_where_it_leads() -> None:
    assert shape_label((2, 64, 112, 112), batch=2) == "64×112×112"
    assert shape_label((8, 64), batch=2) == "[8×64]"
    assert shape_label((2, 64)) == "2×64"
    assert shape_label(()) == "scalar"


@pytest.mark.parametrize(
    ("type_name", "detail", "text"),
    [
        ("Conv2d", "3, 64, kernel_size=(7, 7), stride=(2, 2), padding=(3, 3), bias=False", "3→64 7×7 /2"),
        ("Conv2d", "8, 8, kernel_size=(3, 3), stride=(1, 1), groups=8, dilation=(2, 2)", "8→8 3×3 dil 2 g8"),
        ("MaxPool2d", "kernel_size=3, stride=2, padding=1, dilation=1, ceil_mode=False", "3×3 /2"),
        ("Linear", "in_features=2048, out_features=1000, bias=True", "2048→1000"),
        ("BatchNorm2d", "64, eps=1e-05, momentum=0.1", ""),
        ("AdaptiveAvgPool2d", "output_size=(1, 1)", "to 1×1"),
        ("Dropout", "p=0.5, inplace=False", "p=0.5"),
        ("Upsample", "scale_factor=2.0, mode='nearest'", "×2"),
        ("Odd", "unbalanced (, [ text", ""),
    ],
)
def test_settings_are_summarised(type_name: str, detail: str, text: str) -> None:
    assert summary(type_name, detail) == text


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ConvTranspose3d", "convolution"),
        ("GroupNorm", "norm"),
        ("relu_", "activation"),
        ("max_pool2d", "activation"),
        ("MultiheadAttention", "attention"),
        ("add_", "combine"),
        ("addcmul", "other"),
        ("flatten", "other"),
    ],
)
def test_kinds_are_told_by_names(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_shortened_text_is_no_wider_than_asked() -> None:
    text = "a_very_long_block_name_that_does_not_fit"
    cut = shorten(text, 12, 100)
    assert cut.endswith("…")
    assert text_width(cut, 12) <= 100
    assert shorten("conv1", 12, 100) == "conv1"
