"""All foreign models under every policy: gradients, loss and buffers of plain training bit for bit.

In fp32 as they are, and in bf16 autocast with channels last. What there is to compare with is told by `examine`; for
many processes at a time on one GPU see benchmarks/within-exactness.
"""

from __future__ import annotations

import pytest
import torch

from ..foreign.sample import quarter, rotating
from ..foreign.zoo import QUICK, ZOO, Foreign, by_name
from .examine import PRECISIONS, Verdict, examine


@pytest.mark.slow
@pytest.mark.foreign
@pytest.mark.parametrize(("foreign", "precision"), quarter((f, p) for f in ZOO for p in PRECISIONS), ids=str)
def test_all_foreign_models(foreign: Foreign, precision: str) -> None:
    _judge(examine(foreign, torch.device("cpu"), precision))


@pytest.mark.foreign
@pytest.mark.parametrize(("foreign", "precision"), rotating([(f, p) for f in QUICK for p in PRECISIONS], 4), ids=str)
def test_some_foreign_models_others_with_every_commit(foreign: Foreign, precision: str) -> None:
    _judge(examine(foreign, torch.device("cpu"), precision))


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.foreign
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("foreign", ZOO, ids=str)
def test_all_foreign_models_on_a_gpu(foreign: Foreign, precision: str) -> None:
    _judge(examine(foreign, torch.device("cuda", 0), precision))


@pytest.mark.foreign
@pytest.mark.parametrize("name", ["hf/bert", "hf/mixtral", "hf/wav2vec2_masked"])
def test_what_there_is_to_compare_with(name: str) -> None:
    assert examine(by_name(name), torch.device("cpu"), "fp32").outcome == "equal"


def _judge(verdict: Verdict) -> None:
    if verdict.outcome in ("not trainable", "runs as it is"):
        pytest.skip(f"{verdict.outcome}: {verdict.note}")
    assert verdict.outcome != "unequal", verdict.differing
