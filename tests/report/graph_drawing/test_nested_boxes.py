from outcore.report.graph_drawing.nested_boxes import OUTSIDE, Nest
from tests.report.graphs import Maker, unet


def test_wires_enter_and_leave_the_containers_between_their_ends() -> None:
    nest = Nest(unet())
    wire = next(i for i, w in enumerate(nest.wires) if w.value == "encoder1.conv#0:out")
    assert nest.wires[wire].targets == ("encoder2.conv#0", "decoder1.cat()#0")
    assert [name for name, part in nest.parts.items() if wire in part.sends] == [
        "encoder1#0",
        "encoder1.conv#0",
    ]
    readers = [name for name, part in nest.parts.items() if wire in part.reads]
    assert readers == ["encoder2#0", "encoder2.conv#0", "decoder1#0", "decoder1.cat()#0"]


def test_the_inside_of_a_container_shows_what_it_reads_and_hands_on() -> None:
    nest = Nest(unet())
    inside = {nest.wires[wire].value: (source, targets) for wire, source, targets in nest.inside("decoder1#0")}
    assert inside["encoder1.conv#0:out"] == (None, ("decoder1.cat()#0",))
    assert inside["decoder1.up#0:out"] == ("decoder1.up#0", ("decoder1.cat()#0",))
    assert inside["decoder1.cat()#0:out"] == ("decoder1.cat()#0", (OUTSIDE,))


def test_a_container_left_and_entered_again_is_two_parts() -> None:
    make = Maker()
    a = make.call("shared.first", "x")
    b = make.call("other", a)
    nest = Nest(make.graph(make.call("shared.second", b)))
    assert nest.parts[""].children == ["shared#0", "other#0", "shared#0~2"]
    assert nest.block("shared#0~2").path == "shared"


def test_wires_pass_through_hidden_functions_but_not_where_values_are_combined() -> None:
    make = Maker()
    a = make.call("a", "x")
    b = make.call("b", make.call("relu()", a, type="relu"))
    made = make.call("add()", a, b, make.call("arange()", type="arange"), type="add")
    nest = Nest(make.graph(make.call("flatten()", made, type="flatten")), functions=False)
    assert nest.parts[""].children == ["a#0", "b#0", "add()#0"]
    wires = {(wire.source, wire.value): wire.targets for wire in nest.wires}
    assert wires["a#0", "relu()#0:out"] == ("b#0",)
    assert wires["a#0", "a#0:out"] == ("add()#0",)
    assert wires["add()#0", "flatten()#0:out"] == (OUTSIDE,)
    assert len(wires) == 5


def test_an_input_may_be_returned() -> None:
    make = Maker(("x", "y"))
    nest = Nest(make.graph(make.call("a", "x"), "y"))
    assert [(w.source, w.value) for w in nest.wires if OUTSIDE in w.targets] == [("a#0", "a#0:out"), (None, "y")]
