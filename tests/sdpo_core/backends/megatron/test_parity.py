"""At every layout a model computes what it computes whole in Hugging Face, in float32, and steps alike.

Tolerances are two to three times what was measured here: float32 sums in another order. Gradients and weights are all
compared, those of the value head included.
"""

from collections.abc import Callable, Mapping
from functools import cache

import pytest

pytest.importorskip("megatron.core", reason="needs the extra 'megatron'")

from tests.sdpo_core.backends.megatron.parity import CASES, LEARNING_RATE
from tests.sdpo_core.backends.megatron.processes import run_in_processes

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(300)]

Measured = Callable[[int, str], Mapping[str, float]]
MODULE = "tests.sdpo_core.backends.megatron.parity"
EACH = [(size, case.name) for size, cases in CASES.items() for case in cases]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """Differences of a case: all cases of as many processes are measured in one start of them."""

    @cache
    def measure(size: int) -> Mapping[str, Mapping[str, float]]:
        rows = run_in_processes(f"{MODULE}:measure_all", size=size, folder=tmp_path_factory.mktemp("parity"))
        return {row["case"]: row for row in rows}

    return lambda size, name: measure(size)[name]


@pytest.mark.parametrize(("size", "name"), EACH)
def test_layout_computes_what_one_whole_model_does(size: int, name: str, measured: Measured) -> None:
    found = measured(size, name)
    assert found["scale"] > 0.1
    limits = {
        # Bit by bit: the shares make the weights again, and a folder of them the same logits.
        "weights": 0.0,
        "order": 0.0,
        # Logits reach 1, log-probabilities and the loss 6, where float32 has steps of 5e-7.
        "logits": 1e-6,
        "logp": 2e-6,
        "loss": 1e-6,
        "gradient": 2e-6 * found["scale"],
        # Relative.
        "norm": 1e-6,
        # An entry whose gradient is near 0 takes a step of lr * g / (g + eps): rounding of g shows where eps is small.
        "step 1e-05": 5e-7,
        "step 1e-08": 0.05 * LEARNING_RATE,
    }
    # Written so that NaN fails too.
    assert {key: found[key] for key, limit in limits.items() if not found[key] <= limit} == {}


@pytest.mark.parametrize(("size", "name"), [(size, name) for size, name in EACH if size > 1 and "llama" not in name])
def test_gradients_are_partial_until_finalised(size: int, name: str, measured: Measured) -> None:
    """Those of the query and key norms even where no sequence is cut: a step without finalising would be wrong."""
    found = measured(size, name)
    assert found["unfinished"] > 1e-2 * found["scale"]
