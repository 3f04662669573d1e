"""Fetches from a host whose real name server returns an outer address, then an inner one. For `unshare -r -n -m`.

It prints how the fetches ended and how many requests each server got.
"""

import asyncio
import json
import socket
import struct
import subprocess
import tempfile
import threading
from collections import Counter

from aiohttp import web

from engine.config import EngineConfig
from server.errors import RequestError
from server.processor.fetch import Fetcher

OUTER, INNER, PORT = "8.8.8.8", "127.0.0.1", 8080
NUM_FETCHES = 12


def serve_names() -> None:
    """Answer each question for an IPv4 address with the next of the two, with a lifetime of zero."""
    server, count = socket.socket(socket.AF_INET, socket.SOCK_DGRAM), 0
    server.bind((INNER, 53))

    def run() -> None:
        nonlocal count
        while True:
            question, client = server.recvfrom(512)
            end = question.index(b"\0", 12) + 5
            is_ipv4 = question[end - 4 : end - 2] == b"\0\1"
            answer = question[:2] + struct.pack(">HHHHH", 0x8180, 1, is_ipv4, 0, 0) + question[12:end]
            if is_ipv4:
                answer += struct.pack(">HHHIH", 0xC00C, 1, 1, 0, 4) + socket.inet_aton((OUTER, INNER)[count % 2])
                count += 1
            server.sendto(answer, client)

    threading.Thread(target=run, daemon=True).start()


async def main() -> None:
    for command in (["ip", "link", "set", "lo", "up"], ["ip", "addr", "add", f"{OUTER}/32", "dev", "lo"]):
        subprocess.run(command, check=True)
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(f"nameserver {INNER}\noptions timeout:2\n")
        file.flush()
        subprocess.run(["mount", "--bind", file.name, "/etc/resolv.conf"], check=True)
        serve_names()
        hits: Counter[str] = Counter()
        for address in (OUTER, INNER):

            async def answer(request: web.Request, address: str = address) -> web.Response:
                hits[address] += 1
                return web.Response(body=b"x", headers={"Connection": "close"})  # the next fetch asks for the address again

            runner = web.AppRunner(web.Application())
            runner.app.router.add_get("/", answer)
            await runner.setup()
            await web.TCPSite(runner, address, PORT).start()
        ends: Counter[str] = Counter()
        fetcher = Fetcher(EngineConfig())
        for _ in range(NUM_FETCHES):
            try:
                await fetcher.download(f"http://moves.example:{PORT}/", lambda _: None)
                ends["fetched"] += 1
            except RequestError as error:
                ends[str(error.info.status)] += 1
        await fetcher.close()
    print(json.dumps({"ends": ends, "outer": hits[OUTER], "inner": hits[INNER]}))


if __name__ == "__main__":
    asyncio.run(main())
