"""Many small requests within a program (`engine.llm`) and over HTTP, one after the other: `python -m bench.inside [--requests 1000]`.

Both engines are started here with the same flags. HTTP's client is aiohttp with as many requests at once as the LLM has.
"""

import argparse
import asyncio
import subprocess
import sys
import time
from typing import Any

import aiohttp

from engine.llm import LLM, SamplingParams

FLAGS = {"api_arena_bytes": "64M", "processor_arena_bytes": "64M", "kv_cache_memory_bytes": "64M"}
AT_ONCE = 256  # twice --max-num-seqs


def questions(count: int) -> list[list[dict[str, Any]]]:
    return [[{"role": "user", "content": f"Hello {number}"}] for number in range(count)]


def inside(model: str, count: int, num_tokens: int) -> float:
    """Requests per second."""
    with LLM(model=model, **FLAGS) as llm:
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        llm.chat(questions(AT_ONCE), params, use_tqdm=False)
        started = time.perf_counter()
        outputs = llm.chat(questions(count), params, use_tqdm=False)
        assert all(output.outputs[0].num_tokens == num_tokens for output in outputs)
        return count / (time.perf_counter() - started)


async def over_http(url: str, count: int, num_tokens: int) -> float:
    """The same."""
    connector = aiohttp.TCPConnector(limit=AT_ONCE)
    async with aiohttp.ClientSession(url, connector=connector) as session:

        async def ask(messages: list[dict[str, Any]]) -> int:
            body = {"messages": messages, "temperature": 0, "max_tokens": num_tokens, "ignore_eos": True}
            async with session.post("/v1/chat/completions", json=body) as response:
                return int((await response.json())["usage"]["completion_tokens"])

        await asyncio.gather(*map(ask, questions(AT_ONCE)))
        started = time.perf_counter()
        lengths = await asyncio.gather(*map(ask, questions(count)))
        assert lengths == [num_tokens] * count
        return count / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser("bench.inside", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="as of engine.serve")
    parser.add_argument("--requests", type=int, default=1000, help="small requests of each way")
    parser.add_argument("--output-tokens", type=int, default=1, help="tokens of each answer")
    args = parser.parse_args()
    words = [word for name, value in FLAGS.items() for word in ("--" + name.replace("_", "-"), value)]
    command = [
        sys.executable,
        "-m",
        "engine.serve",
        "--model",
        args.model,
        "--port",
        "0",
        "--no-access-log",
        "--log-level",
        "warning",
        *words,
    ]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = server.stdout.readline().split()[4]
        rate = asyncio.run(over_http(url, args.requests, args.output_tokens))
    finally:
        server.terminate()
        server.wait()
    print(f"HTTP   {rate:8.1f} requests/s")
    print(f"inside {inside(args.model, args.requests, args.output_tokens):8.1f} requests/s")


if __name__ == "__main__":
    main()
