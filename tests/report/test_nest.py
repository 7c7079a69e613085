from outcore.report.nest import OUTSIDE, Nest

from .graphs import Maker, unet


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
    inside = {
        nest.wires[wire].value: (source, targets) for wire, source, targets in nest.inside("decoder1#0")
    }
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


def test_wires_pass_through_hidden_functions() -> None:
    nest = Nest(unet(), functions=False)
    assert not any("cat" in name for name in nest.parts)
    sources = {wire.source for wire in nest.wires if "decoder0.up#0" in wire.targets}
    assert sources == {"decoder1.up#0", "encoder1.conv#0"}
