"""Cost of `server.route`: latency of a large body's first byte, bytes per second, and CPU time per streamed chunk.

    python -m bench proxy --json proxy.json

It starts the proxy and a replica that computes nothing, as separate processes that need a core each.
"""

import multiprocessing
import os
import re
import socket
import statistics
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

from bench.flags import make_parser
from bench.report import environment, table, write_json

MIB = 1 << 20
CHUNK = b'data: {"id":"chatcmpl-0","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":" the"}}]}\n\n'
FRAME = b"%x\r\n%s\r\n" % (len(CHUNK), CHUNK)
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
PAUSE_S = 0.05  # between bodies, so that the previous one is complete
PIECE, PIECE_S = 64 << 10, 50e-6  # about as fast as 10 Gbit/s: a remote client would not use the proxy's cores
TICKS = os.sysconf("SC_CLK_TCK")


def replica(pipe: Connection) -> None:
    """Report when the first and the last byte of a body arrived; answer `GET /chunks/N` with N chunks. Runs in a separate process."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    pipe.send(listener.getsockname()[1])
    while True:
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=answer, args=(connection, pipe), daemon=True).start()


def answer(connection: socket.socket, pipe: Connection) -> None:
    """Answer the requests of one connection; small ones arrive in one piece."""
    while head := connection.recv(MIB):
        now = time.perf_counter()
        chunks = re.match(rb"GET /chunks/(\d+)", head)
        length = re.search(rb"Content-Length: (\d+)", head, re.IGNORECASE)
        if chunks:
            connection.sendall(STREAM_HEAD)
            for _ in range(int(chunks[1])):
                connection.sendall(FRAME)  # one by one, as from a model
            connection.sendall(b"0\r\n\r\n")
            continue
        if length:
            left = int(length[1]) - len(head.partition(b"\r\n\r\n")[2])
            if left == int(length[1]):
                left -= len(connection.recv(MIB))
                now = time.perf_counter()
            while left:
                left -= len(connection.recv(min(left, MIB)))
            pipe.send((now, time.perf_counter()))
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")


class Measured:
    """Context manager of a replica and the proxy in front of it."""

    def __enter__(self) -> "Measured":
        self._pipe, theirs = multiprocessing.Pipe()
        self._replica = multiprocessing.get_context("spawn").Process(target=replica, args=(theirs,), daemon=True)
        self._replica.start()
        command = [sys.executable, "-m", "server.route", "--port", "0", "--backends", f"http://127.0.0.1:{self._pipe.recv()}"]
        self._proxy = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self._proxy.stdout is not None
        self._port = int(self._proxy.stdout.readline().split()[2].rpartition(":")[2])
        return self

    def __exit__(self, *_: object) -> None:
        self._proxy.terminate()
        self._proxy.wait()
        self._replica.terminate()
        self._replica.join()

    def bodies(self, count: int, size: int) -> dict[str, float]:
        """Return the milliseconds from a client's first write to the replica's first byte of the body, and the rate of the whole."""
        body = memoryview(b'{"url": "data:image/jpeg;base64,' + os.urandom(size // 2).hex().encode() + b'"}')
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
        first, rates = [], []
        with socket.create_connection(("127.0.0.1", self._port)) as client:
            for _ in range(count):
                time.sleep(PAUSE_S)
                started = time.perf_counter()
                client.sendall(head)
                for begin in range(0, len(body), PIECE):
                    client.sendall(body[begin : begin + PIECE])
                    time.sleep(PIECE_S)
                begun, ended = self._pipe.recv()
                client.recv(MIB)
                first.append(1e3 * (begun - started))
                rates.append(len(body) / MIB / (ended - begun))
        return {"first_byte_ms": statistics.median(first), "first_byte_ms_best": min(first), "body_mib_per_s": statistics.median(rates)}

    def chunks(self, num_streams: int, num_chunks: int) -> dict[str, float]:
        """Return the proxy's CPU time per chunk and its chunks per second."""
        before, started = self._cpu_seconds(), time.perf_counter()
        threads = [threading.Thread(target=self._read, args=(num_chunks,)) for _ in range(num_streams)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds, cpu, total = time.perf_counter() - started, self._cpu_seconds() - before, num_streams * num_chunks
        return {"streams": num_streams, "cpu_us_per_chunk": 1e6 * cpu / total, "chunks_per_s": total / seconds, "cpu_share": cpu / seconds}

    def _read(self, num_chunks: int) -> None:
        with socket.create_connection(("127.0.0.1", self._port)) as client:
            client.sendall(b"GET /chunks/%d HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n" % num_chunks)
            while client.recv(MIB):
                pass

    def _cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self._proxy.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS


def main() -> None:
    """Entry point."""
    parser = make_parser("proxy", __doc__, "json")
    parser.add_argument("--bodies", type=int, default=30)
    parser.add_argument("--body-bytes", type=int, default=30 * MIB)
    parser.add_argument("--chunks", type=int, default=20_000, help="chunks of all streams")
    args = parser.parse_args()
    with Measured() as proxy:
        bodies = proxy.bodies(args.bodies, args.body_bytes)
        streams = [proxy.chunks(count, args.chunks // count) for count in (1, 8, 64)]
    print(", ".join(f"{name} {value:.2f}" for name, value in bodies.items()))
    print(table(list(streams[0]), [[f"{value:.4g}" for value in row.values()] for row in streams]))
    if args.json:
        write_json(args.json, {"environment": environment(), "bodies": bodies, "streams": streams})


if __name__ == "__main__":
    main()
