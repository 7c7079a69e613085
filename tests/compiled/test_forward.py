"""Training under `within(..., compile=True)`, beside plain training."""

from __future__ import annotations

import copy
import io
import logging
import shutil
from collections.abc import Iterator

import pytest
import torch
import torch._inductor.config
from torch import nn

import outcore
from outcore.compiled.head_apart import HeadApart
from outcore.compiled.in_place import install_compiled_forward
from outcore.compiled.measured_peak import measured_peak
from outcore.compiled.plan import CompiledPlan
from outcore.compiled.settings import CompileSettings
from outcore.cost.optimizer_cost import OptimizerCost
from outcore.errors import PlanError
from outcore.memory.chunked_loss.lazy_rows import LazyRows
from outcore.planner.memory.plan import MemoryPlan
from tests.compiled.oracle import BOUND, step, worst

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler on a CPU")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    logging.disable(logging.WARNING)
    with torch._inductor.config.patch(compile_threads=1):  # so that no pool of threads stays
        yield
    logging.disable(logging.NOTSET)
    torch._dynamo.reset()


def chain(layers: int = 6) -> nn.Sequential:
    """Linear layers with norms and activations."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Sigmoid()) for _ in range(layers))
    ).double()


@needs_compiler
def test_a_compiled_step_is_within_its_budget_and_trains_as_plain() -> None:
    model: nn.Module = chain()
    images, plain = torch.randn(1024, 64, dtype=torch.float64), copy.deepcopy(model)
    before = copy.deepcopy(model.state_dict())
    model = outcore.within(model, (images,), memory="65%", compile=True, optimizer=0.0, quiet=True)
    plan = outcore.memory_plan(model)
    assert isinstance(plan, CompiledPlan) and plan.budget_bytes is not None
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items()), "trying steps changed the model"
    for _ in range(2):
        assert worst(step(model, model, (images,), {}), step(plain, plain, (images,), {})) < BOUND
    model.zero_grad()
    own = sum(t.nbytes for t in (*model.parameters(), *model.buffers(), images))
    taken = own + measured_peak(lambda: model(images).sum().backward(), torch.device("cpu"))
    assert taken <= plan.budget_bytes < plan.fastest_bytes
    assert 0.8 * taken < plan.peak_bytes < 1.25 * taken
    assert "forward" not in outcore.release(model).__dict__


def test_another_shape_and_mode_are_compiled_for_themselves() -> None:
    model = chain(2)
    plain = copy.deepcopy(model)
    images = torch.randn(16, 64, dtype=torch.float64)
    settings = CompileSettings(None, OptimizerCost.of(0.0), kernels=False)
    install_compiled_forward(model, (images,), {}, settings)
    for rows, training in ((16, True), (7, True), (16, False), (7, True)):
        model.train(training), plain.train(training)
        ours, theirs = step(model, model, (images[:rows],), {}), step(plain, plain, (images[:rows],), {})
        assert worst(ours, theirs) < BOUND
    with torch.no_grad():
        torch.testing.assert_close(model(images), plain(images))


def test_pieces_between_graph_breaks_are_planned_together() -> None:
    class Broken(nn.Module):
        """A network whose middle cannot be traced."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = chain(3), chain(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """What both parts make of it."""
            x = self.first(x)
            torch._dynamo.graph_break()
            return self.second(x)  # type: ignore[no-any-return]

    model, images = Broken(), torch.randn(32, 64, dtype=torch.float64)
    plain = copy.deepcopy(model)
    plan = install_compiled_forward(model, (images,), {}, CompileSettings(None, OptimizerCost.of(0.0), kernels=False))
    assert plan.pieces == 2
    assert worst(step(model, model, (images,), {}), step(plain, plain, (images,), {})) < BOUND


def test_a_budget_that_cannot_be_met_is_refused_with_the_smallest_that_can() -> None:
    model, images = chain(2), torch.randn(256, 64, dtype=torch.float64)
    with pytest.raises(PlanError) as refused:
        install_compiled_forward(model, (images,), {}, CompileSettings(1000, OptimizerCost.of(0.0), kernels=False))
    assert refused.value.least_bytes is not None and refused.value.least_bytes > 1000
    assert "forward" not in model.__dict__


def test_what_cannot_be_compiled_is_managed_without_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    class Hidden(nn.Module):
        """A network that torch.compile leaves alone."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """The layer's result."""
            return self.layer(x)  # type: ignore[no-any-return]

    model = outcore.within(Hidden(), (torch.randn(2, 4),), memory=None, compile=True)
    assert "not compiled" in capsys.readouterr().err
    assert not isinstance(outcore.memory_plan(model), CompiledPlan)
    model(torch.randn(2, 4)).sum().backward()


def test_what_has_no_room_compiled_is_managed_without_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        refused = PlanError("a compiled training step cannot be done within 1 MiB")
        refused.least_bytes = 2**40
        raise refused

    monkeypatch.setattr("outcore.one_device.within.compile_model", refuse)
    model, images = chain(2), torch.randn(64, 64, dtype=torch.float64)
    outcore.within(model, (images,), memory="90%", compile=True, optimizer=0.0)
    assert "managed call by call instead" in capsys.readouterr().err
    assert isinstance(outcore.memory_plan(model), MemoryPlan)
    with pytest.raises(PlanError) as refused:  # the smaller of both
        outcore.within(model, (images,), memory=1000, compile=True, optimizer=0.0, quiet=True)
    assert refused.value.least_bytes is not None and refused.value.least_bytes < 2**40


def test_a_model_that_the_user_compiled_is_planned_anew() -> None:
    model, images = chain(2), torch.randn(8, 64, dtype=torch.float64)
    plain = copy.deepcopy(model)
    compiled: nn.Module = torch.compile(model, backend="eager")  # type: ignore[assignment]
    install_compiled_forward(compiled, (images,), {}, CompileSettings(None, OptimizerCost.of(0.0), kernels=False))
    ours = step(model, compiled, (images,), {})
    assert worst(ours, step(plain, plain, (images,), {})) < BOUND
    plan = outcore.memory_plan(compiled)
    assert isinstance(plan, CompiledPlan) and plan.pieces == 1
    outcore.release(compiled)
    compiled(images)


def test_copies_of_a_model_and_compilers_around_it() -> None:
    model, images = chain(2), torch.randn(8, 64, dtype=torch.float64)
    plain = copy.deepcopy(model)
    install_compiled_forward(model, (images,), {}, CompileSettings(None, OptimizerCost.of(0.0), kernels=False))
    stored = io.BytesIO()
    torch.save(model, stored)
    loaded = torch.load(io.BytesIO(stored.getvalue()), weights_only=False)
    theirs = step(plain, plain, (images,), {})
    for duplicate in (copy.deepcopy(model), loaded):
        with torch.no_grad():
            next(duplicate.parameters()).add_(0.0)
        assert worst(step(duplicate, duplicate, (images,), {}), theirs) < BOUND
        assert duplicate.__dict__["forward"].model is duplicate and duplicate.__dict__["forward"].entries
        assert isinstance(outcore.memory_plan(outcore.release(copy.deepcopy(duplicate)) and duplicate), CompiledPlan)
    assert all(p.grad is None for p in model.parameters())
    around = torch.compile(model, backend="eager")
    assert worst(step(model, around, (images,), {}), theirs) < BOUND
    graph = outcore.capture(model, (images,))
    assert len(graph.calls) == len(outcore.capture(plain, (images,)).calls)  # seen as it is written


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("share", ["100%", "55%"])
def test_dropout_draws_what_torch_compile_draws_whatever_is_made_again(share: str) -> None:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.3), nn.Tanh(), nn.Dropout(0.1)) for _ in range(6)]
    model: nn.Module = nn.Sequential(*layers).double()
    images = torch.randn(512, 64, dtype=torch.float64)
    other = copy.deepcopy(model)
    theirs = step(other, torch.compile(other, dynamic=False), (images,), {})
    torch._dynamo.reset()
    model = outcore.within(model, (images,), memory=share, compile=True, optimizer=0.0, quiet=True)
    assert isinstance(outcore.memory_plan(model), CompiledPlan)
    assert worst(step(model, model, (images,), {}), theirs) < BOUND


class Tokens(nn.Module):
    """Tokens to a loss and logits, with one weight at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(2003, 16)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3)))
        self.head = nn.Linear(16, 2003, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss and logits."""
        logits = self.head(self.blocks(self.embed(tokens)))
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()), logits


def _same_step(model: nn.Module, plain: nn.Module, tokens: torch.Tensor) -> None:
    for each in (plain, model):
        loss, logits = each(tokens)
        (3 * loss).backward()
    for one, two in zip(plain.parameters(), model.parameters(), strict=True):
        assert one.grad is not None and two.grad is not None
        assert torch.allclose(one.grad, two.grad, rtol=0, atol=1e-10)
    assert torch.allclose(logits, plain(tokens)[1], rtol=0, atol=1e-10)
    with torch.no_grad():
        assert torch.allclose(model(tokens)[1], plain(tokens)[1], rtol=0, atol=1e-10)


def test_a_last_layer_apart_from_the_compiled_rest() -> None:
    torch.manual_seed(0)
    model, tokens = Tokens().double(), torch.randint(0, 2003, (8, 32))
    plain = copy.deepcopy(model)
    head = HeadApart((8, 32, 2003), 32, 0)
    install_compiled_forward(
        model, (tokens,), {}, CompileSettings(None, OptimizerCost.of(0.0, "cpu"), kernels=False, head=head)
    )
    assert isinstance(model(tokens)[1], LazyRows)
    _same_step(model, plain, tokens)


class UnderAutocast(Tokens):
    """In bfloat16 where that is allowed."""

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss and logits."""
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss, logits = super().forward(tokens)
        return loss * 2, logits


def test_a_last_layer_apart_under_autocast() -> None:
    torch.manual_seed(0)
    model, tokens = UnderAutocast(), torch.randint(0, 2003, (8, 32))
    plain = copy.deepcopy(model)
    head = HeadApart((8, 32, 2003), 32, 0)
    install_compiled_forward(
        model, (tokens,), {}, CompileSettings(None, OptimizerCost.of(0.0, "cpu"), kernels=False, head=head)
    )
    (ours, lazy), (theirs, logits) = model(tokens), plain(tokens)
    assert isinstance(lazy, LazyRows) and lazy.dtype == logits.dtype == torch.bfloat16 and ours.dtype == theirs.dtype
    assert torch.allclose(ours, theirs, rtol=1e-2) and torch.allclose(lazy.float(), logits.float(), atol=0.1)
    for loss in (ours, theirs):
        loss.backward()
    for one, two in zip(plain.parameters(), model.parameters(), strict=True):
        assert one.grad is not None and two.grad is not None
        assert (one.grad - two.grad).abs().max() < 0.03 * one.grad.abs().max()


@pytest.mark.slow
@needs_compiler
def test_a_last_layer_that_does_not_fit_runs_in_chunks() -> None:
    torch.manual_seed(0)
    model, tokens = Tokens().double(), torch.randint(0, 2003, (8, 32))
    plain = copy.deepcopy(model)
    outcore.within(model, (tokens,), memory="30%", compile=True, optimizer=0.0, quiet=True)
    plan = outcore.memory_plan(model)
    assert isinstance(plan, CompiledPlan) and plan.chunk_rows is not None and plan.measured_bytes is not None
    assert plan.budget_bytes is not None and plan.measured_bytes <= plan.budget_bytes
    _same_step(model, plain, tokens)


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("memory", ["70%", None])
def test_auto_trains_as_plain_whichever_it_chooses(memory: str | None) -> None:
    model: nn.Module = chain()
    images, plain = torch.randn(256, 64, dtype=torch.float64), copy.deepcopy(model)
    outcore.within(model, (images,), memory=memory, compile="auto", optimizer=0.0, quiet=True)
    assert isinstance(outcore.memory_plan(model), (CompiledPlan, MemoryPlan))
    assert all(torch.equal(one, two) for one, two in zip(model.buffers(), plain.buffers(), strict=True))
    assert worst(step(model, model, (images,), {}), step(plain, plain, (images,), {})) < BOUND


def test_auto_refuses_with_the_smaller_budget_of_both() -> None:
    model = chain()
    with pytest.raises(PlanError, match="cannot be done within"):
        outcore.within(
            model, (torch.randn(8, 64, dtype=torch.float64),), memory=1000, compile="auto", optimizer=0.0, quiet=True
        )
    assert "forward" not in model.__dict__
