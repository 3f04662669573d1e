"""Inter-process communication: ZMQ PUSH/PULL over `ipc://` in a private directory, msgpack of typed messages.

Each receiver binds one inbox; senders connect; queues are unbounded because admission limits the messages in flight.
"""

import asyncio
import time
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
import zmq

T = TypeVar("T")

LINGER_MS = 500


def address(run_dir: str | Path, name: str) -> str:
    """Return the address of an inbox: api, processor, scheduler, launcher or worker-RANK."""
    return f"ipc://{run_dir}/{name}.sock"


class Outbox(Generic[T]):
    """Sender of messages to one inbox; never blocks."""

    def __init__(self, run_dir: str, name: str):
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._socket.connect(address(run_dir, name))
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, message: T) -> None:
        self.send_bytes(self._encoder.encode(message))

    def send_bytes(self, data: bytes) -> None:
        self._socket.send(data, flags=zmq.NOBLOCK)

    def close(self) -> None:
        self._socket.close()


class Inbox(Generic[T]):
    """Receiver of messages of one type, or of a tagged union."""

    def __init__(self, run_dir: str, name: str, kind: object):
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(address(run_dir, name))
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind)

    def recv(self, timeout: float | None = None, spin: float = 0.0) -> T | None:
        """Return the next message; None if none arrives within `timeout` seconds. For the first `spin` seconds this thread does not sleep:
        waking it takes about as long as the transport."""
        end = time.monotonic() + spin
        while spin and time.monotonic() < end:
            if (message := self.recv_ready()) is not None:
                return message
        if timeout is not None and not self._socket.poll(max(0, int(timeout * 1000))):
            return None
        return self._decoder.decode(self._socket.recv())

    def recv_ready(self) -> T | None:
        try:
            return self._decoder.decode(self._socket.recv(flags=zmq.NOBLOCK))
        except zmq.Again:
            return None

    def fileno(self) -> int:
        """Descriptor, readable after a change until `recv_ready` finds nothing."""
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()


class AsyncInbox(Generic[T]):
    """Asyncio form of `Inbox`, made inside the running loop. pyzmq's own form doubles the time per message."""

    def __init__(self, run_dir: str, name: str, kind: object):
        self._inbox: Inbox[T] = Inbox(run_dir, name, kind)
        self._loop = asyncio.get_running_loop()
        self._file = self._inbox.fileno()
        self._loop.add_reader(self._file, self._wake)
        self._is_changed = asyncio.Event()

    async def recv(self) -> T:
        while (message := self._inbox.recv_ready()) is None:
            self._is_changed.clear()
            await self._is_changed.wait()
        return message

    def close(self) -> None:
        self._loop.remove_reader(self._file)
        self._inbox.close()

    def _wake(self) -> None:
        self._is_changed.set()
