"""What a failed call to a worker's process is worth as a reason, and what to raise for it."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import ray

from sdpo_core.errors import CellError, DataError, SpecError

_AGAIN = "Run the experiment again: the cell resumes from its last checkpoint."
_OWN_ERRORS = {f"{kind.__module__}.{kind.__name__}": kind for kind in (CellError, DataError, SpecError)}


class Worth(IntEnum):
    """Reasons by how much they explain: when one process fails, the others see no more than a connection that ends."""

    OWN = 0
    DEATH = 1
    OTHER = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Where a call failed, the error to raise for it, and its worth as a reason."""

    where: str
    worth: Worth
    error: Exception


def failure_of(reference: Any, *, where: str) -> Failure | None:
    """Why a call that is over failed, or None. Our own errors come back as themselves, a death as a CellError."""
    try:
        ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, CellError | DataError | SpecError):
            return Failure(where=where, worth=Worth.OWN, error=error.cause)
        return Failure(where=where, worth=Worth.OTHER, error=error)
    except ray.exceptions.RayActorError as error:
        return _death(error, where=where)
    return None


def _death(error: ray.exceptions.RayActorError, *, where: str) -> Failure:
    # What killed the process ends Ray's report; an error of its start is there as text only.
    reason = str(error).rstrip().splitlines()[-1].strip()
    name, _, message = reason.partition(": ")
    if name in _OWN_ERRORS:
        return Failure(where=where, worth=Worth.OWN, error=_OWN_ERRORS[name](message))
    death = CellError(f"{where}: got {type(error).__name__} ({reason}), expected a living worker. {_AGAIN}")
    death.__cause__ = error
    return Failure(where=where, worth=Worth.OTHER if error.actor_init_failed else Worth.DEATH, error=death)


def silence(error: ray.exceptions.RayTaskError, *, where: str, silent: Sequence[str]) -> CellError:
    """What to raise for an error that is not ours while some did not answer: one of them may hang."""
    line = (str(error.cause).splitlines() or ["no message"])[0]
    return CellError(
        f"{where}: got {type(error.cause).__name__} ({line}) and no answer from {'; '.join(silent)}, expected one from "
        f"every rank. {_AGAIN}"
    )
