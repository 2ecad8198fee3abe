"""A model of one process beside the layouts of `test_objectives`: what it takes from another model."""

import pytest
import torch

from sdpo_core.backends.base import Projection
from sdpo_core.backends.megatron.model import MegatronModel
from sdpo_core.layout import LayoutSpec
from tests.sdpo_core.micro import Base

pytestmark = pytest.mark.megatron


def test_projection_of_a_teacher_comes_to_the_models_device(base: Base) -> None:
    """It travels on the CPU; the device without memory stands for a GPU."""
    cpu = torch.device("cpu")
    model = MegatronModel(base.folder, layout=LayoutSpec(), dtype=torch.float32, device=cpu, valid_vocab=259)
    model.device = torch.device("meta")
    travelled = Projection(
        weight=torch.zeros(262, 32), bias=torch.zeros(262), logit_scale=1.0, soft_cap=None, vocab=259, version=1
    )
    head = model.head_of(travelled, temperature=1.0)
    assert head.bias is not None
    assert head.weight.device == head.bias.device == model.device
