import json
import socket
import threading
import time

import pytest

from tests.fake_server import FakeServer, completion, serving

BODY = json.dumps({"messages": [{"role": "user", "content": "hello"}]}).encode()


def hang_up(server: FakeServer) -> None:
    """Send a request and reset the connection before the answer."""
    before = set(threading.enumerate())
    with socket.create_connection(("127.0.0.1", server.server_port)) as asked:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(BODY)}\r\n\r\n"
        asked.sendall(head.encode() + BODY)
        while not server.bodies:
            time.sleep(0.005)
        asked.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    for thread in set(threading.enumerate()) - before:
        thread.join(10)


def test_a_disconnected_client_leaves_no_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    with serving(seconds=0.1) as server:
        hang_up(server)
        assert server.busy == 0  # the answer was sent
    assert capfd.readouterr().err == ""


def test_an_error_in_a_script_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    with serving(lambda n, body: (200, {}, json.dumps(completion({})).encode())) as server:
        hang_up(server)
    assert "KeyError: 'messages'" in capfd.readouterr().err
