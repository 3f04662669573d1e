"""Worker side of the image cache: tensors by id. The plan lists the images to encode and to evict.

Each of several ranks encodes its share of a step's images, all together encode the largest if that is faster, and all receive all
embeddings.

    step N            forward ───────────────────▶ │ forward ──▶      the stream of the steps
    step N + 1          read ──▶ encode ─────────▶ │                  streams of the reader and of the tower

An idle engine encodes an image as soon as it is announced; the plan that names the image finds its embedding.
"""

import contextlib
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from engine.wire.messages import Encode, Prefetch
from engine.worker.adapters import WorkerAdapters
from engine.worker.jpeg import ImageReader
from engine.worker.stopwatch import Stopwatch
from models.parallel.group import TensorParallel
from models.vision.encoder import Tower
from models.vision.shares import Shares, UlyssesCosts, part_of, share_out

FIRST_GROUP_TOKENS = 512  # tokens read before the tower starts
GROUP_TOKENS = 4096  # enough for the tower to run at full speed
MAX_GROUP_TOKENS = 4608  # bounds activations, unless one image has more
GROWTH = 2  # size ratio of consecutive groups


@dataclass(slots=True)
class Encoded:
    failed: list[int] = field(default_factory=list)  # images that could not be decoded
    pixels: list[torch.Tensor] = field(default_factory=list)  # kept until the step is done
    read_ms: float = 0.0  # host time of reading
    watches: list[Stopwatch] = field(default_factory=list)  # one for each period of the tower's work


@dataclass(frozen=True, slots=True)
class EarlyImage:
    of: Prefetch
    read: tuple[torch.Tensor, bytes]  # pixels and their encoded source, kept because the device may still read them
    embedding: torch.Tensor
    watch: Stopwatch


@dataclass(eq=False, repr=False)
class ImageCache:
    """Embeddings (1 + L, N, D) by image id, on the device. The tower's stream (None: the current one) allocates and uses all of its
    tensors; the current stream only reads embeddings."""

    tower: Tower | None  # None: a text model, whose plans name no images
    reader: ImageReader
    tp: TensorParallel
    stream: torch.cuda.Stream | None = None
    ulysses_costs: UlyssesCosts | None = None  # None: no image is encoded by all ranks together
    adapters: WorkerAdapters | None = None
    tensors: dict[int, torch.Tensor] = field(default_factory=dict)
    _last_use: dict[int, torch.cuda.Event] = field(default_factory=dict)
    _early: EarlyImage | None = None

    def evict(self, image_ids: Sequence[int]) -> None:
        for image_id in image_ids:
            del self.tensors[image_id]
            last_use = self._last_use.pop(image_id, None)
            if last_use is not None and self.stream is not None:
                self.stream.wait_event(last_use)  # later work on this stream may reuse the memory

    def note_use(self, image_ids: Iterable[int], end: torch.cuda.Event) -> None:
        """Note the event that ends a step which reads these images."""
        self._last_use.update(dict.fromkeys(image_ids, end))

    @torch.inference_mode()
    def prefetch(self, prefetch: Prefetch) -> None:
        """Encode an image for a plan that names its ticket, replacing the previous one; not if memory is lacking or all ranks will encode
        it together."""
        self.forget_early()
        if self._share_out([Encode(0, prefetch.source, prefetch.grid)]).together:
            return
        with torch.cuda.stream(self.stream), contextlib.suppress(torch.OutOfMemoryError):
            read = self.reader.read_copy(prefetch.source)
            if read is not None:
                watch = self._stopwatch()
                (embedding,) = self._tower.encode([read[0]], [prefetch.grid])
                watch.mark()
                self._early = EarlyImage(prefetch, read, embedding, watch)

    def forget_early(self) -> None:
        """Drop the image that was encoded before a plan named it."""
        if self._early is not None and self.stream is not None:
            self.stream.synchronize()  # the tower may still read its pixels
        self._early = None

    def encode(self, encodes: Sequence[Encode]) -> Encoded:
        """Add a step's images to the cache, for the current stream. An undecodable image becomes zeros, and its rank reports it. While the
        device encodes a group, the host and the decoder read the next."""
        if not encodes:
            return Encoded()
        shares = self._share_out(encodes)
        share = [encodes[image] for image in shares.alone[self.tp.rank]]
        encoded = Encoded()
        with torch.cuda.stream(self.stream):
            own = self._encode(share, encoded)
        if shares.together:
            own.append(self._encode_part([encodes[image] for image in shares.together], encoded))
        if own and self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
        if self.tp.size == 1:
            self.tensors.update((encode.image_id, tensor) for encode, tensor in zip(share, own, strict=True))
        else:
            self._gather(encodes, shares, own)
        return encoded

    def leave_out(self, encodes: Sequence[Encode]) -> None:
        """Replace the images of a given-up step by zeros, which take almost no memory, until a plan evicts them."""
        zero = self._zeros(1)
        self.tensors |= {encode.image_id: zero.expand(-1, self._num_tokens(encode), -1) for encode in encodes}

    def prepare(self, is_busy: bool) -> bool:
        """Prepare the tower as `Tower.prepare` does."""
        with torch.cuda.stream(self.stream):
            return self.tower is not None and self.tower.prepare(is_busy)

    @property
    def _tower(self) -> Tower:
        assert self.tower is not None
        return self.tower

    def _encode(self, share: Sequence[Encode], encoded: Encoded) -> list[torch.Tensor]:
        if not share:
            return []
        done: dict[int, torch.Tensor] = {}
        early = self._early
        for encode in share:
            if early is not None and (encode.source.ticket, encode.grid) == (early.of.source.ticket, early.of.grid):
                self._early = None
                encoded.pixels.append(early.read[0])
                done[encode.image_id] = early.embedding
                encoded.watches.append(early.watch)
        watch = self._stopwatch()
        for group in self._groups([encode for encode in share if encode.image_id not in done]):
            started = time.monotonic()
            pixels = self.reader.read([encode.source for encode in group])
            encoded.read_ms += 1e3 * (time.monotonic() - started)
            good = [(image, encode.grid) for image, encode in zip(pixels, group, strict=True) if image is not None]
            with contextlib.nullcontext() if self.adapters is None else self.adapters.tower(group[0].slot):
                embeddings = iter(self._tower.encode([image for image, _ in good], [grid for _, grid in good]))
            for encode, image in zip(group, pixels, strict=True):
                done[encode.image_id] = self._zeros(self._num_tokens(encode)) if image is None else next(embeddings)
                if image is None:
                    encoded.failed.append(encode.image_id)
            encoded.pixels += [image for image, _ in good]
        watch.mark()
        encoded.watches.append(watch)
        return [done[encode.image_id] for encode in share]

    def _encode_part(self, encodes: Sequence[Encode], encoded: Encoded) -> torch.Tensor:
        """Return this rank's tokens of the images that all ranks encode; unreadable ones are black. The tower waits for the previous step:
        their collectives must not overlap."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            started = time.monotonic()
            pixels = self.reader.read([encode.source for encode in encodes])
            encoded.failed += [encode.image_id for encode, image in zip(encodes, pixels, strict=True) if image is None]
            encoded.read_ms += 1e3 * (time.monotonic() - started)
            black = torch.zeros((1, 1, 3), dtype=torch.uint8, device=self._tower.device)
            images, num_frames = [black if image is None else image for image in pixels], max(e.source.num_frames for e in encodes)
            if num_frames > 1:
                images = [image if image.ndim == 4 else image.expand(num_frames, *image.shape) for image in images]
            watch = self._stopwatch()
            part_LND = self._tower.encode_part(images, [encode.grid for encode in encodes])
            watch.mark()
        encoded.pixels += images
        encoded.watches.append(watch)
        return part_LND

    def _stopwatch(self) -> Stopwatch:
        return Stopwatch(self._tower.device.type == "cuda")

    def _groups(self, share: Sequence[Encode]) -> Iterator[list[Encode]]:
        """Yield the share in order, images before frame pairs, in growing groups of one kind and slot, so that the device starts
        early."""
        group: list[Encode] = []
        num_tokens, limit = 0, FIRST_GROUP_TOKENS
        for encode in sorted(share, key=_kind_of):
            is_full = num_tokens >= limit or num_tokens + self._num_tokens(encode) > MAX_GROUP_TOKENS
            if group and (is_full or _kind_of(encode) != _kind_of(group[0])):
                yield group
                group, num_tokens, limit = [], 0, min(GROWTH * limit, GROUP_TOKENS)
            group.append(encode)
            num_tokens += self._num_tokens(encode)
        if group:
            yield group

    def _gather(self, encodes: Sequence[Encode], shares: Shares, own: Sequence[torch.Tensor]) -> None:
        """Gather all ranks' embeddings in one collective over rows (N, 1 + L, D): each rank's share, then its part."""
        sizes = [self._num_tokens(encode) for encode in encodes]
        num_together = sum(sizes[image] for image in shares.together)
        parts = [len(part_of(num_together, rank, self.tp.size)) for rank in range(self.tp.size)]
        counts = [[*(sizes[image] for image in share), part] for share, part in zip(shares.alone, parts, strict=True)]
        rows = self.tp.all_gather_rows(torch.cat([self._zeros(0), *own], dim=1).transpose(0, 1), [sum(count) for count in counts])
        pieces = iter(rows.split([size for count in counts for size in count]))
        together = []
        for share in shares.alone:
            for image in share:
                self._keep(encodes[image], next(pieces))
            together.append(next(pieces))
        for image, piece in zip(shares.together, torch.cat(together).split([sizes[image] for image in shares.together]), strict=True):
            self._keep(encodes[image], piece)
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))  # the current stream has read this rank's own embeddings

    def _keep(self, encode: Encode, rows_NLD: torch.Tensor) -> None:
        self.tensors[encode.image_id] = rows_NLD.transpose(0, 1).contiguous()  # a view would keep all rows alive

    def _share_out(self, encodes: Sequence[Encode]) -> Shares:
        """Divide images over the ranks. If any has a slot, no image is split over the ranks, since only the groups of a rank have slots."""
        costs = None if any(encode.slot >= 0 for encode in encodes) else self.ulysses_costs
        return share_out([math.prod(encode.grid) for encode in encodes], self.tp.size, costs)

    def _zeros(self, num_tokens: int) -> torch.Tensor:
        return torch.zeros(self._shape(num_tokens), dtype=self._tower.dtype, device=self._tower.device)

    def _shape(self, num_tokens: int) -> tuple[int, int, int]:
        return self._tower.config.num_visual_levels, num_tokens, self._tower.config.text.hidden_size

    def _num_tokens(self, encode: Encode) -> int:
        return self._tower.config.geometry.num_tokens(encode.grid)


def _kind_of(encode: Encode) -> tuple[int, int]:
    """Return the number of frames and the slot, which are equal for all images of one call."""
    return encode.source.num_frames, encode.slot
