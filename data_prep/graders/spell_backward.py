"""Words spelled backward: reasoning-gym's partial scores.

1 for the reversed word in any case; else the share of positions that agree. An answer that only begins with the
reversed word would reach 1 by that rule and gets 0.8.
"""

from data_prep.feedback import CORRECT, Finding, quote
from data_prep.graders.base import last_answer_block, visible_text
from sdpo_core.errors import DataError
from sdpo_core.records import Problem

_PREFIX_SCORE = 0.8


def grade_spell_backward(problem: Problem, *, response: str, truncated: bool) -> Finding:
    """Finding for a word; the answer is the last answer block, else the whole response, without outer blanks."""
    gold = problem.reference.get("answer")
    if not isinstance(gold, str) or not gold:
        raise DataError(f"{problem.id}: got reference answer {gold!r}, expected a word. Prepare the data again.")
    revealed = f"{gold}."
    text = visible_text(response)
    if truncated or text is None:
        return Finding(reason="truncated" if truncated else "open_reasoning", gold=revealed, format_ok=False)
    block = last_answer_block(text)
    answer = (block.text if block else text).strip()
    if not answer:
        return Finding(reason="no_answer", gold=revealed, format_ok=False)
    read, expected = answer.lower(), gold.lower()
    # Not strict: an answer of another length agrees where both have letters.
    places = [place for place, pair in enumerate(zip(expected, read, strict=False), start=1) if pair[0] == pair[1]]
    if read == expected:
        return Finding(reason=CORRECT, gold=revealed, format_ok=True, score=1.0, answer=quote(answer))
    wrong = [str(place) for place in range(1, len(expected) + 1) if place not in places]
    return Finding(
        reason="wrong_letters" if len(read) == len(expected) else "wrong_length",
        gold=revealed,
        format_ok=True,
        score=len(places) / len(expected) if wrong else _PREFIX_SCORE,
        answer=quote(answer),
        facts={
            "read": str(len(read)),
            "expected": str(len(expected)),
            "hits": str(len(places)),
            "places": ", ".join(wrong),
        },
    )
