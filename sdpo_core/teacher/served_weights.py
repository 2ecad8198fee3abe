"""The weights of a served teacher: the folder its server loads, their digest, and a canary that shows they are served.

The canary is a few responses with this process's own scores of them. A teacher that follows has its master copy here,
in float32 and in main memory, so that it can score the canary after every commit. A static one is loaded once to score
it and then let go: from there on only the server holds it.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from sdpo_core.backends.base import TeacherQuestion, TeacherScores, WeightsAt
from sdpo_core.backends.hf_model import HfModel
from sdpo_core.backends.scorer import ModelScorer, Part
from sdpo_core.backends.weight_files import WEIGHTS_FILE
from sdpo_core.errors import CellError
from sdpo_core.model_folder import weights_digest
from sdpo_core.rollout.publish import canary_rows
from sdpo_core.text import ChatTokenizer

CANARY_K = 4
_CANARY_PROMPT_TOKENS = 12
# Nats below the entropy of even odds from which on an answer says something; rounding leaves 1e-6.
_EVEN_SLACK = 1e-5


class ServedWeights:
    """`folder`: what the server loads at a start; `published`: what it has to hold now.

    `version` counts the commits. `tolerance`: nats between the server's scores of the canary and those from here.
    """

    def __init__(
        self, at: WeightsAt, *, dtype: torch.dtype, temperature: float, tolerance: float, follows: bool, scratch: Path
    ) -> None:
        self._source = at.folder
        self._dtype = dtype
        self._temperature = temperature
        self._tolerance = tolerance
        self._scratch = scratch
        remove_weights(scratch)
        self.vocab = ChatTokenizer.load(at.folder).vocab_size
        self.version = 0
        self.canary = canary_questions(self.vocab)
        model = HfModel(
            at.folder, dtype=torch.float32 if follows else dtype, device=torch.device("cpu"), valid_vocab=self.vocab
        )
        self.folder = at.folder
        if at.weights is not None:
            model.load_weights(at.weights)
            self.folder = self._write(model, name="start")
        self.published = self.folder
        self._start_digest = self.digest()
        self._check_start(at, held=model.facts().weights_sha256)
        self._expected = self._own_scores(model)
        self.master = model if follows else None

    def digest(self) -> str:
        """SHA-256 of the weights in `published`, read anew."""
        return weights_digest(self.published)

    def check_folder(self) -> None:
        """Raise CellError unless `folder` holds what it held when the cell was started: a server reads it again."""
        found = weights_digest(self.folder)
        if found != self._start_digest:
            raise CellError(
                f"served teacher {self.folder}: got weights {found}, expected {self._start_digest}, as at the start. "
                "Put them back, and run the experiment again."
            )

    def publish(self) -> Path:
        """Write the master copy, in the server's dtype, to a folder for it; the one before may go after `keep_last`."""
        assert self.master is not None
        self.version += 1
        self.published = self._write(self.master, name=f"version-{self.version}")
        self._expected = self._own_scores(self.master)
        return self.published

    def keep_last(self) -> None:
        """Delete what was published before `published`; what a start reads stays."""
        remove_weights(self._scratch, but=(self.folder, self.published))

    def check_canary(self, found: tuple[TeacherScores, ...]) -> None:
        """Raise CellError unless the server scores the canary as these weights do, and not as no weights would."""
        even = np.log(self.vocab)
        if all((even - answer.entropies < _EVEN_SLACK).all() for answer in found):
            raise CellError(
                f"served teacher: got the same log-probability ({-even:.3f}) for every id, expected those of a model. "
                "The server has lost the weights; look at its log, and run the experiment again."
            )
        gaps = [
            np.abs(getattr(one, name) - getattr(other, name)).max()
            for one, other in zip(found, self._expected, strict=True)
            for name in ("logps", "entropies", "table")
        ]
        if not max(gaps) <= self._tolerance:
            raise CellError(
                f"served teacher: got scores {max(gaps):.3g} nats from those of version {self.version} of the weights, "
                f"expected at most {self._tolerance:g}. The server holds other weights, or reads them otherwise; look "
                "at its log, and run the experiment again from the last checkpoint."
            )

    def _check_start(self, at: WeightsAt, *, held: str) -> None:
        if held != self._start_digest:
            raise CellError(
                f"served teacher {self.folder}: got weights {self._start_digest}, which are others ({held}) in "
                f"{self._dtype}, expected weights that this dtype holds. Serve them in the dtype they are stored in."
            )
        if at.sha256 not in (None, held):
            raise CellError(
                f"served teacher {at.weights or at.folder}: got weights {held}, expected {at.sha256}. Put the declared "
                "weights there, or declare these in an arm of their own."
            )

    def _own_scores(self, model: HfModel) -> tuple[TeacherScores, ...]:
        scorer = ModelScorer([Part(model=model, share=1.0)], temperature=self._temperature, max_tokens=1024)
        return scorer.score(self.canary, support="student", top_k=CANARY_K)

    def _write(self, model: HfModel, *, name: str) -> Path:
        """A whole folder in Hugging Face form: the source's, but for the weights."""
        folder = self._scratch / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for path in self._source.iterdir():
            if path.is_file() and ".safetensors" not in path.name:
                shutil.copyfile(path, folder / path.name)
        tensors = {name: value.detach().to(self._dtype) for name, value in model.model.named_parameters()}
        save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
        return folder


def remove_weights(scratch: Path, *, but: Sequence[Path] = ()) -> None:
    """Delete the folders of weights in a served teacher's `scratch`: those of a run that was killed, too."""
    for folder in (*scratch.glob("version-*"), *scratch.glob("start")):
        if folder not in but:
            shutil.rmtree(folder)


def canary_questions(vocab: int) -> tuple[TeacherQuestion, ...]:
    """Two responses under two prompts, of ids from all over the vocabulary, with ids to score at each token."""
    prompts = [tuple(np.linspace(first, vocab - 1, _CANARY_PROMPT_TOKENS).astype(int).tolist()) for first in (0, 1)]
    spread = np.linspace(0, vocab - 1, CANARY_K).astype(np.int64)
    return tuple(
        TeacherQuestion(row=row, student_ids=np.tile(spread, (len(row.response_ids), 1)))
        for row in canary_rows(prompts, vocab=vocab)
    )
