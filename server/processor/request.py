"""What the processor knows of one request. Made by `server/processor/intake.py`, kept until nothing of it is left here."""

import asyncio
from dataclasses import dataclass, field

from engine.messages import EngineRequest, Submit
from server.processor.image import Image, release_all
from server.processor.reasoning import OutputText
from server.processor.room import Room
from server.region import Region


@dataclass(slots=True)
class Request:
    """From Submit until its memory is given back: when the scheduler has released it, or when it fails before it gets there."""

    submit: Submit
    images: list[Image]
    text: OutputText
    task: asyncio.Task[EngineRequest] | None = None  # while it is prepared
    prompt: Region | None = None  # token ids
    grammar: Region | None = None  # compiled
    echo: str = ""  # what the text begins with
    counted: list[int] = field(default_factory=list)  # token ids of a request that goes no further
    is_in_scheduler: bool = False
    is_ended: bool = False  # its terminal event is out, or nobody wants it
    num_prompt_tokens: int = 0
    num_tokens: int = 0

    def is_stop_token(self, token_id: int) -> bool:
        """Whether the client named it, or it is one of the model's."""
        return token_id in self.submit.params.stop_token_ids or token_id in self.text.specials

    def take_echo(self) -> str:
        """Once."""
        echo, self.echo = self.echo, ""
        return echo

    async def release(self, room: Room) -> None:
        """Gives its memory back, as soon as no thread works for it."""
        await release_all(self.images)
        for region in (self.prompt, self.grammar):
            if region is not None:
                room.give_back(region)
