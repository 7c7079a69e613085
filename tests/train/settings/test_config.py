"""Settings: from a file, over it by dotted words, refused with the nearest that is known, and written out whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from outcore.errors import ConfigError
from outcore.train.settings.config import Config


def test_words_go_over_the_file_and_everything_is_written_out(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("")
    (tmp_path / "run.yaml").write_text("job: job.py\nplan: {memory: 8GiB, ranks: 2}\ntrain: {epochs: 3}\n")
    made = Config.load(tmp_path / "run.yaml", ["plan.memory=20GiB", "optimizer.lr=1e-3", "metrics=[auc, dice]"])
    assert (made.plan.memory, made.plan.ranks, made.train.epochs) == ("20GiB", 2, 3)
    assert made.optimizer.lr == 1e-3 and made.metrics == ("auc", "dice")
    assert made.job == str(tmp_path / "job.py")
    (tmp_path / "again.yaml").write_text(made.to_yaml())
    assert Config.load(tmp_path / "again.yaml") == made


def test_a_section_without_settings_is_all_defaults() -> None:
    assert Config.read({"job": "a.py", "train": None}).train == Config().train


def test_arguments_of_an_optimizer_are_free() -> None:
    made = Config.read({}, ["optimizer.name=SGD", "optimizer.arguments.momentum=0.9"])
    assert made.optimizer.arguments == {"momentum": 0.9}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan.memroy=8GiB"], "no setting plan.memroy; did you mean plan.memory"),
        (["traim.epochs=3"], "no setting traim; did you mean train"),
        (["train.epochs=many"], "train.epochs='many' was given; it must be a whole number"),
        (["train.epochs=0"], "train.epochs=0 was given; it is 1 or more"),
        (["train.precision=fp8"], "it must be fp32 or bf16 or fp16"),
        (["train.deterministic=1"], "must be true or false"),
        (["data.validation=1.5"], "a share lies between 0 and 1"),
        (["train=3"], "train is 3; it holds settings"),
        (["epochs"], "'epochs' is not a setting; write for example plan.memory=20GiB"),
        (["train.clip=[1]"], "a number"),
        (["train.clip=-1"], "train.clip=-1.0 was given; it is the largest norm of the gradients"),
        (["train.clip=0"], "must be a number above 0"),
        (["train.clip=.nan"], "must be a number above 0"),
        (["optimizer.lr=-0.1"], "optimizer.lr=-0.1 was given; a learning rate is a number of at least 0"),
        (["data.std=[1, 0, 1]"], "data.std=0.0 was given"),
        (["data.level=-1"], "levels are numbered from 0"),
        (["watch=nope"], "watch=nope is no figure; known are loss"),
        (["watch=acuracy"], "did you mean accuracy"),
    ],
)
def test_what_is_not_known_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("[", r"\[")):
        Config.read({"job": "a.py"}, words)


ALIASES = "a: &a [x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [*{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    "text",
    ["- a\n- b\n", "job: [", "just words", "", "1: 2", "\x00\x01", "job: 2001-13-45", "[" * 5000, ALIASES, "&a [*a]"],
)
def test_a_file_that_holds_no_settings_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"run\.yaml"):
        Config.load(tmp_path / "run.yaml")


def test_differences_are_named(tmp_path: Path) -> None:
    one, two = Config.read({}, ["train.seed=1"]), Config.read({}, ["train.seed=2"])
    assert one.differences(two) == {"train.seed": (1, 2)} and one.differences(one) == {}
