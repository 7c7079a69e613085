"""Writes the training loop of a program drawn at random: what it changes before and after each forward, how it comes to
gradients, what it notes."""

from __future__ import annotations

from .drawn_model import ModelWriter
from .drawn_tables import CHANGES, IMAGE, ROWS, SEQUENCE

_HEADER = '''
class Passing(nn.Module):
    """A layer inside another, called twice."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.gain, self.times = inner, 1.0, 0

    def forward(self, x):
        self.times += 1
        return torch.tanh(self.inner(x) * self.gain) + self.inner(x)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 2 * x * g


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return -ctx.scale * g, None


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.clamp(-1, 1)
        ctx.save_for_backward(y)
        ctx.mask = (x == y)
        return y

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return g * ctx.mask + 0.01 * y


STATE = {"scale": 1.0, "n": 0}


def helper(x, scale):
    return torch.tanh(x) * scale + STATE["scale"]
'''


class ProgramWriter(ModelWriter):
    """Writes one program."""

    def program(self) -> str:
        """The whole program."""
        pick = self.pick
        kind = pick.choice((ROWS, ROWS, SEQUENCE, IMAGE))
        scope = {"x": kind}
        more = pick.choice(("", "", "y", "factor"))
        forward = {"": "self, x", "y": "self, x, y=None", "factor": "self, x, factor=1.0"}[more]
        first = "x"
        if more == "y":
            self.into.write("v0 = x if y is None else x + y")
            first, scope["v0"] = "v0", kind
        elif more == "factor":
            self.into.write("v0 = x * factor")
            first, scope["v0"] = "v0", kind
        last = self.block(scope, first, kind, pick.randint(4, 16))
        if kind != ROWS:
            last = self.converted(scope, last, kind, ROWS)
        self.into.layers["head"] = "nn.Linear(8, 5)", "head"
        returns = (
            "return self.head({})",
            "return self.head({})",
            "return self.head({0}), {0}",
            "return {{'out': self.head({0}), 'hidden': {0}, 'n': self.calls}}",
            "return [self.head({0}).relu(), None]",
        )
        self.into.write(pick.choice(returns).format(last))
        net = self.text(self.into, forward)
        loop = "\n".join(self.loop(kind, more))
        classes = "\n\n\n".join([*reversed(self.parts), net])
        return f"{_HEADER.strip()}\n\n\n{classes}\n\n\n{loop}\n"

    def loop(self, kind: str, more: str) -> list[str]:
        """The training program."""
        pick = self.pick
        shape = {ROWS: "8", SEQUENCE: "4, 8", IMAGE: "4, 8, 8" if self.chance(0.5) else "4, 4, 4"}[kind]
        size = pick.choice((3, 4, 6))
        varies = self.chance(0.3)
        grad = ".requires_grad_()" if self.chance(0.2) else ""
        last = ".contiguous(memory_format=torch.channels_last)" if kind == IMAGE and self.chance(0.2) else ""
        self.kind = kind
        lines = [
            f"def batch(step, size={size}):",
            f"    x = torch.randn(size, {shape}, generator=torch.Generator().manual_seed(step)){last}",
            f"    return x{grad}",
            "",
            "",
            "def program(run):",
            "    model, handles = Net(), []",
        ]
        self.more = more
        self.size = size
        self.varies = varies
        self.hooks = 0
        out = [*lines]
        self.out = out
        add = self.add
        if self.chance(0.15):
            self.change()
        given = self.arguments("0")
        add(f"run.manage(model, *given({given}))")
        add("STATE.update(scale=1.0, n=0)")
        optimizers = (
            "torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)",
            "torch.optim.SGD(model.parameters(), 0.1)",
            "torch.optim.Adam(model.parameters(), 0.01)",
            "torch.optim.AdamW(model.parameters(), 0.01)",
            "torch.optim.RMSprop(model.parameters(), 0.005)",
        )
        add(f"optimizer = {pick.choice(optimizers)}")
        for step in range(4):
            add(f"# step {step}")
            if self.chance(0.06):
                add("release(run, model)")
                add(f"run.manage(model, *given({self.arguments(str(step))}))")
            for _ in range(pick.choice((0, 0, 1, 1, 2, 3))):
                self.change()
            self.step(step)
        add("run.note_model(model)")
        add("note_attributes(run, model)")
        return out

    def add(self, line: str, depth: int = 1) -> None:
        """One line of the loop."""
        self.out.append("    " * depth + line)

    def arguments(self, step: str) -> str:
        """The arguments of a call of the model."""
        size = f", {self.pick.choice((2, 3, 5, 7))}" if self.varies and self.chance(0.6) else ""
        given = f"batch({step}{size})"
        if self.more == "y" and self.chance(0.4):
            given += f", y=batch({step} + 50{size})" if self.chance(0.5) else f", batch({step} + 50{size})"
        elif self.more == "factor" and self.chance(0.5):
            given += f", factor={self.pick.choice((0.5, 1.0, 2.0))}"
        return given

    def step(self, step: int) -> None:
        """One step of the loop."""
        pick, add, change = self.pick, self.add, self.change
        number = str(step)
        around = ""
        if self.chance(0.1):
            around = "with torch.autocast('cpu', dtype=torch.bfloat16):"
        if self.into.points and self.chance(0.35):
            add(f"model.fail = {pick.randint(1, self.into.points)}")
            add("try:")
            add(f"model({self.arguments(number)})", 2)
            add("except ValueError as error:")
            add("run.note(str(error))", 2)
            add("model.fail = 0")
        if self.chance(0.1):
            add("with torch.no_grad():")
            add(f"run.note(square_of(model({self.arguments(number + ' + 20')})))", 2)
        add("reset(model)")
        inputs = f"x{step}"
        given = self.arguments(number)
        first, _, rest = given.partition(")")
        add(f"{inputs} = {first})")
        call = f"model({inputs}{rest})"
        if around:
            add(around)
        add(f"out = {call}", 2 if around else 1)
        way = pick.choice(
            ("plain",) * 6
            + ("two", "other order", "retain", "accumulate", "double", "grads", "dropped", "inputs", "twice", "aux")
            + ("between", "between", "between", "evaluated", "hooked", "late")
        )
        zero = pick.choice(("optimizer.zero_grad()", "optimizer.zero_grad(set_to_none=False)", "model.zero_grad()"))
        if way != "accumulate" and self.chance(0.9):
            add(zero)
        match way:
            case "two":
                add(f"other = model({self.arguments(number + ' + 10')})")
                add("loss = square(out) + square(other)")
                add("loss.backward()")
            case "other order":
                add("reset(model)")
                add(f"other = model({self.arguments(number + ' + 10')})")
                add("loss, second = square(out), square(other)")
                order = ["loss.backward()", "second.backward()"]
                pick.shuffle(order)
                add(order[0])
                change(between=True)
                add(order[1])
            case "retain":
                add("loss = square(out)")
                add("loss.backward(retain_graph=True)")
                add("run.note_model(model)")
                if self.chance(0.5):
                    change(between=True)
                add("(loss * 2).backward()")
            case "twice":
                add("loss = square(out)")
                add("grads = torch.autograd.grad(loss, trained(model), retain_graph=True, allow_unused=True)")
                add("run.note(*grads)")
                add("loss.backward()")
            case "double":
                add("loss = square(out)")
                add("grads = torch.autograd.grad(loss, trained(model), create_graph=True, allow_unused=True)")
                add("run.note(*grads)")
                add("total = loss + sum(g.square().mean() for g in grads if g is not None)")
                add("total.backward()")
            case "grads":
                add("loss = square(out)")
                add("grads = torch.autograd.grad(loss, trained(model), allow_unused=True)")
                add("run.note(*grads)")
            case "dropped":
                add("loss = square(out)")
                add("del out")
            case "inputs":
                add("loss = square(out)")
                add(f"if {inputs}.requires_grad:")
                add(f"run.note(*torch.autograd.grad(loss, [{inputs}], allow_unused=True))", 2)
                add("else:")
                add("loss.backward()", 2)
            case "aux":
                add("loss = square(out) + model.aux")
                add("loss.backward()")
            case "between":
                add("loss = square(out)")
                for _ in range(pick.randint(1, 3)):
                    change(between=True)
                add("loss.backward()")
            case "evaluated":
                add("model.eval()")
                add("with torch.no_grad():")
                add(f"run.note(square_of(model({self.arguments(number + ' + 30')})))", 2)
                add("model.train()")
                add("loss = square(out)")
                add("loss.backward()")
            case "hooked":
                add("loss = square(out)")
                add("loss.register_hook(lambda g: g * 0.5)")
                add("loss.backward()")
            case "late":
                add("loss = square(out)")
                add("reset(model)")
                add(f"later = model({self.arguments(number + ' + 40')})")
                add("loss.backward()")
                add("run.note_model(model)")
                add("square(later).backward()")
            case _:
                add("loss = square(out)")
                add("loss.backward()")
        add("run.note(loss=loss)")
        add("run.note_model(model)")
        if self.chance(0.9):
            add("optimizer.step()")
        add("note_attributes(run, model)")
        if self.chance(0.05):
            add("model = copied(run, model)")
            add("optimizer = torch.optim.SGD(model.parameters(), 0.05)")

    def nested_parts(self) -> list[str]:
        """Parts of the model that carry something along."""
        return [f"model.{name}" for name, (made, _) in self.into.layers.items() if made.startswith("Part")]

    def change(self, *, between: bool = False) -> None:
        """Something the loop changes; `between` a forward and its backward."""
        pick, add = self.pick, self.add
        layers = self.into.layers
        plain = [n for n, (made, _) in layers.items() if n != "head" and made.startswith("nn.")]
        single = [n for n in plain if not layers[n][0].startswith(("nn.Module", "nn.GRU(", "nn.LSTM", "nn.Multi"))]
        name = pick.choice(single) if single else "head"
        holders = ["model", *self.nested_parts()]
        holder = pick.choice(holders)
        match pick.choice(CHANGES):
            case "alpha":
                add(f"{holder}.alpha = {pick.choice((0.3, 1.5, -1.0, 0.8))}")
            case "flag":
                add(f"{holder}.flag = not {holder}.flag")
            case "count":
                add(f"{holder}.count = {pick.randint(0, 3)}")
            case "scale":
                add(f"STATE['scale'] = {pick.choice((0.5, 1.5))}")
            case "options":
                add(f"{holder}.options.scale = {pick.choice((0.5, 1.5))}")
            case "sizes":
                add(f"{holder}.sizes['a'] = {pick.choice((0.5, 1.5))}")
            case "rate":
                add(f"{holder}.rate = {pick.choice((0.0, 0.5))}")
            case "mode":
                add(f"model.train({pick.choice(('True', 'False', 'not model.training'))})")
            case "layer_mode":
                add(f"model.{name}.train(not model.{name}.training)")
            case "freeze":
                add(f"model.{name}.requires_grad_({name == 'head'})")
            case "unfreeze":
                add("model.requires_grad_(True)")
            case "swap" if name != "head" and not between:
                add(f"model.{name} = {layers[name][0]}")
            case "swap" if name != "head":
                add(f"model.{name} = {layers[name][0]}.eval()")
            case "hook":
                results = ("o * 1.1", "None", "torch.tanh(o)", "o + a[0].mean()", "model.seen.append(float(o.mean()))")
                add(f"handles.append(model.{name}.register_forward_hook(lambda m, a, o: {pick.choice(results)}))")
            case "pre":
                results = ("(a[0] * 1.1, *a[1:])", "None")
                add(f"handles.append(model.{name}.register_forward_pre_hook(lambda m, a: {pick.choice(results)}))")
            case "backward":
                made = layers[name][0]
                if "inplace" not in made and "Sequential" not in made:
                    results = ("None", "tuple(None if t is None else t * 0.5 for t in i)")
                    add(
                        f"handles.append(model.{name}.register_full_backward_hook(lambda m, i, o: "
                        f"{pick.choice(results)}))"
                    )
            case "unhook":
                add("if handles:")
                add("handles.pop().remove()", 2)
            case "dropout":
                add("for m in model.modules():")
                add("if isinstance(m, nn.Dropout):", 2)
                add(f"m.p = {pick.choice((0.0, 0.4))}", 3)
            case "eps":
                add("for m in model.modules():")
                add("if hasattr(m, 'eps') and m.eps is not None:", 2)
                add("m.eps *= 10", 3)
            case "inplace" if not between:
                add("for m in model.modules():")
                add("if isinstance(m, nn.ReLU):", 2)
                add("m.inplace = not m.inplace" if self.chance(0.2) else "m.inplace = False", 3)
            case "draw":
                add(pick.choice(("torch.rand(3)", "random.random()", "np.random.rand(2)", "torch.manual_seed(5)")))
            case "seen":
                add("model.seen.clear()")
            case "buffer":
                add(f"{holder}.ema = torch.full((8,), 0.2)")
            case "written":
                add("with torch.no_grad():")
                add(f"{holder}.{pick.choice(('ema', 'mean8', 'buffer', 'plain8'))}.add_(0.1)", 2)
            case "plain8":
                add(f"{holder}.plain8 = torch.linspace(0, 1, 8)")
            case "weights" if not between:
                add("with torch.no_grad():")
                add("for p in model.parameters():", 2)
                add("p.mul_(0.9)", 3)
            case "data" if name == "head" or not between:
                add(f"for p in model.{name}.parameters():")
                add("p.data = p.data * 0.9", 2)
            case "method" if not between:
                add(f"model.{name}.forward = scaled(model.{name}.forward)")
            case "format" if self.kind == IMAGE and not between:
                add("model.to(memory_format=torch.channels_last)")
            case "parametrize" if layers[name][0] == "nn.Linear(8, 8)" and not between:
                add(f"if not parametrize.is_parametrized(model.{name}):")
                add(f"parametrizations.weight_norm(model.{name})", 2)
            case "raising" if not between:
                add(f"handles.append(model.{name}.register_forward_hook(refuse))")
                add("try:")
                add(f"model({self.arguments('70')})", 2)
                add("except ArithmeticError as error:")
                add("run.note(str(error))", 2)
                add("handles.pop().remove()")
            case "state":
                add("model.state = None")
            case "forward":
                add("with torch.no_grad():")
                add(f"run.note(square_of(model({self.arguments('60')})))", 2)
            case "part" if name != "head" and layers[name][1] in (ROWS, SEQUENCE, IMAGE) and not between:
                shape = {ROWS: "3, 8", SEQUENCE: "3, 4, 8", IMAGE: "3, 4, 4, 4"}[layers[name][1]]
                made = layers[name][0]
                if not made.startswith(("nn.GRUCell", "nn.RNNCell", "nn.Bilinear")):
                    add(f"run.note(model.{name}(torch.ones({shape})))")
