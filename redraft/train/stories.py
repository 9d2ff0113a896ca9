"""Stories as training data, sampled from a teacher: a Llama checkpoint with a list of its tokens, or a redraft checkpoint.

teacher -> batches of stories at temperature 1 -> those that ended -> stories/stories_00.txt.xz to stories_07.txt.xz
"""

import lzma
import os
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import TextIO

import torch

from redraft.train.evals.judge import START, LlamaCheckpoint

FILES = 8  # that the recipe `tiny` reads
SEPARATOR = "<|endofstory|>"
END = 2  # of a Llama text; the start token of the next one ends it too
MIN_P = 0.015
BATCH = 64  # stories sampled together
LONGEST = 512  # tokens of a story of a redraft checkpoint
MAX_FRUITLESS = 4  # batches without a story that ends, before the teacher is refused


def sample_stories(teacher: str | Path, device: torch.device | str | None, seed: int) -> Iterator[str]:
    """Yields stories without end. Those that reach the teacher's context before they end are left out."""
    from redraft.kernels.backend import select_device

    torch.manual_seed(seed)
    place = select_device(device)
    is_llama = (Path(teacher) / "tokens.jsonl").exists()
    batches = _sample_llama(LlamaCheckpoint(teacher, place)) if is_llama else _sample_redraft(teacher, place)
    fruitless = 0
    for batch in batches:
        fruitless = 0 if batch else fruitless + 1
        if fruitless == MAX_FRUITLESS:
            raise ValueError(f"{teacher} ended none of {MAX_FRUITLESS * BATCH} stories: choose another --teacher")
        yield from batch


def _sample_llama(llama: LlamaCheckpoint) -> Iterator[list[str]]:
    """Yields the stories of each batch that ended."""
    start_B1 = torch.full((BATCH, 1), START, device=llama.model.device)
    while True:
        with torch.inference_mode():
            ids_BT = llama.model.generate(
                start_B1,
                max_length=llama.model.config.max_position_embeddings,
                do_sample=True,
                top_k=0,
                min_p=MIN_P,
                eos_token_id=[START, END],
                pad_token_id=END,
            )
        rows = ids_BT[:, 1:].tolist()
        ends = [next((position for position, token in enumerate(ids) if token in (START, END)), None) for ids in rows]
        yield [llama.decode(ids[:end]) for ids, end in zip(rows, ends, strict=True) if end]


def _sample_redraft(teacher: str | Path, device: torch.device) -> Iterator[list[str]]:
    """Yields the stories of each batch that ended."""
    from redraft.checkpoint import load_checkpoint
    from redraft.tasks.sudoku.solve import is_sudoku_model
    from redraft.train.own_text import OwnTextConfig, OwnTextSampler

    model, tokenizer, _ = load_checkpoint(teacher, device=device)
    if is_sudoku_model(model):
        raise ValueError(f"{teacher} solves Sudoku and knows no words: choose another --teacher")
    if tokenizer.bos_id is None:
        raise ValueError(f"{teacher} has no start token, behind which a story could begin")
    length = min(LONGEST, model.config.max_position_embeddings)
    sampler = OwnTextSampler(model, OwnTextConfig(rows=BATCH, length=length, ended_share=1.0))
    stops = set(model.config.eos_token_ids)
    while True:
        batch = sampler.sample([[tokenizer.bos_id]] * BATCH, [1.0] * BATCH)
        yield [tokenizer.decode(ids[:-1]) for ids in batch if ids[-1] in stops]


def write_stories(stories: Iterator[str], count: int, folder: Path) -> Iterator[int]:
    """Writes `count` stories, in turn to each of the files, and yields how many are written. All files appear at the end."""
    first = next(stories)  # a teacher that cannot be used leaves no folder
    stories = chain([first], stories)
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        paths = (folder / f"stories_{number:02}.txt.xz" for number in range(FILES))
        files = [stack.enter_context(_replace_xz(path)) for path in paths]
        written = 0
        while written < count:
            story = next(stories).strip()
            if story and SEPARATOR not in story:
                files[written % FILES].write(f"{story}\n{SEPARATOR}\n")
                written += 1
                yield written


@contextmanager
def _replace_xz(path: Path) -> Iterator[TextIO]:
    """Yields a new compressed text file beside `path`, and renames it at the end. After an exception it is removed."""
    part = path.with_name(f".{path.name}.part-{secrets.token_hex(4)}")
    try:
        with lzma.open(part, "xt", encoding="utf-8") as file:
            yield file
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
