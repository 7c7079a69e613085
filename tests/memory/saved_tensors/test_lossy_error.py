"""Lossy encodings: what they do to the gradients is measured as it is, and reported."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import outcore
from outcore.memory.encode.codecs import encode
from outcore.memory.saved_tensors.lossy_error import LossyEffect
from outcore.program.plan.stage_names import name_stages
from outcore.verification import verify_job


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.Tanh(),
        nn.Dropout(0.2),
        nn.Flatten(),
        nn.Linear(8 * 256, 5),
    )


VALUES = ("0#0:out", "2#0:out", "4#0:out")


def images() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(4, 3, 16, 16)


def gradients(model: nn.Module, batch: torch.Tensor) -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    loss = model(batch).square().mean()
    return dict(
        zip((n for n, _ in model.named_parameters()), torch.autograd.grad(loss, model.parameters()), strict=True)
    )


def lossy(codec: str, model: nn.Module, batch: torch.Tensor) -> LossyEffect:
    plan = dict.fromkeys(VALUES, f"encode:{codec}")
    torch.manual_seed(5)
    outcore.within(model, (batch,), memory=None, plan=plan, quiet=True)
    effect = outcore.gradient_effect(model)
    assert effect is not None
    return effect


@pytest.mark.parametrize(("codec", "most"), [("half", 2e-4), ("bf16", 2e-3), ("int8", 1e-2), ("int4", 2e-1)])
def test_the_reported_deviation_is_that_from_plain_training(codec: str, most: float) -> None:
    model, batch = network(), images()
    want = gradients(copy.deepcopy(model), batch)
    effect = lossy(codec, model, batch)
    got = gradients(model, batch)
    for row in effect.rows:
        a, b = want[row.name].double().flatten(), got[row.name].double().flatten()
        assert row.cosine == pytest.approx(float(torch.cosine_similarity(a, b, dim=0)), rel=1e-6)
        if row.name != "0.bias":  # the norm behind it takes its gradient away: what is left is rounding
            assert row.relative == pytest.approx(float((a - b).norm() / a.norm()), rel=1e-6)
    a, b = (torch.cat([g.double().flatten() for g in found.values()]) for found in (want, got))
    assert effect.whole is not None
    assert effect.whole.relative == pytest.approx(float((a - b).norm() / a.norm()), rel=1e-6)
    assert {row.name for row in effect.rows} == set(want)
    assert 0 < effect.whole.relative < most
    assert effect.codecs == {codec: 3} and effect.held_bytes < 0.55 * effect.bytes


def test_measuring_leaves_no_trace() -> None:
    model, batch = network(), images()
    twin = copy.deepcopy(model)
    lossy("int8", model, batch)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), twin.state_dict().values(), strict=True))
    assert all(p.grad is None for p in model.parameters())
    torch.manual_seed(7)
    outcore.within(model, (batch,), memory=None, plan={VALUES[0]: "encode:half"}, quiet=True)
    after = torch.rand(1)
    torch.manual_seed(7)
    assert torch.equal(after, torch.rand(1))


def test_it_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    outcore.within(network(), (images(),), memory=None, plan={VALUES[2]: "encode:int8"})
    said = capsys.readouterr().err
    assert "lossy encodings (1 as int8)" in said and "the gradient is off by" in said and "losses are exact" in said
    outcore.within(network(), [(4, 3, 16, 16)], memory=None, plan={VALUES[2]: "encode:int8"})
    assert "give a batch, not shapes" in capsys.readouterr().err


def test_an_exact_plan_has_no_effect_to_report() -> None:
    model, batch = network(), images()
    lossy("half", model, batch)
    outcore.within(model, (batch,), memory=None, plan={VALUES[1]: "encode:sparse"}, quiet=True)
    assert outcore.gradient_effect(model) is None
    want, got = gradients(outcore.release(copy.deepcopy(model)), batch), gradients(model, batch)
    assert all(torch.equal(want[name], got[name]) for name in want)


@pytest.mark.parametrize(("codec", "levels"), [("int8", 255), ("int4", 15)])
@pytest.mark.parametrize("count", [1, 255, 256, 1000, 2**18 + 5])
def test_groups_are_off_by_half_a_level_at_most(count: int, codec: str, levels: int) -> None:
    torch.manual_seed(0)
    flat = torch.randn(count)
    coded = encode(codec, flat)
    back = coded.decoded()
    assert coded.payload[0].numel() == -(-count // (1 if codec == "int8" else 2))
    for start in range(0, count, 256):
        group = flat[start : start + 256]
        level = float(group.max() - group.min()) / levels
        assert float((back[start : start + 256] - group).abs().max()) <= 0.51 * level + 1e-6


@pytest.mark.parametrize("codec", ["int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_small_numbers_above_zero_stay_above_zero(dtype: torch.dtype, codec: str) -> None:
    torch.manual_seed(0)
    flat = (torch.randn(1000).clamp_min(0) * torch.finfo(dtype).tiny).to(dtype)
    assert torch.equal(encode(codec, flat).decoded() > 0, flat > 0)


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_what_a_relu_let_through_is_let_through_when_rounded(codec: str) -> None:
    """Its backward reads that from the rounded output: a number above zero that became zero would stop a gradient."""
    torch.manual_seed(0)
    x = torch.randn(5, 1000, requires_grad=True)
    flat = x.detach().relu().flatten()
    flat[7] = 1e-40
    back = encode(codec, flat).decoded()
    assert torch.equal(back > 0, flat > 0) and not torch.equal(back, flat)
    model = nn.Sequential(nn.ReLU(), nn.Linear(1000, 3))
    want = torch.autograd.grad(model(x).sum(), x)[0]
    outcore.within(model, (x,), memory=None, plan={"0#0:out": f"encode:{codec}"}, quiet=True)
    effect = outcore.gradient_effect(model)
    assert effect is not None and effect.codecs == {codec: 1}
    assert torch.equal(torch.autograd.grad(model(x).sum(), x)[0], want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_sparse_storage_is_exact_to_the_sign_of_zero(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    flat = torch.randn(1003).clamp_min(0).to(dtype)
    flat[3] = -0.0
    coded = encode("sparse", flat)
    back = coded.decoded()
    assert torch.equal(back, flat) and bool(torch.signbit(back[3]))
    assert sum(t.numel() * t.element_size() for t in coded.payload) < 0.65 * flat.numel() * flat.element_size()


def test_verifying_a_lossy_plan_says_so_and_how_far_it_is_off() -> None:
    job = outcore.Job(network, lambda size: (torch.randn(size, 3, 16, 16), None))
    graph = outcore.capture(network().train(), (torch.randn(4, 3, 16, 16),))
    plan = outcore.Plan(
        graph=graph.fingerprint,
        stages=name_stages(graph, [list(graph.calls)]),
        policy={VALUES[2]: "encode:int8"},
    )
    verdict = verify_job(job, plan=plan, size=4, device="cpu")
    assert verdict.lossy == 1 and verdict.agrees
    assert verdict.grade.startswith("lossy, as the plan says: off by at most")
    exact = verify_job(job, plan=replace(plan, policy={VALUES[2]: "recompute"}), size=4, device="cpu")
    assert exact.grade == "bitwise equal"
