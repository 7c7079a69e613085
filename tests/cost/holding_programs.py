"""Random programs whose Python holds tensors: in variables, lists, attributes, closures and arguments.

Each is the source of a ``forward`` that is compiled as if a person had written it, so that its frame has real
variables. What is held is what decides the peak: most operations are sums, of which backward needs nothing.
"""

import linecache
import random

import torch
from torch import Tensor, nn

CHANNELS, SIZE = 4, 24
KINDS = (
    *("sum", "sum", "conv", "relu", "product", "nested", "append", "append", "pop", "delete", "closure"),
    *("pair", "attribute", "view", "list", "temporary", "sequence"),
)


class Nested(nn.Module):
    """A module with variables of its own; its caller holds what it was given."""

    def __init__(self, early: bool) -> None:
        super().__init__()
        self.conv, self.early = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), early

    def forward(self, x: Tensor) -> Tensor:
        first = x + 1
        second = first * 2
        if self.early:
            del first
        third = torch.relu(self.conv(second))
        return third - 1


def pair(x: Tensor) -> tuple[Tensor, Tensor]:
    """Two results of which the caller may use one."""
    made = x + 3
    return made, torch.tanh(made)


class Source:
    """Writes one forward, statement by statement."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.names = ["x"]
        self.lines: list[str] = []
        self.made = self.listed = 0

    def new(self) -> str:
        """A name to bind: a new one, or one that is rebound."""
        if len(self.names) > 2 and self.random.random() < 0.3:
            return self.random.choice(self.names[1:])
        self.made += 1
        return f"v{self.made}"

    def bind(self, expression: str) -> None:
        name = self.new()
        self.lines.append(f"{name} = {expression}")
        if name not in self.names:
            self.names.append(name)

    def statement(self) -> None:
        a, b = self.random.choice(self.names), self.random.choice(self.names)
        match self.random.choice(KINDS):
            case "sum":
                self.bind(f"{a} + {b}")
            case "conv":
                self.bind(f"self.conv({a})")
            case "relu":
                self.bind(f"torch.relu({a})")
            case "product":
                self.bind(f"{a} * {b}")
            case "nested":
                self.bind(f"self.{self.random.choice(['early', 'late'])}({a} - 1)")
            case "append":
                self.lines.append(f"skips.append({a} + 2)")
                self.listed += 1
            case "pop" if self.listed:
                self.listed -= 1
                self.bind(f"skips.pop() + {a}")
            case "delete" if len(self.names) > 2:
                self.names.remove(gone := self.random.choice(self.names[1:]))
                self.lines.append(f"del {gone}")
            case "closure":
                self.bind(f"(lambda y: (y + {a}) - {b})({a} + 4)")
            case "pair":
                self.bind(f"pair({a})[{self.random.randrange(2)}]")
            case "attribute":
                self.lines.append(f"self.held{len(self.lines)} = {a} + 5")
            case "view":
                self.bind(f"{a}.flatten(2).unflatten(2, ({SIZE}, {SIZE}))")
            case "list":
                self.bind(f"sum([{a} + i for i in range(3)])")
            case "temporary":
                self.bind(f"torch.relu(self.conv(({a} + 6) - {b}))")
            case "sequence":
                self.bind(f"self.sequence({a})")

    def text(self, length: int) -> str:
        for _ in range(length):
            self.statement()
        used = self.random.sample(self.names, min(3, len(self.names)))
        self.lines.append(f"return ({' + '.join([*used, 'self.conv(x)'])}).square().mean()")
        return "def forward(self, x):\n    skips, x = [], self.conv(x)\n" + "".join(
            f"    {line}\n" for line in self.lines
        )


def program(seed: int, length: int = 12) -> tuple[nn.Module, Tensor, str]:
    """A model that returns its loss, what it is called with, and its source."""
    torch.manual_seed(seed)
    text, name = Source(seed).text(length), f"<program {seed}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    space: dict[str, object] = {"torch": torch, "pair": pair}
    exec(compile(text, name, "exec"), space)
    made = type("Holding", (nn.Module,), {"forward": space["forward"]})
    model: nn.Module = made()
    model.conv = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
    model.early, model.late = Nested(early=True), Nested(early=False)
    model.sequence = nn.Sequential(nn.Tanh(), nn.Conv2d(CHANNELS, CHANNELS, 1), nn.BatchNorm2d(CHANNELS), nn.ReLU())
    return model, torch.randn(2, CHANNELS, SIZE, SIZE), text
