"""Forwards that keep something outside of the model: every place in which Python lets a function remember.

Each case is the text of a module with a class ``Net`` whose forward adds ``made(n)``, a tensor that depends on the size
of its input alone, kept from one call to the next.
"""

from __future__ import annotations

import itertools
import sys
from types import ModuleType

__all__ = ["CASES", "CHANGING", "load"]

_HEAD = """
import collections, contextvars, dataclasses, functools, threading, types, weakref
import torch
from torch import nn

def fresh(n):
    return torch.arange(n, dtype=torch.float32, device="cpu") / n
"""
_NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x) + made(x.shape[-1]))
        return x
"""
_PLACES = {
    "a dictionary": """
KEPT = {}
def made(n):
    if n not in KEPT:
        KEPT[n] = fresh(n)
    return KEPT[n]
""",
    "an ordered dictionary that forgets": """
KEPT = collections.OrderedDict({1: "one", 2: "two"})
def made(n):
    if n not in KEPT:
        KEPT.popitem(last=False)
        KEPT[n] = fresh(n)
    KEPT.move_to_end(n)
    return KEPT[n]
""",
    "a defaultdict": """
KEPT = collections.defaultdict(list)
def made(n):
    if not KEPT[n]:
        KEPT[n].append(fresh(n))
    return KEPT[n][0]
""",
    "a list": """
KEPT = []
def made(n):
    if len(KEPT) < 3:
        KEPT.append((n, fresh(n)))
    return KEPT[0][1]
""",
    "a deque": """
KEPT = collections.deque(maxlen=2)
def made(n):
    if not KEPT:
        KEPT.append({"n": n, "made": fresh(n)})
    return KEPT[0]["made"]
""",
    "a set": """
KEPT = set()
def made(n):
    if not KEPT:
        KEPT.add(fresh(n))
    return next(iter(KEPT))
""",
    "a dictionary in a tuple in a dictionary": """
KEPT = {"inside": ({}, [])}
def made(n):
    inside = KEPT["inside"][0]
    return inside.setdefault(n, fresh(n))
""",
    "a global name": """
KEPT = None
def made(n):
    global KEPT
    if KEPT is None:
        KEPT = fresh(n)
    return KEPT
""",
    "a global name that is new": """
def made(n):
    global KEPT
    if "KEPT" not in globals():
        KEPT = fresh(n)
    return KEPT
""",
    "a class": """
class Kept:
    found = None
    by_size = {}
def made(n):
    if Kept.found is None:
        Kept.found = Kept.by_size[n] = fresh(n)
    return Kept.by_size[n]
""",
    "a class attribute that is new": """
class Kept:
    pass
def made(n):
    if not hasattr(Kept, "found"):
        Kept.found = fresh(n)
    return Kept.found
""",
    "the class of the model": """
def made(n):
    if not hasattr(Net, "found"):
        Net.found = fresh(n)
    return Net.found
""",
    "a function": """
def made(n):
    if not hasattr(made, "found"):
        made.found = {}
    return made.found.setdefault(n, fresh(n))
""",
    "a default argument": """
def made(n, kept={}):
    if n not in kept:
        kept[n] = fresh(n)
    return kept[n]
""",
    "a closure": """
def closed():
    kept, last = {}, None
    def made(n):
        nonlocal last
        if n not in kept:
            kept[n] = last = fresh(n)
        return (kept[n] + last) / 2
    return made
made = closed()
""",
    "an object": """
class Store:
    def __init__(self):
        self.found = {}
        self.last = None
    def made(self, n):
        if n not in self.found:
            self.found[n] = self.last = fresh(n)
        return self.found[n]
STORE = Store()
def made(n):
    return STORE.made(n)
""",
    "an object with slots": """
class Store:
    __slots__ = ("last",)
    def __init__(self):
        self.last = None
STORE = Store()
def made(n):
    if STORE.last is None:
        STORE.last = fresh(n)
    return STORE.last
""",
    "an object that is called": """
class Store:
    def __init__(self):
        self.found = {}
    def __call__(self, n):
        if n not in self.found:
            self.found[n] = fresh(n)
        return self.found[n]
made = Store()
""",
    "a dataclass in a dictionary": """
@dataclasses.dataclass
class Entry:
    found: object = None
KEPT = {"one": Entry()}
def made(n):
    entry = KEPT["one"]
    if entry.found is None:
        entry.found = fresh(n)
    return entry.found
""",
    "a namespace": """
KEPT = types.SimpleNamespace(found=None)
def made(n):
    if KEPT.found is None:
        KEPT.found = fresh(n)
    return KEPT.found
""",
    "a dictionary of its own class": """
class Store(dict):
    def __missing__(self, n):
        self[n] = fresh(n)
        return self[n]
KEPT = Store()
def made(n):
    return KEPT[n]
""",
    "a variable of a thread": """
KEPT = threading.local()
def made(n):
    if not hasattr(KEPT, "found"):
        KEPT.found = fresh(n)
    return KEPT.found
""",
    "a variable of a context": """
KEPT = contextvars.ContextVar("kept", default=None)
def made(n):
    if KEPT.get() is None:
        KEPT.set(fresh(n))
    return KEPT.get()
""",
    "a dictionary with weak keys": """
class Key:
    pass
KEY, KEPT = Key(), weakref.WeakKeyDictionary()
def made(n):
    if KEY not in KEPT:
        KEPT[KEY] = fresh(n)
    return KEPT[KEY]
""",
    "functools.cache": """
@functools.cache
def made(n):
    return fresh(n)
""",
    "functools.lru_cache of a method": """
class Store:
    @functools.lru_cache(maxsize=4)
    def made(self, n):
        return fresh(n)
STORE = Store()
def made(n):
    return STORE.made(n)
""",
    "a cached property": """
class Store:
    n = 24
    @functools.cached_property
    def found(self):
        return fresh(self.n)
STORE = Store()
def made(n):
    return STORE.found
""",
    "a decorator": """
def remembered(function):
    kept = {}
    @functools.wraps(function)
    def inner(*args):
        if args not in kept:
            kept[args] = function(*args)
        return kept[args]
    return inner

@remembered
def made(n):
    return fresh(n)
""",
    "a generator": """
def forever():
    kept = None
    n = yield
    while True:
        kept = fresh(n) if kept is None else kept
        n = yield kept
STREAM = None
def made(n):
    global STREAM
    if STREAM is None:
        STREAM = forever()
        next(STREAM)
    return STREAM.send(n)
""",
    "a shared module": """
class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.kept, self.last = {}, None
    def forward(self, n):
        if n not in self.kept:
            self.kept[n] = self.last = fresh(n)
        return self.kept[n]
SHARED = Shared()
def made(n):
    return SHARED(n)
""",
    "a mixin of the model's class": """
class Mixin:
    _kept = {}
    @classmethod
    def of(cls, n):
        if n not in cls._kept:
            cls._kept[n] = fresh(n)
        return cls._kept[n]
def made(n):
    return Mixin.of(n)
""",
    "an object of another package, by its method": """
class Store:
    def __init__(self):
        self.found = {}
    def made(self, n):
        if n not in self.found:
            self.found[n] = fresh(n)
        return self.found[n]
Store.__module__ = "helpers_of_the_author.stores"
made = Store().made
""",
    "an object of another package, in the model": """
class Store:
    def __init__(self):
        self.found = {}
Store.__module__ = "helpers_of_the_author.stores"
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(6))
        self.stores = {"one": [Store()]}

    def forward(self, x):
        found = self.stores["one"][0].found
        for layer in self.layers:
            if x.shape[-1] not in found:
                found[x.shape[-1]] = fresh(x.shape[-1])
            x = torch.tanh(layer(x) + found[x.shape[-1]])
        return x
""",
    "plain numbers": """
KEPT = {}
def made(n):
    if n not in KEPT:
        KEPT[n] = [i / n for i in range(n)]
    return torch.tensor(KEPT[n], dtype=torch.float32)
""",
    "another type of tensor": """
KEPT = {}
def made(n):
    if torch.Tensor not in KEPT:
        KEPT[torch.Tensor] = fresh
    return KEPT[torch.Tensor](n)
""",
}
_NOT_KEPT_ALONE = {
    "the spread of the first batch": """
KEPT = {}
def made(x, net):
    if "scale" not in KEPT:
        KEPT["scale"] = x.detach().std(0)
    return KEPT["scale"]
""",
    "the first weights": """
KEPT = None
def made(x, net):
    global KEPT
    if KEPT is None:
        KEPT = net.layers[0].bias.detach().clone()
    return KEPT
""",
    "what a buffer was": """
KEPT = None
def made(x, net):
    global KEPT
    if KEPT is None:
        KEPT = net.level + 1
    net.level.add_(1)
    return KEPT
""",
    "random numbers": """
KEPT = []
def made(x, net):
    if not KEPT:
        KEPT.append(torch.rand(x.shape[-1]))
    return KEPT[0]
""",
    "random numbers written in place": """
KEPT = []
def made(x, net):
    if not KEPT:
        KEPT.append(torch.empty(x.shape[-1]).uniform_())
    return KEPT[0]
""",
    "a sum that grows in place": """
KEPT = {}
def made(x, net):
    if "sum" not in KEPT:
        KEPT["sum"] = fresh(x.shape[-1])
    KEPT["sum"].add_(1)
    return KEPT["sum"].clone()
""",
    "a sum that grows by new tensors": """
KEPT = {}
def made(x, net):
    KEPT["sum"] = KEPT.get("sum", fresh(x.shape[-1])) + 1
    return KEPT["sum"]
""",
    "the last output": """
KEPT = {}
def made(x, net):
    last = KEPT.get("last", fresh(x.shape[-1]))
    KEPT["last"] = x.detach().mean(0)
    return last
""",
    "a count": """
KEPT = [0]
def made(x, net):
    KEPT[0] += 1
    return fresh(x.shape[-1]) * KEPT[0]
""",
    "another way in the second call": """
KEPT = set()
def made(x, net):
    if "called" in KEPT:
        return fresh(x.shape[-1]) * 2
    KEPT.add("called")
    return fresh(x.shape[-1])
""",
    "one step less in the second call": """
KEPT = set()
def made(x, net):
    found = fresh(x.shape[-1])
    if "called" not in KEPT:
        KEPT.add("called")
        found = found * 3
    return found
""",
    "a part of what was kept": """
KEPT = {}
def made(x, net):
    if "two" not in KEPT:
        KEPT["two"] = (fresh(x.shape[-1]), fresh(x.shape[-1]) * 2)
        return KEPT["two"][0]
    return KEPT["two"][1]
""",
    "what the input is": """
KEPT = {}
def made(x, net):
    if "first" not in KEPT:
        KEPT["first"] = x
    return KEPT["first"].detach().mean(0)
""",
    "the first output, in the model": """
KEPT = []
def made(x, net):
    if len(KEPT) < 6:
        KEPT.append(x.shape)
        net.level = x.detach().mean(0)
    return net.level + fresh(x.shape[-1])
""",
    "a dropout mask": """
KEPT = {}
def made(x, net):
    if "mask" not in KEPT:
        KEPT["mask"] = torch.nn.functional.dropout(torch.ones(x.shape[-1]))
    return KEPT["mask"]
""",
}
"""Forwards whose second call is another one: what they keep follows from the first, or changes."""
_BUFFERED = _NET.replace(
    "        self.layers =", '        self.register_buffer("level", torch.zeros(24))\n        self.layers ='
).replace("made(x.shape[-1])", "made(x, self)")
CHANGING = {name: _HEAD + text + _BUFFERED for name, text in _NOT_KEPT_ALONE.items()}
"""The text of each, by what it keeps."""
CASES = {name: _HEAD + text + ("" if "class Net(" in text else _NET) for name, text in _PLACES.items()}
"""The text of each, by the place in which it remembers."""


_NUMBERS = itertools.count()


def load(name: str) -> ModuleType:
    """A module of its own with the code of a case."""
    module = ModuleType(f"kept_outside_{next(_NUMBERS)}")
    sys.modules[module.__name__] = module
    exec(compile((CASES | CHANGING)[name], f"<{name}>", "exec"), module.__dict__)
    return module
