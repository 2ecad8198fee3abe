"""Hand-made groups for the algorithms, and gradients of dense losses to hold them against."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sdpo_core.algorithms.base import StepTools
from sdpo_core.backends.base import TokenRow
from sdpo_core.cell import Workers
from sdpo_core.phases import PhaseClock
from sdpo_core.records import GradedRollout, Group
from sdpo_core.specs import CellSpec
from tests.sdpo_core.micro import Base, load_model, make_member, make_problem

# Gradients of float32 workers against float64 oracles: share of a parameter's largest entry.
GRADIENT_TOLERANCE = 3e-5


def make_tools(spec: CellSpec, *, base: Base, workers: Workers, step: int = 1) -> StepTools:
    return StepTools(
        step=step,
        spec=spec,
        text=base.text,
        student=workers.student,
        teacher=workers.teacher,
        phases=PhaseClock(lambda: 0.0),
    )


def make_group(
    base: Base, *, position: int, scores: Sequence[float], feedback: str = "odd", lengths: Sequence[int] = (3, 1, 5, 2)
) -> Group:
    """One rollout a score, of ragged lengths; failures carry `feedback`."""
    problem = make_problem(position)
    prompt = base.text.prompt_ids(problem.prompt)
    members: list[GradedRollout] = []
    for index, score in enumerate(scores):
        ids = tuple(range(60 + 9 * index + position, 60 + 9 * index + position + lengths[index]))
        members.append(
            make_member(
                ids,
                prompt=prompt,
                score=score,
                feedback="" if score == 1.0 else feedback,
                text=base.text.decode(ids),
            )
        )
    return Group(problem=problem, position=position, members=tuple(members))


class DenseModel:
    """Given weights in float64, run row by row without cache: what workers are held against."""

    def __init__(self, base: Base, weights: Mapping[str, Tensor]) -> None:
        self._model = load_model(base.folder, dtype=torch.float64)
        self._model.blend(weights, rate=1.0)

    def logps(self, row: TokenRow, *, temperature: float = 1.0) -> Tensor:
        """[token, vocabulary] log-probabilities, with gradient."""
        ids = torch.tensor([[*row.prompt_ids, *row.response_ids]])
        logits: Tensor = self._model.model(input_ids=ids).logits[0, :, :259]
        first = len(row.prompt_ids) - 1
        return (logits[first : first + len(row.response_ids)] / temperature).log_softmax(dim=1)

    def own_logps(self, row: TokenRow, *, temperature: float = 1.0) -> Tensor:
        """[token] of the response's own tokens."""
        return self.logps(row, temperature=temperature).gather(1, torch.tensor(row.response_ids)[:, None])[:, 0]

    def assert_gradient(self, loss: Tensor, *, workers: Workers) -> None:
        """The student's last gradient is that of `loss`, for every parameter."""
        names = [name for name, _ in self._model.model.named_parameters()]
        slopes = torch.autograd.grad(loss, list(self._model.model.parameters()))
        found = dict(workers.student._policy.model.model.named_parameters())  # type: ignore[attr-defined]
        assert list(found) == names
        for name, slope in zip(names, slopes, strict=True):
            size = float(slope.abs().max())
            assert size > 1e-6, name
            atol = GRADIENT_TOLERANCE * size
            torch.testing.assert_close(found[name].grad.double(), slope, rtol=0, atol=atol, msg=name)
