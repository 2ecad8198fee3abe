"""The head: what it refuses, and that its rows go through the product in parts without a difference."""

import math
from typing import Any

import pytest
import torch

from sdpo_core.errors import SpecError
from sdpo_core.objectives import head as head_module
from sdpo_core.objectives.full_divergence import FullDivergence
from sdpo_core.objectives.head import Head, compute_dtype, hidden_slope, project


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"temperature": 0.0}, "got temperature 0.0"),
        ({"temperature": math.nan}, "got temperature nan"),
        ({"vocab": 5}, "got vocab 5, expected 1 to 4"),
        ({"vocab": 0}, "got vocab 0"),
        ({"soft_cap": 0.0}, "got soft_cap 0.0"),
        ({"logit_scale": 0.0}, "got logit_scale 0.0"),
        ({"logit_scale": math.inf}, "got logit_scale inf"),
        ({"temperature": -1.0, "soft_cap": -1.0}, "temperature -1.0, .*; got soft_cap -1.0"),
    ],
)
def test_a_head_refuses_settings_that_make_no_logits(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        Head(**{"weight": torch.zeros(4, 2), "temperature": 1.0, "vocab": 4, **settings})


@pytest.mark.parametrize(("alpha", "clip"), [(-0.1, None), (1.1, None), (math.nan, None), (0.5, 0.0), (0.5, math.nan)])
def test_a_full_divergence_refuses_settings_out_of_range(alpha: float, clip: float | None) -> None:
    with pytest.raises(SpecError, match="FullDivergence: got"):
        FullDivergence(alpha=alpha, entry_clip=clip)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_projection_in_parts_is_the_whole_one(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scale, bias, cap and temperature as written, from any first row, and back to the hidden states."""
    monkeypatch.setattr(head_module, "CPU_ROWS", 3)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(5, 4, generator=generator).to(dtype)
    weight, bias = torch.randn(11, 4, generator=generator).to(dtype), torch.randn(11, generator=generator).to(dtype)
    head = Head(weight=weight, bias=bias, temperature=0.7, vocab=10, logit_scale=0.5, soft_cap=2.0)
    assert compute_dtype(hidden, head) == torch.float32
    out = torch.full((5, 8), torch.nan)
    project(hidden.float(), head, first=2, out=out)
    scaled = 0.5 * (hidden.float() @ weight[2:10].float().T + bias[2:10].float())
    assert torch.allclose(out, 2.0 * torch.tanh(scaled / 2.0) / 0.7, atol=1e-6)
    slope = torch.randn(5, 10, generator=generator)
    assert torch.allclose(hidden_slope(slope, head), slope @ weight[:10].float() * (0.5 / 0.7), atol=1e-5)


def test_a_tile_is_the_head_of_its_rows() -> None:
    weight, bias = torch.randn(8, 3), torch.randn(8)
    head = Head(weight=weight, bias=bias, temperature=0.7, vocab=7, logit_scale=0.5, soft_cap=2.0)
    hidden, whole, part = torch.randn(4, 3), torch.empty(4, 7), torch.empty(4, 3)
    project(hidden, head, first=0, out=whole)
    project(hidden, head.tile(slice(2, 5), dtype=torch.float32), first=0, out=part)
    assert torch.allclose(part, whole[:, 2:5], atol=1e-6)


def test_float64_on_either_side_is_kept() -> None:
    head = Head(weight=torch.zeros(2, 1, dtype=torch.float64), temperature=1.0, vocab=2)
    assert compute_dtype(torch.zeros(1, 1, dtype=torch.bfloat16), head) == torch.float64
