"""What a job leaves behind when it fails: one line in `error.json`, the same in its log."""

import logging
import time
from pathlib import Path

from sdpo_core.journal import write_json

_log = logging.getLogger(__name__)


def write_failure(path: Path, message: str, *, label: str, advice: str = "") -> None:
    """Write `<label>: <message><advice>`; some messages open with the label already."""
    line = f"{label}: {message.removeprefix(f'{label}: ')}{advice}"
    _log.error("%s", line)
    write_json(path, {"error": line, "time": time.time()})


def unexpected(error: Exception) -> str:
    """An error that is none of ours, in one line."""
    return f"got {type(error).__name__}: {(str(error).splitlines() or ['no message'])[0]}."
