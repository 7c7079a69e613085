"""What every process of the frontier imports, once, before it is forked."""

from __future__ import annotations

import torch._dynamo  # noqa: F401

import outcore
import outcore.memory.saved_tensors.plan_call  # noqa: F401
from benchmarks.frontier import row  # noqa: F401
from tests.foreign.shim import define_torchvision_operators

define_torchvision_operators()  # before torchvision, where it was built for another torch

import torchvision  # noqa: E402
import transformers  # noqa: E402
import transformers.models.bert.modeling_bert  # noqa: E402
import transformers.models.gpt2.modeling_gpt2  # noqa: E402

__all__ = ["torchvision", "transformers"]

transformers.logging.set_verbosity_error()
