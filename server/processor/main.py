"""The processor process: media, prompts and detokenisation. `python -m server.processor.main RUNTIME.json`, started by the launcher.

    Payload, Submit ──▶ intake ──▶ EngineRequest ──▶ scheduler
             Events ◀── output ◀── EngineOutputs ◀──────┘
"""

import asyncio
import logging
import signal
import warnings
from pathlib import Path

import uvloop

from engine.wire.child import Child
from engine.wire.ipc import AsyncInbox, Outbox
from engine.wire.messages import (
    API_ARENA,
    PROCESSOR_ARENA,
    Abort,
    Events,
    Forget,
    Payload,
    Prefetch,
    Submit,
    ToProcessor,
    ToScheduler,
)
from server.checkpoint import read_checkpoint
from server.processor.intake import Intake
from server.processor.media.decoders import Decoders
from server.processor.media.image import Images
from server.processor.media.sources import RegionAllocator, Sources
from server.processor.media.video import Videos
from server.processor.output import Output
from server.processor.request import Request

logger = logging.getLogger(__name__)


class Processor:
    """The processor's parts, created inside the event loop; work that waits runs in `tasks`."""

    def __init__(self, child: Child, tasks: asyncio.TaskGroup):
        self._inbox: AsyncInbox[ToProcessor] = AsyncInbox(child.run_dir, "processor", ToProcessor)
        api: Outbox[Events] = Outbox(child.run_dir, "api")
        scheduler: Outbox[ToScheduler] = Outbox(child.run_dir, "scheduler")
        self._scheduler = scheduler
        folder = Path(child.runtime.model_folder)
        checkpoint = read_checkpoint(folder, child.config.chat_template, template_kwargs=child.config.default_chat_template_kwargs or "{}")
        bodies = child.arena_view(API_ARENA)
        self._has_leaked = False
        requests: dict[int, Request] = {}
        gpu_decodes = child.runtime.gpu_decodes_jpegs
        worker: Outbox[Prefetch] | None = Outbox(child.run_dir, "worker-0") if gpu_decodes and checkpoint.model.placeholder_ids else None
        allocator = self._allocator = RegionAllocator(child.runtime.arena_fds[PROCESSOR_ARENA], child.arena_size(PROCESSOR_ARENA))
        sources = Sources(child.config, bodies, allocator)
        decoders = Decoders(child.config, allocator.pixels)
        images = Images(child.config, checkpoint.model.geometry, sources, decoders, worker)
        self._sources, self._decoders = sources, decoders
        max_model_len = child.runtime.max_model_len  # until the scheduler reports the size of the KV pool
        self._intake = Intake(
            requests=requests, allocator=allocator, images=images, videos=Videos(child.config, checkpoint, images), api=api,
            scheduler=scheduler, tasks=tasks, config=child.config, checkpoint=checkpoint, model_folder=folder, max_model_len=max_model_len,
        )  # fmt: skip
        self._output = Output(
            requests=requests, allocator=allocator, num_decoded=lambda: decoders.num_decoded, api=api, scheduler=scheduler, tasks=tasks,
        )  # fmt: skip
        for pool in (self._intake.grammars.pool, decoders.pool):
            tasks.create_task(pool.start())

    async def run(self) -> None:
        try:
            while True:
                message = await self._inbox.recv()
                match message:
                    case Payload():
                        self._intake.begin(message)
                    case Submit():
                        self._intake.accept(message)
                        await asyncio.sleep(0)  # alternate preparation of many prompts with other clients' tokens
                    case Abort():
                        self._intake.abort(message)
                    case Forget():
                        self._scheduler.send(message)
                    case _:
                        self._output.forward(message)
                        if message.stats is not None:
                            self._intake.max_model_len = message.stats.max_model_len
                            self._log_leak()
        finally:
            await self._intake.close()
            await self._sources.close()
            await self._decoders.pool.close()

    def _log_leak(self) -> None:
        """Log a region of a request that was never released."""
        has_leaked = not (self._intake.num_holders or self._allocator.is_empty())
        if has_leaked and not self._has_leaked:
            logger.error("a region of a request was never released")
        self._has_leaked = has_leaked


async def serve(child: Child) -> None:
    """Run until SIGTERM or until the launcher has exited. A violated invariant is raised."""
    loop, serving = asyncio.get_running_loop(), asyncio.current_task()
    assert serving is not None
    stop = serving.cancel
    loop.add_signal_handler(signal.SIGTERM, stop)
    child.on_orphaned(lambda: loop.call_soon_threadsafe(stop))
    try:
        async with asyncio.TaskGroup() as tasks:
            processor = Processor(child, tasks)
            child.ready()
            await processor.run()
    except asyncio.CancelledError:  # stopped
        pass
    except BaseExceptionGroup as failures:  # the first is the cause
        raise failures.exceptions[0] from None


def main() -> None:
    child = Child.attach("processor")
    warnings.filterwarnings("ignore", module="PIL")  # errors of an image concern its client only
    try:
        uvloop.run(serve(child))
    except Exception as error:
        child.failed(f"{type(error).__name__}: {error}")
        raise


if __name__ == "__main__":
    main()
