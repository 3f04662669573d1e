"""With `--seed`, requests get their seeds in the order of arrival."""

import asyncio
import random
import threading
from types import SimpleNamespace
from typing import Any

from server.api.endpoint import LARGE_JSON_BYTES, Endpoint, Job


class Probe(Endpoint):
    """Keeps the seeds of its requests; large bodies are read in a thread that waits for `may_read`."""

    def __init__(self, service: Any) -> None:
        super().__init__(service)
        self.may_read = threading.Event()
        self.seeds: dict[str, int] = {}

    def read(self, value: dict[str, Any], body: Any) -> Job:
        if value["is_large"]:
            assert self.may_read.wait(60)
        self.seeds[value["name"]] = body.seed
        return Job(SimpleNamespace(model=None, timeout=None), [SimpleNamespace(media=[], cache_salt="", body=None)])  # type: ignore[arg-type,list-item]

    def reply(self, stream: Any, job: Job, body: Any) -> Any:
        raise NotImplementedError


def body_of(name: str, is_large: bool) -> Any:
    padding = "x" * (LARGE_JSON_BYTES if is_large else 0)
    document = f'{{"name": "{name}", "is_large": {str(is_large).lower()}, "padding": "{padding}"}}'.encode()
    scanner = SimpleNamespace(json=lambda payloads: document, references=[])
    return SimpleNamespace(scanner=scanner, payloads=b"", client=b"", num_announced=0, give_up=lambda: None, received=0.0)


async def test_a_large_request_does_not_take_the_seed_of_a_later_one() -> None:
    """A large body is read in a thread, and a small one that came later took its seed."""
    config = SimpleNamespace(max_images_per_request=1, api_key=None, api_key_file=None, request_timeout=None)
    client = SimpleNamespace(submit=lambda submits: None)
    service = SimpleNamespace(config=config, model_names=(), seeds=random.Random(1), client=client)
    probe = Probe(service)
    first = asyncio.create_task(probe.submit(body_of("first", is_large=True)))
    await asyncio.sleep(0)
    await probe.submit(body_of("second", is_large=False))
    probe.may_read.set()
    await first
    expected = random.Random(1)
    assert [probe.seeds[name] for name in ("first", "second")] == [expected.getrandbits(63) for _ in range(2)]
