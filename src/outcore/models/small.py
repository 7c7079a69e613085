"""Four small networks that every tool for looking at networks is shown first.

``LeNet`` is a plain chain with two pools, registered in another order than called. ``BasicCNN`` calls
functions between its modules and one whose effect depends on training. ``Net2`` joins two branches with
``torch.cat`` and has a layer that it never calls. ``TwelveConvs`` keeps its layers in a list; its twelve
convolutions vary in channels and kernel, for fitting time against both.

LeCun et al., "Gradient-based learning applied to document recognition" (Proceedings of the IEEE 1998) is the
origin of the first.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class LeNet(nn.Module):
    """Ten classes from colour images of 32x32 pixels.

    >>> LeNet()(torch.zeros(4, 3, 32, 32)).shape
    torch.Size([4, 10])
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.pool1 = nn.MaxPool2d(2, 2)
        self.pool2 = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool1(F.relu(self.conv1(x)))
        x = self.pool2(F.relu(self.conv2(x)))
        x = x.view(-1, 16 * 5 * 5)
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        scores: Tensor = self.fc3(x)
        return scores


class BasicCNN(nn.Module):
    """Log-probabilities of ten digits from grey images of 28x28 pixels.

    >>> BasicCNN()(torch.zeros(4, 1, 28, 28)).shape
    torch.Size([4, 10])
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, kernel_size=5)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.conv2_drop = nn.Dropout2d()
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2_drop(self.conv2(x)), 2))
        x = x.view(-1, 320)
        x = F.relu(self.fc1(x))
        x = F.dropout(x, training=self.training)
        x = self.fc2(x)
        return F.log_softmax(x, dim=1)


class Net2(nn.Module):
    """Two branches joined; ``fc2`` is registered and never called.

    >>> Net2(features=6 * 20 * 30)(torch.zeros(4, 3, 20, 30)).shape
    torch.Size([4, 120])

    Args:
        features: six times the pixels of an image; the default fits 762x508 pixels, for example.
    """

    def __init__(self, features: int = 2322576) -> None:
        super().__init__()
        self.features = features
        self.conv1 = nn.Conv2d(3, 6, 5, padding=2)
        self.conv2 = nn.Conv2d(6, 16, 5, padding=2)
        self.conv3 = nn.Conv2d(16, 6, 5, padding=2)
        self.conv4 = nn.Conv2d(22, 6, 5, padding=2)
        self.fc1 = nn.Linear(features, 120)
        self.fc2 = nn.Linear(120, 10)

    def forward(self, x: Tensor) -> Tensor:
        z = F.relu(self.conv1(x))
        z = F.relu(self.conv2(z))
        y = F.relu(self.conv3(z))
        x = self.conv4(torch.cat((z, y), 1))
        x = x.view(-1, self.features)
        return F.relu(self.fc1(x))


class TwelveConvs(nn.Module):
    """Log-probabilities of ten classes from colour images of any size, through twelve convolutions in a row.

    >>> TwelveConvs()(torch.zeros(2, 3, 9, 16)).shape
    torch.Size([2, 10])
    """

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for outputs in (32, 64, 128):
            for kernel in (3, 3, 5, 7):
                layers.append(nn.Conv2d(channels, outputs, kernel, padding=kernel // 2))
                channels = outputs
        layers += [nn.AdaptiveAvgPool2d((1, 1)), nn.Linear(128, 10), nn.LogSoftmax(dim=1)]
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if isinstance(layer, nn.Linear):
                x = torch.flatten(x, 1)
            x = layer(x)
        return x
