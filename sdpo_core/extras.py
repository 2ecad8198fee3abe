"""Packages that not every environment has: which module shows that they are there, and how to get them. Torch-free."""

import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial


@dataclass(frozen=True, kw_only=True, slots=True)
class Extra:
    """`module` can be imported where the extra is installed, `install` is the way there.

    `is_there`: for one that lies in an environment of its own.
    """

    name: str
    module: str
    install: str
    is_there: Callable[[], bool] | None = None


def is_installed(module: str) -> bool:
    """Whether `module` can be imported; the packages around it are, it is not."""
    parent = module.rpartition(".")[0]
    return (not parent or is_installed(parent)) and importlib.util.find_spec(module) is not None


def missing(extras: Iterable[Extra | None]) -> tuple[Extra, ...]:
    """Those that are not installed, each once."""
    wanted = dict.fromkeys(extra for extra in extras if extra is not None)
    return tuple(extra for extra in wanted if not (extra.is_there or partial(is_installed, extra.module))())


def lacks(extra: Extra) -> str:
    """What is wrong without it, as part of a sentence."""
    what = "module" if extra.is_there is None else "environment with"
    return f"got no {what} {extra.module}, expected extra {extra.name!r} (install it: {extra.install})"
