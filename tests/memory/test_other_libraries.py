"""Trainers and layers of other libraries over a managed model: each trains as it does over a plain one.

PyTorch Geometric and MONAI's engines (which need pytorch-ignite) are no dependencies of the tests; where they are
missing, these are skipped by name.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outcore

pytestmark = pytest.mark.slow


def trained_alike(
    make: Callable[[], nn.Module], call: tuple[Any, ...], train: Callable[[nn.Module], list[float]]
) -> bool:
    """Whether losses and weights are those of a plain model, bit for bit."""
    plain, managed = make(), make()
    want = train(plain)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # graphs that are larger than the first one
        outcore.within(managed, call, memory="85%", optimizer=2.0, quiet=True)
        found = train(managed)
    pairs = zip(plain.state_dict().values(), managed.state_dict().values(), strict=True)
    return want == found and all(torch.equal(a, b) for a, b in pairs)


def graph_of(number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(number)
    nodes, edges = 200 + 7 * (number % 3), 900 - 13 * (number % 4)
    groups = torch.sort(torch.randint(8, (nodes,), generator=drawn)).values
    ends = torch.randint(nodes, (2, edges), generator=drawn)
    return torch.randn(nodes, 16, generator=drawn), ends, groups, torch.randint(4, (8,), generator=drawn)


@pytest.mark.parametrize("kind", ["gcn", "gat", "sage", "gin"])
def test_graph_networks(kind: str) -> None:
    layers: Any = pytest.importorskip("torch_geometric.nn")

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList([self.layer(16), self.layer(32), self.layer(32)])
            self.head = nn.Linear(32, 4)

        def layer(self, width: int) -> nn.Module:
            if kind == "gin":
                inner = nn.Sequential(nn.Linear(width, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32))
                return layers.GINConv(inner)  # type: ignore[no-any-return]
            if kind == "gat":
                return layers.GATConv(width, 8, heads=4, dropout=0.2)  # type: ignore[no-any-return]
            return {"gcn": layers.GCNConv, "sage": layers.SAGEConv}[kind](width, 32)  # type: ignore[no-any-return]

        def forward(self, x: torch.Tensor, ends: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = nn.functional.dropout(torch.relu(layer(x, ends)), 0.1, self.training)
            return self.head(layers.global_mean_pool(x, groups))  # type: ignore[no-any-return]

    def train(model: nn.Module) -> list[float]:
        optimizer, losses = torch.optim.Adam(model.parameters(), 1e-2), []
        for number in range(6):
            *call, labels = graph_of(number)
            torch.manual_seed(number)
            loss = nn.functional.cross_entropy(model(*call), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    assert trained_alike(Net, graph_of(0)[:3], train)


def test_monai_s_trainer() -> None:
    events: Any = pytest.importorskip("ignite.engine")
    engines: Any = pytest.importorskip("monai.engines")
    losses_of: Any = pytest.importorskip("monai.losses")
    networks: Any = pytest.importorskip("monai.networks.nets")

    def make() -> nn.Module:
        torch.manual_seed(0)
        shape: dict[str, Any] = {"channels": (8, 16, 32), "strides": (2, 2), "num_res_units": 1, "dropout": 0.1}
        return networks.UNet(spatial_dims=2, in_channels=1, out_channels=2, **shape)  # type: ignore[no-any-return]

    def train(model: nn.Module) -> list[float]:
        drawn, losses = torch.Generator().manual_seed(0), []
        images = [torch.randn(2, 1, 32, 32, generator=drawn) for _ in range(5)]
        data = [{"image": x, "label": torch.randint(2, (2, 1, 32, 32), generator=drawn)} for x in images]
        torch.manual_seed(1)
        trainer = engines.SupervisedTrainer(
            device=torch.device("cpu"),
            max_epochs=2,
            train_data_loader=data,
            network=model,
            optimizer=torch.optim.Adam(model.parameters(), 1e-3),
            loss_function=losses_of.DiceCELoss(to_onehot_y=True, softmax=True),
        )
        done = events.Events.ITERATION_COMPLETED
        trainer.add_event_handler(done, lambda engine: losses.append(float(engine.state.output[0]["loss"])))
        trainer.run()
        return losses

    assert trained_alike(make, (torch.randn(2, 1, 32, 32),), train)


def rows_of(rank: int) -> torch.Tensor:
    return torch.randn(64, 32, generator=torch.Generator().manual_seed(rank))


def sharded_optimizer(rank: int, folder: str) -> None:
    """One of two ranks whose optimizer holds half of the state."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU()) for _ in range(6)])

    def train(model: nn.Module) -> list[float]:
        parallel, losses = DistributedDataParallel(model), []
        optimizer = ZeroRedundancyOptimizer(parallel.parameters(), optimizer_class=torch.optim.Adam, lr=1e-2)
        for _ in range(5):
            optimizer.zero_grad()
            loss = parallel(rows_of(rank)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    assert trained_alike(make, (rows_of(rank),), train)
    dist.barrier()
    dist.destroy_process_group()


def test_an_optimizer_whose_state_is_shared_out(tmp_path: Any) -> None:
    ranks: Any = torch.multiprocessing
    ranks.spawn(sharded_optimizer, args=(str(tmp_path),), nprocs=2)
