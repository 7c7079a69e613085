"""Whether samples mix is read off the graph; the oracle runs the network with one sample changed, and in parts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outcore.compiled.micro_batch.sample_wise import SampleWise, read_samples, sample_inputs
from outcore.compiled.torch_partitioner import Partitioner, SavedChoice, TracedStep, compile_planned, compiling

BATCH = 12


def read(function: Callable[..., Tensor], *args: Tensor, whole: SampleWise | None = None) -> SampleWise | bool | None:
    """What is found for a function of some samples; with the whole batch's, whether this does the same."""
    found: list[SampleWise | bool | None] = []

    def choose(partition: TracedStep) -> SavedChoice:
        nodes = [n for n in partition.graph.nodes if n in partition.forward or n.op == "placeholder"]
        inputs = sample_inputs(partition.inputs, args, ()) or {}
        if whole is None:
            found.append(None if partition.overwrites else read_samples(nodes, partition.outputs, inputs))
        else:
            found.append(whole.holds_for(nodes, len(args[0])))
        return SavedChoice(partition.torch_choice(1.0))

    torch._dynamo.reset()
    run = compile_planned(function, Partitioner(choose), kernels=False)
    with compiling():
        run(*args).sum().backward()
    assert len(found) == 1
    return found[0]


def is_for_itself(function: Callable[..., Tensor], *args: Tensor) -> bool:
    """The oracle: other samples do not change when one does, and two halves give what the whole gives."""
    with torch.no_grad():
        result = function(*args)
        if not result.dim() or len(result) != len(args[0]):
            return False
        for one in range(len(args[0])):
            changed = [a.detach().clone() for a in args]
            changed[0][one] = changed[0][one] * 1.7 + 0.3
            other = [k for k in range(len(args[0])) if k != one]
            if not torch.equal(function(*changed)[other], result[other]):
                return False
        halves = [function(*(a[k : k + BATCH // 2] for a in args)) for k in (0, BATCH // 2)]
        return halves[0].shape[1:] == result.shape[1:] and torch.allclose(torch.cat(halves), result, rtol=1e-9)


attention = F.scaled_dot_product_attention
WEIGHT = torch.randn(8, 8, dtype=torch.float64, requires_grad=True)
KERNEL = torch.randn(8, 8, 3, dtype=torch.float64, requires_grad=True)
TABLE = torch.randn(BATCH, 5, 8, dtype=torch.float64)

PROGRAMS: dict[str, Callable[[Tensor], Tensor]] = {
    "product": lambda x: x @ WEIGHT,
    "attention": lambda x: attention(x @ WEIGHT, x, x),
    "attention over samples": lambda x: attention(*(y.transpose(0, 1) for y in (x @ WEIGHT, x, x))),
    "samples in the middle": lambda x: (x.transpose(0, 1).reshape(-1, 8) @ WEIGHT).view(5, -1, 8).transpose(0, 1),
    "centred": lambda x: (x @ WEIGHT) - x.mean((1, 2), keepdim=True),
    "centred over samples": lambda x: (x @ WEIGHT) - x.mean(0, keepdim=True),
    "divided by their number": lambda x: (x @ WEIGHT) / x.shape[0],
    "plus numbers from 0": lambda x: (x @ WEIGHT) + torch.arange(x.shape[0], dtype=x.dtype)[:, None, None],
    "plus a table of their number": lambda x: (x @ WEIGHT) + TABLE[: x.shape[0]],
    "flipped": lambda x: (x @ WEIGHT).flip(0),
    "flipped inside": lambda x: (x @ WEIGHT).flip(1),
    "rolled": lambda x: torch.roll(x @ WEIGHT, 1, 0),
    "rolled inside": lambda x: torch.roll(x @ WEIGHT, 2, 1),
    "first and rest": lambda x: torch.cat([WEIGHT[:1].expand(x.shape[0], 1, 8), x @ WEIGHT], 1),
    "softmax": lambda x: (x @ WEIGHT).softmax(-1),
    "softmax over samples": lambda x: (x @ WEIGHT).softmax(0),
    "convolution": lambda x: F.conv1d(x.transpose(1, 2), KERNEL, padding=1),
    "samples as positions": lambda x: F.conv1d(x.transpose(0, 2), KERNEL[:, :5, :], padding=1).transpose(0, 2),
    "group norm": lambda x: F.group_norm(x.transpose(1, 2) * WEIGHT.sum(), 2),
    "layer norm": lambda x: F.layer_norm(x @ WEIGHT, (8,)),
    "batch norm": lambda x: F.batch_norm((x @ WEIGHT).transpose(1, 2), None, None, training=True),
    "sorted": lambda x: (x @ WEIGHT).sort(dim=1).values,
    "sorted samples": lambda x: (x @ WEIGHT).sort(dim=0).values,
    "cumulated": lambda x: (x @ WEIGHT).cumsum(1),
    "cumulated samples": lambda x: (x @ WEIGHT).cumsum(0),
    "largest": lambda x: (x @ WEIGHT).amax(1),
    "all to all": lambda x: torch.einsum("bij,cij->bc", x @ WEIGHT, x)[:, :1],
    "gram": lambda x: torch.einsum("bij,bkj->bik", x @ WEIGHT, x),
    "regrouped": lambda x: (x @ WEIGHT).reshape(-1, x.shape[0], 8).transpose(0, 1).contiguous(),
    "each with the next": lambda x: (x @ WEIGHT).view(-1, 2, 5, 8).cumsum(1).reshape(-1, 5, 8)[: x.shape[0]],
    "larger image": lambda x: F.interpolate((x @ WEIGHT)[:, None], scale_factor=2, mode="bilinear"),
    "padded": lambda x: F.pad(x @ WEIGHT, (1, 2)),
    "padded samples": lambda x: F.pad(x @ WEIGHT, (0, 0, 0, 0, 1, 0))[1:],
    "mask": lambda x: torch.where(torch.ones(5, 8).tril().bool(), x @ WEIGHT, 0.0),
    "sum of drawn numbers": lambda x: (x @ WEIGHT) + torch.zeros(x.shape[0], 3).sum(),
    "number of samples by ones": lambda x: (x @ WEIGHT) / torch.ones(x.shape[0], dtype=x.dtype).sum(),
    "unbound": lambda x: torch.stack([y @ WEIGHT for y in x.unbind(1)], 1),
    "unbound samples": lambda x: torch.stack([y @ WEIGHT for y in x.unbind(0)], 0),
}
SHOWN = {
    *("product", "attention", "samples in the middle", "centred", "flipped inside", "rolled inside"),
    *("first and rest", "softmax", "convolution", "group norm", "layer norm", "sorted", "cumulated", "largest", "gram"),
    *("larger image", "padded", "mask", "unbound"),
}
"""Programs of which it must be found: what networks are made of."""


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_found_is_so(name: str) -> None:
    torch.manual_seed(0)
    program = PROGRAMS[name]
    samples = torch.randn(BATCH, 5, 8, dtype=torch.float64, requires_grad=True)
    for_itself = is_for_itself(program, samples)
    found = read(program, samples)
    assert not isinstance(found, bool)
    if found is not None:
        part = samples.detach()[: BATCH // 2].clone().requires_grad_()
        found = found if read(program, part, whole=found) else None
    assert for_itself or found is None
    assert (found is not None) == (name in SHOWN)


def test_arguments_that_look_like_weights_are_not_taken_for_samples() -> None:
    weight = torch.randn(4, 4)
    assert sample_inputs([], [torch.randn(4, 4)], [weight]) is None


class Network(nn.Module):
    """Convolutions, norms and attention in the way of many networks."""

    def __init__(self, norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), norm()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.token, self.last = nn.Parameter(torch.randn(1, 1, 8)), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.first(x))), 2)
        x = F.dropout(x, 0.1, self.training).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.last(x[:, 0])  # type: ignore[no-any-return]


@pytest.mark.parametrize("norm, expected", [(lambda: nn.GroupNorm(2, 8), True), (lambda: nn.BatchNorm2d(8), False)])
def test_norms_decide(norm: Callable[[], nn.Module], expected: bool) -> None:
    network = Network(norm)
    found = read(network, torch.randn(6, 3, 8, 8))
    assert (found is not None) == expected
    if isinstance(found, SampleWise):
        assert read(network, torch.randn(2, 3, 8, 8), whole=found) is True
