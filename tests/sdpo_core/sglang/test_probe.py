"""The question of a server's start, put to other programs; real servers answer it in `test_server`."""

import socket
import threading

import pytest

from sdpo_core.errors import CellError
from sdpo_core.sglang.probe import is_ready
from tests.sdpo_core.sglang.proxy import Call, Proxy, Reply, as_json


@pytest.mark.parametrize("greeting", [b"SSH-2.0-other\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf", b""])
def test_program_that_breaks_off_is_no_server(greeting: bytes) -> None:
    """It has taken the port: the start goes on to another one when the server has ended for it."""

    def greet(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(greeting)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=greet, args=(listener,))
        thread.start()
        assert not is_ready(f"http://127.0.0.1:{listener.getsockname()[1]}", token="t")
        thread.join()


@pytest.mark.parametrize("reply", [Reply(body=b"<html>"), as_json([1]), as_json({"meta_info": {"id": "x"}})])
def test_server_of_something_else_is_refused(reply: Reply) -> None:
    def answer(call: Call) -> Reply:
        return reply if call.path == "/generate" else Reply()

    with Proxy(answer) as proxy, pytest.raises(CellError, match=r"another answer than the score .* It has no ids"):
        is_ready(proxy.url, token="t")
