"""A recording says how long Python holds each value."""

from typing import Any

import torch
from torch import Tensor, nn

import outcore
from outcore import Graph
from outcore.graph.parts import OUTLIVES


def held(forward: Any, x: Tensor | None = None) -> dict[str, str]:
    """What a function of a layer and an image holds beyond its last use."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 3, padding=1)
            self.act = nn.Sequential(nn.Tanh(), nn.ReLU())

        def forward(self, x: Tensor) -> Any:
            return forward(self, x)

    graph = outcore.capture(Model(), (x if x is not None else (1, 3, 8, 8),))
    return {name: value.held_until for name, value in graph.values.items() if value.held_until is not None}


def test_a_variable_holds_until_it_is_rebound_or_its_function_returns() -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        a = model.conv(x)
        b = a + 1
        c = b * 2
        a = c - 1
        return a.exp()

    assert held(forward) == {"conv#0:out": "sub()#0", "add()#0:out": "exp()#0", "mul()#0:out": "exp()#0"}


def test_what_is_rebound_at_once_or_deleted_is_not_held() -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        x = model.conv(x)
        y = x + 1
        x = y * 2
        del y
        return x.exp().tanh()

    assert held(forward) == {"conv#0:out": "mul()#0", "mul()#0:out": "tanh()#0"}


def test_a_list_holds_what_is_not_popped() -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        skips = [model.conv(x) + i for i in range(2)]
        y = skips.pop() * 2
        return y.exp().tanh()

    assert held(forward) == {"add()#0:out": "tanh()#0", "mul()#0:out": "tanh()#0"}


def test_the_caller_of_a_module_holds_its_arguments() -> None:
    assert held(lambda model, x: model.act(model.conv(x) + 1)) == {"add()#0:out": "act.1#0"}


def test_an_attribute_holds_beyond_forward() -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        model.kept = model.conv(x).detach()
        return model.kept + model.conv(x)

    found = held(forward)
    assert found["detach()#0:out"] == OUTLIVES


def test_what_is_returned_and_what_was_given_is_the_callers() -> None:
    assert held(lambda model, x: (model.conv(x), {"other": [x * 2]})) == {}


def test_what_backward_needs_is_not_what_python_holds() -> None:
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            return 3 * ctx.saved_tensors[0] ** 2 * gradient

    def forward(model: Any, x: Tensor) -> Tensor:
        x = model.conv(x)
        x = Cube.apply(x)
        x = torch.sigmoid(x)
        return (x * x).sum()

    assert held(forward) == {"sigmoid()#0:out": "sum()#0"}


def test_numbers_that_decide_do_not_keep_lifetimes_from_being_known() -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        y = model.conv(x) + 1
        z = y * 2 if y.sum().item() < 1e9 else y
        return z.exp().tanh()

    found = held(forward, torch.randn(1, 3, 8, 8))
    assert found["add()#0:out"] == found["mul()#0:out"] == "tanh()#0"


def test_a_transform_inside_forward_is_recorded_as_before() -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        slope = torch.func.grad(lambda t: t.sin().sum())(torch.ones(3))
        return model.conv(x) * slope.sum()

    assert held(forward, torch.randn(1, 3, 8, 8)) == {}  # what lives how long is not known then, and nothing is claimed


def test_lifetimes_are_saved_and_old_documents_are_read() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            a = x + 1
            return (a * 2).exp()

    graph = outcore.capture(Model(), [(2, 2)])
    document = graph.to_json()
    assert Graph.from_json(document).values["add()#0:out"].held_until == "exp()#0"
    for row in document["values"]:
        del row["held_until"]
    assert Graph.from_json(document).values["add()#0:out"].held_until is None
    part = graph.restrict(list(graph.calls.values()))
    assert part.values["add()#0:out"].held_until is None  # replayed, so no variable holds it
