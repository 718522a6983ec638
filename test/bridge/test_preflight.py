"""What is checked before anything is started."""

from __future__ import annotations

import asyncio
import socket

import pytest

from sglang_ssd.bridge.environment import use_cpu_engine

use_cpu_engine()
pytest.importorskip("sglang.srt.server_args")

from sglang_ssd.bridge.preflight import reserve_port  # noqa: E402
from sglang_ssd.bridge.server_args import parse_options  # noqa: E402


def arguments(port: int):
    return parse_options({"model_path": "target", "ssd_mode": "off", "device": "cpu", "port": port})


async def listen_on(port: int) -> None:
    (await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", port)).close()


def test_a_reserved_port_is_the_servers_alone():
    with reserve_port(arguments(0)) as reservation:
        port = reservation.getsockname()[1]
        with socket.socket() as other, pytest.raises(OSError):
            other.bind(("127.0.0.1", port))
        asyncio.run(listen_on(port))  # As uvicorn does, which reuses addresses.
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))


def test_a_port_that_somebody_listens_on_is_named():
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(ValueError, match=f"^--port {port}: "):
            reserve_port(arguments(port))
