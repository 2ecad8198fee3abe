"""Exact answers: one text, equal after NFKC and with runs of blanks as one; case counts."""

import unicodedata

from data_prep.feedback import CORRECT, Finding, quote
from data_prep.graders.base import last_answer_block, last_boxed, visible_text
from sdpo_core.errors import DataError
from sdpo_core.records import Problem


def grade_exact(problem: Problem, *, response: str, truncated: bool) -> Finding:
    """Finding for a response whose answer is its last answer block, else its last box, else all that it says."""
    gold = problem.reference.get("answer")
    if not isinstance(gold, str) or not gold.strip():
        raise DataError(f"{problem.id}: got reference answer {gold!r}, expected a text. Prepare the data again.")
    revealed = f"{gold.strip()}."
    text = visible_text(response)
    if text is None:
        return Finding(reason="truncated" if truncated else "open_reasoning", gold=revealed, format_ok=False)
    block = last_answer_block(text)
    # A response that was cut says nothing final outside a closed block.
    if truncated and not (block is not None and block.is_closed):
        return Finding(reason="truncated", gold=revealed, format_ok=False)
    boxed = None if block is not None else last_boxed(text)
    answer = block.text if block is not None else text if boxed is None else boxed
    if not answer.strip():
        return Finding(reason="no_answer", gold=revealed, format_ok=False)
    is_right = _key(answer) == _key(gold)
    return Finding(
        reason=CORRECT if is_right else "wrong_answer",
        gold=revealed,
        format_ok=True,
        score=float(is_right),
        answer=quote(answer),
        facts={"quote": f'"{quote(answer, limit=78)}"'},
    )


def _key(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).split())
