"""Jobs that return Keras models: every command takes them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import outcore
from outcore.errors import JobError
from outcore.keras.installed import is_keras_2
from tests.keras.oracle import keras

L = keras.layers

JOB = """
import keras
import torch

L = keras.layers


def model():
    given = keras.Input((16, 16, 3))
    first = L.BatchNormalization()(L.Conv2D(8, 3, padding="same", activation="relu", name="first")(given))
    x = L.Conv2D(16, 3, strides=2, padding="same", activation="relu")(first)
    x = L.Concatenate()([L.UpSampling2D()(x), first])
    return keras.Model(given, L.Conv2D(2, 1, name="last")(x))


def batch(size):
    return torch.randn(size, 16, 16, 3, dtype=torch.float64), torch.randint(2, (size, 16, 16))


def loss(output, target):
    return torch.nn.functional.cross_entropy(output.permute(0, 3, 1, 2), target)
"""


@pytest.fixture
def job(tmp_path: Path) -> outcore.Job:
    path = tmp_path / "job.py"
    path.write_text(JOB)
    return outcore.Job.load(str(path))


def test_the_graph_has_a_block_for_every_layer(job: outcore.Job) -> None:
    graph = job.capture(2)
    names = set(graph.root.children)
    assert {"first", "last", "concatenate"} <= names


def test_builds_from_one_seed_are_the_same(job: outcore.Job) -> None:
    models = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        models.append(job.build())
    first, second, third = (model.state_dict() for model in models)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not all(torch.equal(first[name], third[name]) for name in first)


def test_it_trains_the_same_within_a_budget(job: outcore.Job) -> None:
    torch.manual_seed(0)
    plain, managed = job.build().train(), job.build().train()
    managed.load_state_dict(plain.state_dict())
    inputs, target = job.batch(4)
    outcore.within(managed, (inputs,), memory="90%", optimizer=torch.optim.SGD, quiet=True)
    for model in (plain, managed):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            job.loss(model(inputs), target).backward()
            optimizer.step()
    outcore.release(managed)
    found = managed.state_dict()
    for name, value in plain.state_dict().items():
        assert torch.equal(value, found[name]), name


def test_a_layer_that_cannot_be_carried_over_is_an_error_of_the_job() -> None:
    made = outcore.Job(
        model=lambda: keras.Sequential([keras.Input((3,)), L.Lambda(lambda x: x, name="mine")]),
        batch=lambda size: (torch.randn(size, 3), None),
    )
    with pytest.raises(JobError, match="mine"):
        made.build()


def test_a_model_of_keras_2_is_answered() -> None:
    old = type("Functional", (), {"__module__": "tf_keras.src.engine.functional"})()
    assert is_keras_2(old)
    with pytest.raises(JobError, match="Keras 2"):
        outcore.Job(model=lambda: old, batch=lambda size: (torch.randn(size, 3), None)).build()


OF_A_CLASS = """
import keras
import torch

L = keras.layers


class Block(L.Layer):
    def build(self, shape):
        self.inner = L.Dense(shape[-1], name="inner")
        self.inner.build(shape)

    def call(self, x):
        return x + self.inner(x * 2)


def model():
    given = keras.Input((6,))
    return keras.Model(given, L.Dense(2)(Block(name="second")(Block(name="first")(given))))


def batch(size):
    return torch.randn(size, 6, dtype=torch.float64), torch.randn(size, 2, dtype=torch.float64)


def loss(output, target):
    return ((output - target) ** 2).mean()
"""


def test_operations_of_a_class_have_the_same_names_every_time_it_is_built(tmp_path: Path) -> None:
    """Keras counts them for as long as a process lives: ranks refused the plan that had been made for their graph."""
    path = tmp_path / "job.py"
    path.write_text(OF_A_CLASS)
    job = outcore.Job.load(str(path))
    graphs = [job.capture(2) for _ in range(3)]
    assert len({graph.fingerprint for graph in graphs}) == 1
    assert [list(graph.calls) for graph in graphs[1:]] == [list(graphs[0].calls)] * 2
