"""The three errors a user meets; each carries one message and so survives pickling between processes.

Form of a message: `<where>: got <value>, expected <rule>. <What to do.>`
"""


class SpecError(Exception):
    """The declaration or the environment is wrong: raised before anything is trained (exit code 2)."""


class DataError(Exception):
    """A record breaks its contract: a row, a tensor, a file of the store."""


class CellError(Exception):
    """A cell failed while it ran; the message names the cell (exit code 1)."""
