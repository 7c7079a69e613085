from outcore.graph.graph import Graph
from outcore.report.graph_drawing.nested_boxes import Nest
from outcore.report.graph_drawing.repeated_blocks import inside, signatures
from tests.report.graphs import Maker, stack


def repeats(graph: Graph, container: str = "layers#0") -> tuple[int, ...]:
    return inside(Nest(graph), container, signatures(graph)).repeats


def test_identical_blocks_in_a_row_are_one() -> None:
    assert repeats(stack(5)) == (5,)


def test_a_value_that_all_of_them_read_does_not_matter() -> None:
    assert repeats(stack(5, mask=True)) == (5,)


def test_blocks_that_read_the_last_two_values_stay_apart() -> None:
    assert repeats(stack(5, two_back=True)) == (1,) * 5


def test_other_settings_stay_apart() -> None:
    make, value = Maker(), "x"
    for i, detail in enumerate(["3, 8", "8, 8", "8, 8", "8, 16"]):
        value = make.call(f"layers.{i}.conv", value, detail=detail)
    assert repeats(make.graph(value)) == (1, 2, 1)


def test_a_value_read_in_between_keeps_blocks_apart() -> None:
    make = Maker(shape=(2, 8, 16, 16))
    values = ["x"]
    for i in range(4):
        values.append(make.call(f"layers.{i}.conv", values[-1], detail="8, 8"))
    assert repeats(make.graph(make.call("head", values[2], values[-1]))) == (2, 2)


def test_the_last_value_leaves_under_the_name_of_the_first() -> None:
    nest = Nest(graph := stack(3))
    (link,) = [link for link in inside(nest, "layers#0", signatures(graph)).links if link.leaves]
    assert nest.wires[link.wire].value == "layers.2.add()#0:out"
    assert nest.wires[link.port].value == "layers.0.add()#0:out"
