import io

import pytest
import torch
from rich.console import Console

from outcore.errors import OutcoreError
from outcore.graph import capture
from outcore.graph.graph import Graph
from outcore.report import tree

from .graphs import Maker, stack, unet


def lines(graph: Graph, width: int = 80, **options: object) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width).print(tree(graph, **options))  # type: ignore[arg-type]
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_repeats_are_one_line() -> None:
    shown = lines(stack(5))
    assert any("0 … 4  Part × 5" in line for line in shown)
    assert len([line for line in lines(stack(5), fold=False) if "Part" in line and "layers" not in line]) == 5


def test_a_block_expanded_by_name_is_not_folded() -> None:
    shown = "\n".join(lines(stack(5), depth=2, expand=["layers.2"]))
    assert "0 … 1" in shown
    assert "3 … 4" in shown
    assert shown.count("add()") == 1


def test_depth_and_expansion() -> None:
    assert not any("cat()" in line for line in lines(unet(), depth=1))
    assert sum("cat()" in line for line in lines(unet(), depth=1, expand=["decoder1"])) == 1
    assert not any("cat()" in line for line in lines(unet(), depth=None, functions=False))


def test_shapes_and_parameters_stand_in_columns() -> None:
    (line,) = [line for line in lines(unet(), depth=1, fold=False) if "encoder1" in line]
    assert line.split()[-2:] == ["2×8×16×16", "100"]


def test_nothing_is_wider_than_the_terminal() -> None:
    make = Maker()
    graph = make.graph(make.call("a" * 70, "x", detail="kernel_size=" + "9" * 90, parameters=10**9))
    assert all(len(line) <= 80 for line in lines(graph))
    assert any("2×8×16×16" in line and "1,000,000,000" in line for line in lines(graph))


def test_what_is_never_called_is_said_to_be() -> None:
    graph = unet()
    head = graph.blocks["head"]
    unused = type(head)("spare", "module", "Linear", "", (), 0, 7, "")
    blocks = {**graph.blocks, "spare": unused}
    root = blocks[""]
    blocks[""] = type(root)("", "container", "Net", "", (*root.children, "spare"), 1, 0, "")
    shown = lines(Graph("net.Net", True, graph.inputs, graph.outputs, blocks, graph.calls, graph.values))
    assert any("spare" in line and "never called" in line for line in shown)


def test_wrong_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        tree(unet(), depth=0)
    with pytest.raises(OutcoreError, match="did you mean"):
        tree(unet(), expand=["decodr1"])


def test_a_block_that_is_called_again_shows_what_it_makes() -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = torch.nn.Sequential(torch.nn.Conv2d(3, 3, 1), torch.nn.ReLU())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.block(self.block(x))

    row = next(line for line in lines(capture(Net(), [(1, 3, 8, 8)])) if "Sequential" in line)
    assert "1×3×8×8" in row and row.split()[-2:] == ["12", "2"]
