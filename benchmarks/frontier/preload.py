"""What every process of the frontier imports, once, before it is forked."""

from __future__ import annotations

import contextlib

import torch._dynamo  # noqa: F401

import outcore
import outcore.memory.saved_tensors.plan_call  # noqa: F401
from benchmarks.frontier import row  # noqa: F401
from tests.foreign.shim import define_torchvision_operators

define_torchvision_operators()
with contextlib.suppress(ImportError):
    import torchvision  # noqa: F401
    import transformers
    import transformers.models.bert.modeling_bert
    import transformers.models.gpt2.modeling_gpt2

    transformers.logging.set_verbosity_error()
