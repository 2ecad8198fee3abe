"""JSON in responses: a strict reader of one object, and equality by JSON value rather than by Python's."""

import json
import re
import unicodedata
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any, NoReturn

_FENCE = re.compile(r"```[A-Za-z]*[ \t]*\n?")
# A word before the brace is passed over; a list or quoted text before it is an input of another kind.
_LEAD = re.compile(r"[^\[\]{}\"'\n]*(?=\{)")


@dataclass(frozen=True, kw_only=True, slots=True)
class InputFault:
    """Why an input is not one JSON object. `position` counts characters of the input from 1."""

    reason: str
    detail: str = ""
    position: int = 0


class _DuplicateKeyError(ValueError):
    """An object names a key twice."""


def read_object(text: str) -> dict[str, Any] | InputFault:
    """The JSON object at the first brace, a code fence allowed before it; what follows it is ignored.

    Numbers with a point or exponent come back as Decimal.
    """
    stripped = text.strip()
    fence = _FENCE.match(stripped)
    body = stripped[fence.end() :].lstrip() if fence else stripped
    if not body:
        return InputFault(reason="no_input")
    lead = _LEAD.match(body)
    start = lead.end() if lead else 0
    try:
        value, _ = _DECODER.raw_decode(body, start)
    except _DuplicateKeyError as error:
        return InputFault(reason="duplicate_key", detail=str(error))
    except json.JSONDecodeError as error:
        return InputFault(reason="invalid_json", detail=error.msg, position=error.pos + 1)
    except (ValueError, RecursionError):
        # Python's own limits: thousands of digits or of nested brackets.
        return InputFault(reason="invalid_json", detail="a number or nesting beyond bounds", position=1)
    if not isinstance(value, dict):
        return InputFault(reason="not_object", detail=json_kind(value))
    return value


def json_kind(value: object) -> str:
    """The JSON type of a value, with its article."""
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, (int, float, Decimal)):
        return "a number"
    kinds: dict[type, str] = {str: "a string", list: "a list", dict: "an object"}
    return kinds.get(type(value), "null")


def same_value(value: object, other: object) -> bool:
    """Equal as JSON: numbers by value, booleans apart from numbers, strings after NFC, keys in any order."""
    if json_kind(value) != json_kind(other):
        return False
    if isinstance(value, dict) and isinstance(other, dict):
        return value.keys() == other.keys() and all(same_value(value[key], other[key]) for key in value)
    if isinstance(value, list) and isinstance(other, list):
        return len(value) == len(other) and all(map(same_value, value, other))
    if isinstance(value, str) and isinstance(other, str):
        return unicodedata.normalize("NFC", value) == unicodedata.normalize("NFC", other)
    return _exact(value) == _exact(other)


def _exact(value: object) -> object:
    # The decimal a float was written as: 0.1 in a reference equals 0.1 in a response.
    return Decimal(repr(value)) if isinstance(value, float) else value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _DuplicateKeyError(next(key for key in value if keys.count(key) > 1))
    return value


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _decimal(digits: str) -> Decimal:
    try:
        return Decimal(digits)
    except InvalidOperation:
        raise ValueError("exponent beyond bounds") from None


_DECODER = json.JSONDecoder(object_pairs_hook=_unique_keys, parse_constant=_refuse_constant, parse_float=_decimal)
