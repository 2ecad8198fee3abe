"""Base class of all declarations, and the number types they share. Torch-free."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class Spec(BaseModel):
    """Base of all declarations: immutable, no unknown field."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def refuse(faults: list[str]) -> None:
    """Raise ValueError with all `faults` at once, if there are any; pydantic reports it with the field's place."""
    if faults:
        raise ValueError("; ".join(faults))
