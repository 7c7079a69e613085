"""What a graph says of itself: lists, cuts, skips, parts, JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import outcore
from outcore.models import AmoebaNetD, BasicCNN, LeNet, Net2, ReLayNet, ResNet110V2, UNet


@pytest.fixture(scope="module")
def unet() -> outcore.Graph:
    return outcore.capture(UNet(width=4, depth=2), [(1, 3, 32, 32)])


def test_the_lists_of_the_small_networks() -> None:
    lenet = outcore.capture(LeNet(), [(1, 3, 32, 32)])
    assert lenet.adjacency(direction="inputs") == {
        "conv1": [],
        "pool1": ["conv1"],
        "conv2": ["pool1"],
        "pool2": ["conv2"],
        "fc1": ["pool2"],
        "fc2": ["fc1"],
        "fc3": ["fc2"],
    }
    basic = outcore.capture(BasicCNN(), [(1, 1, 28, 28)])
    assert basic.adjacency() == {
        "conv1": ["conv2"],
        "conv2": ["conv2_drop"],
        "conv2_drop": ["fc1"],
        "fc1": ["fc2"],
        "fc2": [],
    }
    net2 = outcore.capture(Net2(features=6 * 16 * 16), [(1, 3, 16, 16)])
    assert net2.adjacency() == {
        "conv1": ["conv2"],
        "conv2": ["conv3", "conv4"],
        "conv3": ["conv4"],
        "conv4": ["fc1"],
        "fc1": [],
    }
    assert net2["fc2"].calls == 0


def test_functions_are_listed_on_request() -> None:
    net2 = outcore.capture(Net2(features=6 * 16 * 16), [(1, 3, 16, 16)])
    lists = net2.adjacency(functions=True)
    assert lists["cat()"] == ["conv4"]
    assert lists["conv4"] == ["view()"]


def test_every_depth_and_any_block_expanded(unet: outcore.Graph) -> None:
    top = unet.adjacency(1)
    assert top["encoder1"] == ["encoder2", "decoder1"]
    assert top["encoder2"] == ["bottom", "decoder2"]
    opened = unet.adjacency(1, expand=["encoder1"])
    assert "encoder1.conv1" in opened
    assert "encoder1" not in opened
    assert "encoder2" in opened
    assert unet.adjacency() == unet.adjacency(99)
    assert set(unet.adjacency(2)) >= {"encoder1.conv1", "encoder2.convolutions"}


def test_a_block_expanded_is_a_graph_of_its_own(unet: outcore.Graph) -> None:
    inside = unet.expand("encoder2")
    assert set(inside.adjacency()) == {b for b in unet.adjacency() if b.startswith("encoder2.")}
    assert inside.inputs == ("encoder1.relu2#0:out",)
    assert inside.outputs == ("encoder2.convolutions.relu2#0:out",)
    deeper = inside.expand("encoder2.convolutions")
    assert len(deeper.calls) < len(inside.calls)


def test_an_unknown_block_is_named_with_near_ones(unet: outcore.Graph) -> None:
    with pytest.raises(outcore.OutcoreError, match=r"no block 'encodr1' in UNet; did you mean .*encoder1"):
        unet.expand("encodr1")
    with pytest.raises(ValueError, match="depth must be at least 1"):
        unet.adjacency(0)
    with pytest.raises(ValueError, match="outputs"):
        unet.adjacency(direction="sideways")  # type: ignore[arg-type]


def test_long_skips_of_a_unet(unet: outcore.Graph) -> None:
    skips = unet.skips(1)
    assert [(s.source, s.target, s.distance) for s in skips] == [
        ("encoder1#0", "decoder1#0", 4),
        ("encoder2#0", "decoder2#0", 2),
    ]
    assert skips[0].bytes == 4 * 4 * 32 * 32


def test_pool_indices_are_integer_skips_without_gradient() -> None:
    graph = outcore.capture(ReLayNet(width=8), [(1, 1, 32, 32)])
    integers = [graph.values[s.value] for s in graph.skips(1) if graph.values[s.value].dtype == "int64"]
    assert len(integers) == 3
    assert not any(v.requires_grad for v in integers)


def test_two_predecessors_of_every_amoeba_cell() -> None:
    fed_by = outcore.capture(AmoebaNetD(cells=6, filters=16), [(1, 3, 64, 64)]).adjacency(1, "inputs")
    assert fed_by["cell2"] == ["stem_reduction2", "cell1"]
    assert all(len(fed_by[f"cell{i}"]) == 2 for i in range(1, 7))


def test_cuts_and_what_crosses_them(unet: outcore.Graph) -> None:
    cuts = unet.cuts(1)
    assert [(c.after, c.before) for c in cuts][:2] == [("encoder1#0", "encoder2#0"), ("encoder2#0", "bottom#0")]
    at_bottom = next(c for c in cuts if c.before == "bottom#0")
    assert set(at_bottom.values) == {"encoder1.relu2#0:out", "encoder2.convolutions.relu2#0:out"}
    assert at_bottom.bytes == 4 * (4 * 32 * 32 + 8 * 16 * 16)


def test_shared_memory_crosses_a_cut_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.a(x)
            flat = y.view(-1)
            out: torch.Tensor = self.b(y).view(-1) + flat
            return out

    graph = outcore.capture(Twice(), [(2, 4)])
    crossing = next(c for c in graph.cuts() if c.before == "b#0")
    assert len(crossing.values) == 2
    assert crossing.bytes == 2 * 4 * 4


def test_order_of_calls_is_topological() -> None:
    graph = outcore.capture(ResNet110V2(depth=11), [(1, 3, 16, 16)])
    seen: set[str] = set()
    for call in graph.calls.values():
        assert {graph.values[v].producer for v in call.inputs} - {None} <= seen
        assert set(call.after) <= seen
        seen.add(call.name)
    for value in graph.values.values():
        assert all(value.name in graph.calls[c].inputs for c in value.consumers)


def test_parts_in_sequence_make_the_whole() -> None:
    torch.manual_seed(0)
    net, x = UNet(width=4, depth=2), torch.randn(2, 3, 19, 21)
    graph = outcore.capture(net, (x,))
    groups = [
        ["encoder1"],
        ["encoder2", "bottom"],
        [c for c in graph.calls if c.split(".")[0] not in ("encoder1", "encoder2", "bottom")],
    ]
    values: dict[str, torch.Tensor] = {"image": x}
    state = {k: v.clone() for k, v in net.state_dict().items()}
    names: list[str] = []
    for blocks in groups:
        part = graph.subgraph(blocks)
        names += list(part.state_dict())
        values |= part(values)
    assert sorted(names) == sorted(net.state_dict())
    values[graph.outputs[0]].square().sum().backward()
    grads = {n: p.grad for n, p in net.named_parameters()}
    net.zero_grad()
    net.load_state_dict(state)
    out = net(x)
    out.square().sum().backward()
    assert torch.equal(out, values[graph.outputs[0]])
    assert all(torch.equal(p.grad, grads[n]) for n, p in net.named_parameters())  # type: ignore[arg-type]


def test_a_part_copies_an_input_it_writes() -> None:
    net = nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU(inplace=True), nn.Conv2d(3, 3, 1))
    graph = outcore.capture(net, [(1, 3, 4, 4)])
    given = torch.randn(1, 3, 4, 4)
    before = given.clone()
    out = graph.subgraph(["1"])({"0#0:out": given})
    assert torch.equal(given, before)
    assert torch.equal(out["1#0:out"], before.relu())


def test_memory_written_here_and_read_there_cannot_be_cut() -> None:
    class Torn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.act, self.b = nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.a(x)
            view = y[:1]
            out: torch.Tensor = self.act(y) + self.b(view)
            return out

    graph = outcore.capture(Torn(), [(2, 4)])
    with pytest.raises(outcore.OutcoreError, match=r"act#0 writes into the memory of .* which b#0 reads afterwards"):
        graph.subgraph(["act"])


def test_a_part_refuses_missing_inputs_and_other_sizes(unet: outcore.Graph) -> None:
    part = unet.subgraph(["bottom"])
    with pytest.raises(outcore.OutcoreError, match="missing inputs"):
        part({})
    with pytest.raises(outcore.OutcoreError, match="was captured with"):
        part({name: torch.zeros(1) for name in part.inputs})


def test_json_round_trip_is_exact_and_deterministic(tmp_path: Path, unet: outcore.Graph) -> None:
    unet.save(tmp_path / "unet.json")
    read = outcore.Graph.load(tmp_path / "unet.json")
    assert read == unet
    assert read.fingerprint == unet.fingerprint
    again = outcore.capture(UNet(width=4, depth=2), [(1, 3, 32, 32)])
    assert again == unet
    assert json.dumps(again.to_json()) == json.dumps(unet.to_json())
    with pytest.raises(outcore.OutcoreError, match="capture the model to run it"):
        _ = read.module
    with pytest.raises(outcore.OutcoreError, match="format is 99"):
        outcore.Graph.from_json({"format": 99})


def test_fingerprints_tell_structures_apart(unet: outcore.Graph) -> None:
    assert outcore.capture(UNet(width=4, depth=2), [(2, 3, 64, 48)]).fingerprint == unet.fingerprint
    assert outcore.capture(UNet(width=8, depth=2), [(1, 3, 32, 32)]).fingerprint != unet.fingerprint
    assert outcore.capture(UNet(width=4, depth=3), [(1, 3, 32, 32)]).fingerprint != unet.fingerprint


def test_source_lines_point_into_forward(unet: outcore.Graph) -> None:
    file, _, line = unet["encoder1"].source.partition(":")
    assert file.endswith("models/unet.py")
    text = (Path(outcore.__file__).parent / "models" / "unet.py").read_text().splitlines()[int(line) - 1]
    assert "encoder1" in text
    assert unet.root.source.startswith(file)


def test_a_graph_prints_itself(unet: outcore.Graph) -> None:
    assert str(unet).startswith("UNet (train mode): ")
    assert f"{unet.root.parameters:,} parameters" in str(unet)
