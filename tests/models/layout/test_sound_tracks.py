"""Videos interleaved with their sound, as Omni processors write them with `use_audio_in_video`."""

from typing import Any

import numpy as np
import pytest
import torch

from evenpack.collate import pack_samples
from evenpack.core import MediaMismatchError
from evenpack.models import adapter_for, pack_positions, prepare_model, sample_layout
from evenpack.models.layout.items import media_grids, media_seconds
from evenpack.models.layout.omni_positions import VIDEO
from evenpack.models.layout.positions import run_template

from .. import tiny
from ..reference import own_positions, rope_stub
from .test_positions import PACKS

FAMILIES = ("qwen2_5_omni", "qwen3_omni_moe")


def token_order(adapter, grid: tuple[int, int, int], frames: int, seconds: float) -> list[int]:
    """Return the type codes of a block: frames and sound by time, in chunks of two seconds or token by token."""
    video = run_template((adapter.token_count("video", grid), VIDEO, *grid), seconds, adapter)[0]
    audio = np.arange(adapter.token_count("audio", (frames, 1, 1)))
    if not adapter.stacked_markers:
        merged = sorted([(t, 0, 2) for t in video.tolist()] + [(t, 1, 3) for t in audio.tolist()])
        return [code for _, _, code in merged]
    chunks = [chunked(times, int(adapter.tokens_per_second * 2)) for times in (video, audio)]
    codes: list[int] = []
    for j in range(max(map(len, chunks))):
        for code, lengths in zip((2, 3), chunks, strict=True):
            codes += [code] * (lengths[j] if j < len(lengths) else 0)
    return codes


def chunked(times: np.ndarray, width: int) -> list[int]:
    """Return the lengths of chunks: a token at or beyond the chunk's end begins the next one."""
    lengths, limit = [0], width
    for t in times.tolist():
        if t >= limit:
            lengths.append(0)
            limit += width
        lengths[-1] += 1
    return lengths


def sound_sample(rng: np.random.Generator, adapter, pixels: bool = False) -> dict[str, Any]:
    """Return a sample of videos with sound, images, clips of their own, and text."""
    clip = 100 if pixels else 4
    ids, types = tiny.text(rng, 1, 8), []
    types = [0] * len(ids)
    grids: dict[str, list] = {"image": [], "video": [], "audio": []}
    seconds: list[float] = []
    for kind in rng.permutation(["sound", "image", "audio", "sound"])[: int(rng.integers(1, 5))]:
        if kind != "sound":
            grid = tiny.random_grid(rng, kind, adapter, 4, clip=clip)
            grids[kind].append(grid)
            pieces = tiny.item(rng, kind, grid, adapter)
        else:
            grid, frames = tiny.random_grid(rng, "video", adapter, 4, clip), int(rng.integers(clip + 4, 240))
            grids["video"].append(grid)
            grids["audio"].append((frames, 1, 1))
            seconds.append(float(rng.choice([0.5, 1.0, 2.0, 2.55])))
            codes = token_order(adapter, grid, frames, seconds[-1])
            tokens = {2: adapter.media_tokens["video"], 3: adapter.media_tokens["audio"]}
            pieces = [([adapter.vision_start, adapter.audio_start], 0)]
            pieces += [([tokens[code]], code) for code in codes] + [([adapter.audio_end, adapter.vision_end], 0)]
        for new, code in [*pieces, (tiny.text(rng, 0, 6), 0)]:
            ids, types = ids + new, types + [code] * len(new)
    raw = {"input_ids": torch.tensor(ids), "mm_token_type_ids": torch.tensor(types)}
    fields = tiny.media_fields(rng, grids, adapter, pixels)
    if seconds:
        fields[adapter.seconds_field] = torch.tensor(seconds)
    return raw | fields


def layout_of(raw, adapter, types=True):
    explicit = raw["mm_token_type_ids"] if types else None
    return sample_layout(raw["input_ids"], media_grids(raw, adapter), media_seconds(raw, adapter), explicit, adapter=adapter)


@pytest.mark.parametrize("family", FAMILIES)
def test_equal_to_transformers(family):
    pytest.importorskip("transformers")
    adapter = adapter_for(family)
    stub = rope_stub(adapter)
    own = stub.get_rope_index
    stub.get_rope_index = lambda *args, **kwargs: own(*args, **kwargs, use_audio_in_video=True)
    interleaved = 0
    for seed in range(PACKS):
        rng = np.random.default_rng(seed)
        raws = [sound_sample(rng, adapter) for _ in range(int(rng.integers(1, 4)))]
        cu = np.cumsum([0, *(len(raw["input_ids"]) + int(rng.integers(0, 4)) for raw in raws)])
        layouts = [layout_of(raw, adapter) for raw in raws]
        interleaved += sum(bool((layout.runs[:, 3] == 0).any()) for layout in layouts)
        positions = pack_positions(layouts, cu, adapter)
        for raw, start, stop in zip(raws, cu, cu[1:], strict=False):
            want = own_positions(stub, raw, adapter, more=int(stop - start) - len(raw["input_ids"]))
            assert np.array_equal(positions[:, start:stop], want), seed
        derived = [layout_of(raw, adapter, types=False) for raw in raws]
        assert all(np.array_equal(a.runs, b.runs) for a, b in zip(layouts, derived, strict=True))
    assert interleaved > PACKS // 2


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_that_do_not_fit_are_refused(family):
    adapter = adapter_for(family)
    raw = next(r for r in (sound_sample(np.random.default_rng(seed), adapter) for seed in range(99)) if "video_grid_thw" in r)
    more_frames = raw | {"video_grid_thw": raw["video_grid_thw"] + torch.tensor([1, 0, 0])}
    with pytest.raises(MediaMismatchError, match=r"video tokens of a video with sound.*has \d+ features"):
        layout_of(more_frames, adapter)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equal_to_alone(family):
    """A stock model is told that videos carry their sound; a pack needs no such flag, its positions say it."""
    pytest.importorskip("transformers")
    stock, prepared = tiny.tiny_model(family), prepare_model(tiny.tiny_model(family))
    adapter = adapter_for(stock.config)
    raws = [sound_sample(np.random.default_rng(seed), adapter, pixels=True) for seed in range(4)]
    batch = pack_samples(raws, adapter=adapter)
    assert "use_audio_in_video" not in batch.forward_kwargs(prepared)
    with torch.no_grad():
        logits = prepared(**batch.forward_kwargs(prepared)).logits[0]
        for raw, start in zip(raws, batch.cu_seqlens_q.tolist(), strict=False):
            given = {name: value for name, value in raw.items() if not name.endswith("_ids")}
            ids, ones = raw["input_ids"][None], torch.ones_like(raw["input_ids"])[None]
            want = stock(input_ids=ids, attention_mask=ones, **given, use_audio_in_video=True, use_cache=False).logits[0]
            torch.testing.assert_close(logits[start : start + len(want)], want, rtol=0, atol=1e-12)
