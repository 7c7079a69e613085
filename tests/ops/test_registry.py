"""The catalogue and its facets against torch: names that are recorded, calls that are made twice, memory that is
shared."""

from __future__ import annotations

import ast
import copy
import inspect
import re
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import outcore
from outcore.cost.buffers import buffers_of
from outcore.cost.measured.saved_bytes import account
from outcore.cost.predicted.saved_bytes import kept
from outcore.graph.naming import function_name
from outcore.graph.structure import leaves
from outcore.ops import Facet, find, kinds, names, operation, operations
from outcore.ops.recompute_encode import again
from outcore.ops.saved import SAVED
from outcore.ops.signature import SIGNATURES
from outcore.ops.traits import SHARING
from outcore.program.policies import RECOMPUTE
from tests.ops.samples import Sample, samples

SAMPLES = list(samples())
RECORDED_AS = {"radd", "rmul", "truediv", "rtruediv", "truediv_", "mod", "upsample", "logsigmoid"}
"""Names that this version of torch records as another of the same operation."""
NO_BACKWARD = {"floor_divide", "floordiv"}
TWO_TENSORS = {*kinds("convolution", "transposed convolution"), "linear", "matmul", "mm", "bmm"}
"""Their samples multiply the input with itself, or with a weight that is no parameter."""
OURS = {"Conv1D"}
"""Classes of layers that are not torch's."""


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Calls(nn.Module):
    """Calls one after the other, each on the scaled input, so that its input needs a gradient."""

    def __init__(self, calls: list[Sample]) -> None:
        super().__init__()
        self.calls = calls
        self.scale = nn.Parameter(torch.ones(len(calls)))

    def forward(self, *images: Tensor) -> list[Tensor]:
        found = []
        for i, (sample, image) in enumerate(zip(self.calls, images, strict=True)):
            made = [t for _, t in leaves(sample.call(image * self.scale[i]), Tensor)]
            found += [t.float().square() * self.scale[i] for t in made]
        return found


class CalledNames(TorchFunctionMode):
    """Notes the names of all functions that are called, as a recording names them."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(function_name(func))
        return func(*args, **(kwargs or {}))


def inputs(calls: list[Sample], requires_grad: bool = False) -> list[Tensor]:
    torch.manual_seed(0)
    return [(0.05 + 0.9 * torch.rand(s.shape)).requires_grad_(requires_grad) for s in calls]


def test_every_sample_is_recorded_under_a_name_of_its_operation() -> None:
    assert len(SAMPLES) > 230
    for sample, image in zip(SAMPLES, inputs(SAMPLES), strict=True):
        with CalledNames() as called:
            sample.call(image)
        types = [t for t in called.names if (op := find(t)) is not None and op.name == sample.operation]
        assert types, (sample.name, called.names)
        assert sample.name in types or sample.name in RECORDED_AS, (sample.name, called.names)


def test_what_is_known_to_be_pure_gives_the_same_numbers_again_and_what_is_random_others() -> None:
    for sample, image in zip(SAMPLES, inputs(SAMPLES), strict=True):
        first, *others = ([t.clone() for _, t in leaves(sample.call(image.clone()), Tensor)] for _ in range(9))
        same = all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
        known = again(sample.name)
        assert same if known == "pure" else not same if known == "random" else True, sample.name


def test_what_returns_the_memory_it_is_given_is_known_to() -> None:
    for sample, image in zip(SAMPLES, inputs(SAMPLES), strict=True):
        made = [t for _, t in leaves(sample.call(image), Tensor)]
        shared = any(t.untyped_storage().data_ptr() == image.untyped_storage().data_ptr() for t in made)
        assert not shared or sample.name in SHARING or sample.name.endswith("_"), sample.name


@pytest.mark.slow
def test_what_is_known_to_be_pure_is_recomputed_bit_for_bit() -> None:
    known = [s for s in SAMPLES if again(s.name) == "pure" and s.name not in NO_BACKWARD]
    images = inputs(known)
    model = Calls(known)
    twin = copy.copy(model)
    twin.scale = nn.Parameter(model.scale.detach().clone())
    graph = outcore.capture(model, tuple(images))
    buffers = buffers_of(graph, account(graph))
    policy = {b.name: RECOMPUTE for b in buffers.values() if b.kind == "value" and b.savers and not b.obstacle}
    made_by = {graph.blocks[graph.calls[w].block].type for name in policy for w in buffers[name].writers}
    assert len(policy) > 150 and len(made_by) > 60
    outcore.within(model, tuple(images), memory=None, optimizer=0.0, plan=policy, quiet=True)
    for one in (twin, model):
        torch.stack([t.sum() for t in one(*images) if t.requires_grad]).sum().backward()
    assert model.scale.grad is not None and twin.scale.grad is not None
    assert torch.equal(model.scale.grad, twin.scale.grad)


def test_layers_of_the_catalogue_are_torchs() -> None:
    known = {name for op in operations() for name in op.modules} - OURS
    missing = {name for name in known if not hasattr(nn, name) and not hasattr(nn.modules.linear, name)}
    assert missing <= {"LPPool3d"} and "ReLU" in known


def test_every_activation_norm_and_pool_of_torch_is_in_the_catalogue() -> None:
    classes = {name: c for name, c in vars(nn).items() if isinstance(c, type) and issubclass(c, nn.Module)}
    wanted = re.compile(r"(Conv|Pool|Norm|ReLU|ELU|Dropout|Pad|Unpool|Softmax|shrink|Up|Shuffle|Sig|Tanh|Linear)")
    left = {n for n in classes if wanted.search(n) and find(n) is None and "Lazy" not in n}
    assert left <= {"AdaptiveLogSoftmaxWithLoss", "CrossMapLRN2d", "LinearCrossEntropyLoss"}


def test_a_facet_takes_one_fact_of_an_operation_and_only_known_operations() -> None:
    facet: Facet[int] = Facet("for-this-test", "…")
    try:
        facet.add(1, *kinds("max pool"))
        assert facet.find("MaxPool2d") == facet.find("max_pool2d") == 1 and facet.find("relu") is None
        assert facet.where() == names("max_pool1d", "max_pool2d", "max_pool3d")
        with pytest.raises(ValueError, match="twice"):
            facet.add(2, "max_pool2d")
        with pytest.raises(KeyError, match="part of 'relu'"):
            facet.add(1, "ReLU")
        with pytest.raises(KeyError, match="kind"):
            kinds("pools")
    finally:
        facet.withdraw()
    assert "for-this-test" not in operation("max_pool2d").facts


def test_an_embedding_that_writes_its_table_is_not_made_again() -> None:
    def obstacles(max_norm: float | None) -> list[str]:
        model = nn.Sequential(nn.Embedding(10, 4, max_norm=max_norm), nn.Linear(4, 4), nn.Linear(4, 2))
        graph = outcore.capture(model, (torch.zeros(3, dtype=torch.long),))
        return [b.obstacle for b in buffers_of(graph, account(graph)).values() if b.name == "0#0:out"]

    assert obstacles(None) == [""] and "weight" in obstacles(1.0)[0]


@pytest.mark.slow
def test_backward_keeps_what_its_rule_says() -> None:
    checked = set()
    for sample, image in zip(SAMPLES, inputs(SAMPLES), strict=True):
        if SAVED.find(sample.name) is None or sample.operation in TWO_TENSORS:
            continue
        graph = outcore.capture(Calls([sample]), (image,))
        calls = [c for c in account(graph, "cpu").calls.values() if find(c.type) is operation(sample.operation)]
        call = calls[1] if sample.name in ("mul", "getitem", "float") else calls[0]
        real = [s for s in call.saved if s.kind in ("value", "derived") and s.bytes and call.has_backward]
        told = kept(graph, call.call, "cpu") or () if call.has_backward else ()
        assert {s.of for s in told if s.kind == "value"} == {s.of for s in real if s.kind == "value"}, sample.name
        assert sum(s.bytes for s in told) == sum(s.bytes for s in real), sample.name
        checked.add(sample.operation)
    assert len(checked) > 120


def test_signatures_are_torchs() -> None:
    checked = set()
    for op in operations():
        signature = SIGNATURES.find(op.functions[0]) if op.functions else None
        function = getattr(F, op.name, None)
        if signature is None or function is None:
            continue
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except ValueError:  # a function of C++, whose documentation begins with its signature
            text = re.sub(r"\s|\*,|->.*", "", (function.__doc__ or "").strip().partition(")")[0].partition("(")[2])
            rows = [row.partition("=") for row in text.split(",")]
            told = {name: ast.literal_eval(value) if equals else None for name, equals, value in rows}
            names, defaults = list(told), {name: told[name] for name, equals, _ in rows if equals}
        else:
            if any(p.kind is p.VAR_POSITIONAL for p in parameters):
                continue  # chosen by whether indices are returned
            names = [p.name for p in parameters]
            defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        assert list(signature.names) == names[: len(signature.names)], op.name
        assert {name: value for name, value in defaults.items() if name in signature.names} == signature.defaults, (
            op.name
        )
        checked.add(op.name)
    assert checked >= {"conv2d", "conv_transpose3d", "batch_norm", "rms_norm", "interpolate", "embedding", "dropout2d"}
