"""The server's key as SGLang holds it. A module of its own, so that SGLang's processes can unpickle it."""


class Key(str):
    """A key that does not print itself: SGLang logs its settings with `repr`."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'(hidden)'"
