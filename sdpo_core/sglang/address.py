"""Where SGLang servers are: at addresses that the environment names, or to be started from an environment of theirs."""

import os

from sdpo_core.errors import SpecError
from sdpo_core.sglang.server import find_python
from sdpo_core.sglang.transport import Endpoint

URL_VARIABLE = "SDPO_SGLANG_URL"
TOKEN_VARIABLE = "SDPO_SGLANG_TOKEN"


def external_servers() -> tuple[Endpoint, ...]:
    """Those of SDPO_SGLANG_URL (several with commas between), which somebody else starts; none where it is not set.

    They must see the folders that this machine writes weights to, and serve one cell alone.
    """
    urls = [url.strip() for url in os.environ.get(URL_VARIABLE, "").split(",") if url.strip()]
    return tuple(Endpoint(url=url, token=os.environ.get(TOKEN_VARIABLE)) for url in urls)


def is_available() -> bool:
    """Whether there is a server, or an environment to start one from."""
    return bool(external_servers()) or has_environment()


def has_environment() -> bool:
    """Whether a server can be started here."""
    try:
        find_python()
    except SpecError:
        return False
    return True
