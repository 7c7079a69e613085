"""The networks the examples, tests and benchmarks use, written on torch alone.

Each is here because its shape asks something of a planner: long skips, integer skips, cells with two
predecessors, deep chains of small blocks, three dimensions, a block that is never called. All of them can be
built on the ``meta`` device.
"""

from outcore.models.alexnet import AlexNet
from outcore.models.amoebanet import AmoebaNetD
from outcore.models.cosmoflow import CosmoFlow
from outcore.models.relaynet import ReLayNet
from outcore.models.resnet import ResNet110V2
from outcore.models.slidenet import SlideNet
from outcore.models.small import BasicCNN, LeNet, Net2, TwelveConvs
from outcore.models.unet import UNet
from outcore.models.vgg import VGG19

__all__ = [
    "VGG19",
    "AlexNet",
    "AmoebaNetD",
    "BasicCNN",
    "CosmoFlow",
    "LeNet",
    "Net2",
    "ReLayNet",
    "ResNet110V2",
    "SlideNet",
    "TwelveConvs",
    "UNet",
]
