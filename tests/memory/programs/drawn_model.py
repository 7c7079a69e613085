"""Writes the model of a program drawn at random: classes whose forward is a list of statements over named values."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from .drawn_tables import (
    ANY,
    BETWEEN,
    FRESH,
    IMAGE,
    IN_PLACE,
    KEPT,
    LAYERS,
    OF_KIND,
    READING,
    REGIONS,
    ROWS,
    SAVING,
    SEQUENCE,
    WRITABLE,
)


@dataclass
class WrittenClass:
    """A module class that is being written."""

    name: str
    layers: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Attribute -> what makes it, and the kind of value it takes."""
    parameters: dict[str, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    depth: int = 0
    names: int = 0
    points: int = 0
    """Places at which it may be told to raise."""
    kept: dict[str, str] = field(default_factory=dict)
    """Attribute -> the kind of the value that a call leaves in it."""

    def write(self, line: str) -> None:
        """One line of its forward."""
        self.lines.append("    " * (self.depth + 2) + line)

    def new(self) -> str:
        """A name for a value."""
        self.names += 1
        return f"v{self.names}"


class ModelWriter:
    """Writes the classes of one program."""

    def __init__(self, seed: int) -> None:
        self.pick = random.Random(seed)
        self.parts: list[str] = []
        self.into: WrittenClass = WrittenClass("Net")
        self.nested = 0

    def chance(self, probability: float) -> bool:
        return self.pick.random() < probability

    # The model

    def layer(self, made: str, kind: str, share: float = 0.15) -> str:
        """A layer of the class that is being written; sometimes one that is there already."""
        into = self.into
        same = [name for name, row in into.layers.items() if row == (made, kind)]
        if same and self.chance(0.6):
            return f"self.{self.pick.choice(same)}"
        name = f"m{len(into.layers)}"
        into.layers[name] = made, kind
        return f"self.{name}"

    def parameter(self, shape: str) -> str:
        """A parameter of that class."""
        into = self.into
        same = [name for name, other in into.parameters.items() if other == shape]
        if same and self.chance(0.5):
            return f"self.{self.pick.choice(same)}"
        name = f"w{len(into.parameters)}"
        into.parameters[name] = shape
        return f"self.{name}"

    def fill(self, text: str, scope: dict[str, str], x: str, kind: str) -> str:
        """An expression over values of a kind."""
        same = [name for name, of in scope.items() if of == kind]
        filled = text.replace("{x}", x)
        while "{y}" in filled:
            filled = filled.replace("{y}", self.pick.choice(same), 1)
        for place, shape in (
            ("{p88}", "8, 8"),
            ("{p8}", "8"),
            ("{p48}", "4, 8"),
            ("{p4433}", "4, 4, 3, 3"),
            ("{p44}", "4, 4"),
            ("{p4}", "4"),
        ):
            while place in filled:
                filled = filled.replace(place, self.parameter(shape), 1)
        for place, made, of in (
            ("{lift}", "nn.Linear(8, 32)", ROWS),
            ("{fold}", "nn.Linear(32, 8)", "flat"),
            ("{tile}", "nn.Linear(8, 64)", ROWS),
            ("{narrow}", "nn.Linear(4, 8)", "narrow"),
            ("{gru}", "nn.GRU(8, 8, batch_first=True)", SEQUENCE),
        ):
            if place in filled:
                filled = filled.replace(place, self.layer(made, of))
        return filled

    def called(self, x: str, kind: str, scope: dict[str, str]) -> str:
        """A call of a layer."""
        if self.nested < 2 and self.chance(0.12):
            name = self.part(kind)
            return f"{self.layer(f'{name}()', kind)}({x})"
        made = self.pick.choice(LAYERS[kind])
        if "inplace=True" in made and not made.startswith("nn.Sequential"):
            x = f"{x} + {self.pick.choice([n for n, k in scope.items() if k == kind])}"
        layer = self.layer(made, kind)
        if made.startswith("nn.GroupNorm"):  # torch crashes in its backward over channels last without a gradient
            return f"{layer}({x}.contiguous())"
        if made.startswith("nn.MultiheadAttention"):
            y = self.pick.choice([n for n, k in scope.items() if k == kind])
            return f"{layer}({x}, {y}, {x}{self.pick.choice(['', ', need_weights=False'])})[0]"
        if made.startswith(("nn.GRU(", "nn.LSTM(")):
            return f"{layer}({x})[0]"
        if made.startswith("nn.ModuleList"):
            return f"{layer}[{self.pick.choice(['2', '0', '1', 'self.count % 3', '-1'])}]({x})"
        if made.startswith("nn.ModuleDict"):
            chosen = self.pick.choice(("'a'", "'b'", "'a' if self.flag else 'b'"))
            return f"{layer}[{chosen}]({x})"
        if made.startswith(("nn.GRUCell", "nn.RNNCell", "nn.Bilinear")):
            y = self.pick.choice([n for n, k in scope.items() if k == kind])
            return f"{layer}({x}.float(), {y}.float())"
        return f"{layer}({x})"

    def part(self, kind: str) -> str:
        """A module class of its own, from a kind to the same kind; returns its name."""
        outer, self.nested = self.into, self.nested + 1
        self.into = WrittenClass(f"Part{len(self.parts)}")
        self.parts.append("")
        place = len(self.parts) - 1
        scope = {"x": kind}
        last = self.block(scope, "x", kind, self.pick.randint(1, 5))
        self.into.write(f"return {last}")
        self.parts[place] = self.text(self.into)
        name = self.into.name
        self.into, self.nested = outer, self.nested - 1
        return name

    def block(self, scope: dict[str, str], x: str, kind: str, count: int) -> str:
        """Some statements; returns the name of a value of the kind they began with."""
        current, of = x, kind
        for _ in range(count):
            current, of = self.statement(scope, current, of)
            if self.chance(0.1):
                self.keep(scope, current, of)
        if of != kind:
            current = self.converted(scope, current, of, kind)
        return current

    def converted(self, scope: dict[str, str], x: str, kind: str, to: str) -> str:
        """A value as another kind."""
        if (kind, to) not in BETWEEN:
            x, kind = self.converted(scope, x, kind, ROWS), ROWS
        name = self.into.new()
        self.into.write(f"{name} = {self.fill(self.pick.choice(BETWEEN[kind, to]), scope, x, kind)}")
        scope[name] = to
        return name

    def statement(self, scope: dict[str, str], current: str, kind: str) -> tuple[str, str]:
        """One statement; returns what it made and of which kind."""
        write, into, pick = self.into.write, self.into, self.pick
        same = [name for name, of in scope.items() if of == kind]
        x = current if self.chance(0.75) else pick.choice(same)
        name = into.new()
        draw = pick.random()
        if draw < 0.08:
            to = pick.choice([k for k in (ROWS, SEQUENCE, IMAGE) if k != kind])
            return self.converted(scope, x, kind, to), to
        if draw < 0.36:
            write(f"{name} = {self.called(x, kind, scope)}")
        elif draw < 0.70:
            text = pick.choice(OF_KIND[kind] if self.chance(0.4) else ANY)
            write(f"{name} = {self.fill(text, scope, x, kind)}")
        elif draw < 0.80:
            if self.chance(0.98):
                fresh = pick.choice(FRESH)
                if self.chance(0.3):
                    made = pick.choice([m for m in LAYERS[kind] if m.startswith(WRITABLE)])
                    fresh = f"{self.layer(made, kind)}({x})"
                write(f"{name} = {self.fill(fresh, scope, x, kind)}")
            else:
                name = x
            if self.chance(0.3):
                first = pick.choice([t for t in IN_PLACE if not any(saves in t for saves in SAVING)])
                write(self.fill(first, scope, x, kind).replace("{t}", name))
            write(self.fill(pick.choice(IN_PLACE), scope, x, kind).replace("{t}", name))
        elif draw < 0.86:
            other = into.new()
            write(f"{other} = {self.fill(pick.choice(FRESH), scope, x, kind)}")
            write(f"{name} = {pick.choice(READING)}".replace("{t}", other))
            if self.chance(0.4):
                write(f"{name} = torch.sigmoid({name})")
            line = self.fill(pick.choice(IN_PLACE), scope, x, kind).replace("{t}", other)
            if self.chance(0.4):
                write(f"if {pick.choice(('self.flag', 'self.count % 2', 'self.alpha > 1', f'{x}.sum() > 0'))}:")
                line = f"    {line}"
            write(line)
            scope[other] = kind
        elif into.depth < 3:
            self.region(scope, name, x, kind)
        else:
            write(f"{name} = {x} * 0.9")
        scope[name] = kind
        return name, kind

    def inside(self, scope: dict[str, str], name: str, x: str, kind: str, most: int = 3) -> None:
        """A block of its own, which makes `name` from `x`."""
        self.into.depth += 1
        made = self.block(dict(scope), x, kind, self.pick.randint(1, most))
        self.into.write(f"{name} = {made}")
        self.into.depth -= 1

    def region(self, scope: dict[str, str], name: str, x: str, kind: str) -> None:
        """A branch, loop, context or nested function."""
        write, pick, into = self.into.write, self.pick, self.into
        match pick.choice(REGIONS):
            case "if":
                tests = ("self.flag", "self.alpha > 1", "self.count % 2", "self.training", "STATE['scale'] > 1")
                write(f"if {pick.choice(tests)}:")
                self.inside(scope, name, x, kind)
                write("else:")
                self.inside(scope, name, x, kind, 2)
            case "data":
                tests = ("{x}.sum() > 0", "({x} > 1.5).any()", "{x}.mean().item() > 0.1", "{x}.detach().max() > 2")
                write(f"if {self.fill(pick.choice(tests), scope, x, kind)}:")
                self.inside(scope, name, x, kind)
                write("else:")
                self.inside(scope, name, x, kind, 2)
            case "for":
                write(f"{name} = {x}")
                lengths = ("2", "self.count", "1 + self.count % 2", f"1 + int({x}.detach().abs().sum()) % 3")
                write(f"for i in range({pick.choice(lengths)}):")
                self.inside({**scope, name: kind}, name, name, kind)
            case "while":
                write(f"{name}, turns_{name} = {x}, 0")
                write(f"while turns_{name} < 3 and {name}.detach().mean() > -0.2:")
                into.depth += 1
                write(f"turns_{name} += 1")
                into.depth -= 1
                self.inside({**scope, name: kind}, name, name, kind, 2)
            case "no_grad":
                write("with torch.no_grad():")
                self.inside(scope, name, x, kind)
                write(f"{name} = {name} + {x}")
            case "dropped":
                write("with torch.no_grad():")
                self.inside(scope, "unused", x, kind)
                write(f"{name} = {x} * 1.1")
            case "enable":
                write("with torch.enable_grad():")
                self.inside(scope, name, x, kind)
            case "autocast":
                enabled = pick.choice(("True", "True", "self.flag", "False"))
                write(f"with torch.autocast('cpu', dtype=torch.bfloat16, enabled={enabled}):")
                self.inside(scope, name, x, kind)
                write(f"{name} = {name}.float()")
            case "try":
                write("try:")
                self.inside(scope, name, x, kind, 2)
                into.depth += 1
                tests = ("{x}.sum() > 0", "self.count == 2", "self.flag")
                write(f"if {self.fill(pick.choice(tests), scope, x, kind)}:")
                write("    raise ValueError('inside')")
                into.depth -= 1
                write("except ValueError:")
                self.inside(scope, name, x, kind, 2)
            case "def":
                function = f"f{into.names}"
                write(f"def {function}(a, scale=self.alpha):")
                self.inside({**scope, "a": kind}, "a", "a", kind)
                write("    return a * scale")
                write(f"{name} = {function}({x})")
                if self.chance(0.3):
                    write(f"{name} = {function}({name}, 0.5)")
            case "checkpoint":
                function = f"f{into.names}"
                write(f"def {function}(a):")
                self.inside({**scope, "a": kind} if self.chance(0.4) else {"a": kind}, "a", "a", kind)
                write("    return a")
                write(f"{name} = checkpoint({function}, {x}, use_reentrant=False)")
            case "raise":
                into.points += 1
                write(f"if self.fail == {into.points}:")
                write("    raise ValueError('on purpose')")
                write(f"{name} = {x} * 1.1")
            case "cond":
                a, b = (self.fill(pick.choice(ANY), scope, x, kind) for _ in range(2))
                write(f"{name} = {a} if self.flag else {b}")
            case "residual":
                self.indented(scope, name, x, kind)
                write(f"{name} = {name} + {x}")
            case "generator":
                write(f"generator = torch.Generator().manual_seed(self.count + {pick.randint(0, 9)})")
                write(f"{name} = {x} + torch.randn({x}.shape, generator=generator) * 0.1")

    def indented(self, scope: dict[str, str], name: str, x: str, kind: str) -> None:
        """A block that runs anyway."""
        self.into.write("if True:")
        self.inside(scope, name, x, kind)

    def keep(self, scope: dict[str, str], x: str, kind: str) -> None:
        """Keep or read something on the model."""
        write, pick, into = self.into.write, self.pick, self.into
        if into.depth and self.chance(0.5):
            return
        match pick.choice(KEPT):
            case "calls":
                write("self.calls += 1")
            case "list":
                write(f"self.seen.append({x}.detach())")
            case "number":
                write(f"self.seen.append({x}.mean().item())")
            case "dict":
                write(f"self.table['{x}'] = {x}.detach().clone()")
            case "aux":
                write(f"self.aux = self.aux + {x}.square().mean() * 0.1 if self.calls else {x}.abs().mean()")
            case "ema" if kind == ROWS:
                write(f"self.ema = 0.9 * self.ema + 0.1 * {x}.detach().float().mean(0)")
            case "ema_" if kind == ROWS:
                write("with torch.no_grad():")
                write(f"    self.ema.mul_(0.9).add_({x}.float().mean(0), alpha=0.1)")
            case "hook":
                write(f"if {x}.requires_grad:")
                scale = pick.choice(("0.5", "self.alpha", "STATE['scale']"))
                write(f"    {x}.register_hook(lambda g: g * {scale})")
            case "grads":
                write(f"if {x}.requires_grad:")
                write(f"    {x}.register_hook(lambda g: self.seen.append(g.detach().clone()))")
            case "count":
                write("self.count = (self.count + 1) % 4")
            case "kept":
                write(f"self.kept = {x}")
            case "retain":
                write(f"if {x}.requires_grad:")
                write(f"    {x}.retain_grad()")
                write(f"    self.kept = {x}")
            case "state":
                write(f"if self.state is not None and self.state.shape == {x}.shape:")
                write(f"    {x} = {x} + 0.1 * self.state")
                write(f"self.state = {x}.detach()")
            case "carried":
                write(f"if self.carried is not None and self.carried.shape == {x}.shape:")
                write(f"    {x} = torch.tanh({x} + 0.1 * self.carried)")
                write(f"self.carried = {x}")
            case "global":
                write("STATE['n'] += 1")
            case "print":
                write(f"str({x})")
            case "options":
                write("self.options.n += 1")
            case "nested":
                write("self.sizes['inner'].append(self.calls)")
            case "deque":
                write(f"self.recent.append(float({x}.detach().mean()))")
            case "data":
                write("with torch.no_grad():")
                write(f"    self.buffer.copy_({x}.detach().float().mean().expand(3))")
            case "buffer":
                write("self.buffer = self.buffer + 1")
            case "alias":
                write(f"self.table['view'] = {x}[:1].detach()")
            case "once":
                write("if not hasattr(self, 'cache'):")
                write("    self.cache = torch.linspace(0, 1, 8)")
                if kind != IMAGE:
                    write(f"{x} = {x} + self.cache")

    def text(self, into: WrittenClass, forward: str = "self, x") -> str:
        """The source of a class."""
        lines = [f"class {into.name}(nn.Module):", "    def __init__(self):", "        super().__init__()"]
        lines += [f"        self.{name} = {made}" for name, (made, _) in into.layers.items()]
        lines += [
            f"        self.{name} = nn.Parameter(torch.randn({shape}) * 0.3)" for name, shape in into.parameters.items()
        ]
        lines += [
            "        self.register_buffer('ema', torch.zeros(8))",
            "        self.register_buffer('mean8', torch.zeros(8))",
            "        self.register_buffer('var8', torch.ones(8))",
            "        self.register_buffer('buffer', torch.zeros(3))",
            "        self.plain8 = torch.linspace(0.5, 1, 8)",
            "        self.alpha, self.rate, self.flag, self.count, self.fail = 0.8, 0.2, True, 1, 0",
            "        self.calls, self.seen, self.table, self.aux, self.kept = 0, [], {}, 0.0, None",
            "        self.state, self.carried = None, None",
            "        self.options, self.sizes = types.SimpleNamespace(scale=1.2, n=0), {'a': 0.9, 'inner': []}",
            "        self.recent = collections.deque(maxlen=3)",
            "",
            f"    def forward({forward}):",
            *into.lines,
        ]
        return "\n".join(lines)
