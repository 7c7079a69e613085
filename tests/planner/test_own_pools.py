"""Pools with kernels of their own: where indices are encoded, backward needs neither these nor the input whole."""

from dataclasses import replace

import torch
from torch import nn

import outcore
from outcore.cost.measured.saved_bytes import account
from outcore.cost.predicted.rough import by_bytes
from outcore.planner.memory.evaluate import StepModel
from outcore.program.policies import Encode


def test_neither_index_nor_input_is_whole_in_the_backward_of_a_pool_on_a_gpu() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3), nn.Flatten())
    graph = outcore.capture(nn.Sequential(*model, nn.Linear(196, 2)), [(2, 3, 18, 18)])
    costs = by_bytes(account(graph), 1e9)
    cpu = StepModel(graph, costs, 0.0, None)
    gpu = StepModel(graph, replace(costs, device_kind="cuda"), 0.0, None)
    (indices,) = (b for b in cpu.buffers.values() if Encode("window") in cpu.choices(b))
    at = cpu.backward_at[indices.born]
    encoded = {indices.name: Encode("window"), "1#0:out": Encode("sign")}
    whole_input = torch.Size([2, 4, 18, 18]).numel() * 4
    more, less = (int(k.evaluate(encoded).curve[at] - k.base[at]) for k in (cpu, gpu))  # a GPU's allocator rounds up
    assert more - less == indices.bytes * 7 // 8 + whole_input
    assert gpu.evaluate(encoded).time_s < cpu.evaluate(encoded).time_s
    assert all((k.evaluate({}).curve == k.base).all() for k in (cpu, gpu))
    assert gpu.floor[0] <= gpu.evaluate(encoded).peak_bytes
