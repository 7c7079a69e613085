"""An ordinary image folder: VGG-19 for two classes, or ResNet-50, Inception-v3 or VGG-19 of torchvision.

network=VGG19                              outcore's own, from scratch
network=resnet50 pretrained=True           torchvision's, fine-tuned (downloads its weights)
"""

import torch
from torch import nn

from outcore import JobError
from outcore.models import VGG19

SIDE = 224


def model(network="VGG19", pretrained=False, classes=2):
    if network == "VGG19":
        return VGG19(classes)
    try:
        import torchvision.models as zoo
    except ImportError as error:
        raise JobError(f"network={network} is torchvision's; install it with: pip install torchvision") from error
    weights = "DEFAULT" if pretrained else None
    if network == "inception_v3":
        net = zoo.inception_v3(weights=weights, init_weights=weights is None, aux_logits=weights is not None)
        net.aux_logits, net.AuxLogits = False, None
    else:
        net = getattr(zoo, network)(weights=weights)
    if not pretrained:
        for norm in (m for m in net.modules() if isinstance(m, nn.BatchNorm2d)):
            norm.momentum = 0.5  # at 0.1, the statistics of a few steps are still near where they began
    if isinstance(getattr(net, "fc", None), nn.Linear):
        net.fc = nn.Linear(net.fc.in_features, classes)
    else:
        net.classifier[-1] = nn.Linear(net.classifier[-1].in_features, classes)
    return net


def batch(size):
    return torch.rand(size, 3, SIDE, SIDE), torch.randint(2, (size,))


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.001, momentum=0.9)
