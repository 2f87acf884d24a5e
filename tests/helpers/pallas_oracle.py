"""Pallas kernels for TPU on the CPU, watched: races, forgotten waits, memory that was not written.

Pallas' TPU interpreter fills what is uninitialised with NaN, keeps vector clocks of what cores and
DMAs touch, and looks at the semaphores when a kernel ends. It runs a DMA when it is started or when
it is waited for; each hides what the other shows, so a kernel is to be run in both ways.
"""

import contextlib
import io
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
from jax.experimental.pallas import tpu as pltpu

DmaMode = Literal["on_wait", "eager"]
DMA_MODES: tuple[DmaMode, ...] = get_args(DmaMode)
COMPLAINTS = ("RACE DETECTED", "non-zero count")


def observe(run: Callable[[Any], Any], dma_mode: DmaMode) -> tuple[Any, list[str]]:
    """`run(interpret)`'s result, and what the interpreter had to say against it."""
    params = pltpu.InterpretParams(
        detect_races=True, uninitialized_memory="nan", dma_execution_mode=dma_mode
    )
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            result = jax.block_until_ready(run(params))
    except BaseException:
        # what it knows of this kernel would be taken for the next one's
        pltpu.reset_tpu_interpret_mode_state()
        raise
    lines = said.getvalue().splitlines()
    return result, [line for line in lines if any(text in line for text in COMPLAINTS)]


def watch(run: Callable[[Any], Any], *dma_modes: DmaMode) -> Any:
    """`run(interpret)`'s result; raises AssertionError if the interpreter complains."""
    for mode in dma_modes or DMA_MODES:
        result, complaints = observe(run, mode)
        assert not complaints, f"{mode}: {complaints[0]}"
    return result
