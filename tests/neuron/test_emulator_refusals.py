"""The emulator refuses what misuses the language, a memory or a DMA, each for its own fault."""

import re

import numpy as np
import pytest
from nki_emulator import Violation, emulated, nisa, nl, simulate
from tiles import empty, hbm, ones, tile

pytestmark = pytest.mark.usefixtures("machine")


def gather(index, rows=6, columns=3, **kw):
    cache = hbm(np.zeros((rows, 3), np.float32))
    pattern = [[3, len(index)], [1, columns]]
    offsets = tile(np.array(index, np.int32)[:, None])
    nisa.dma_copy(empty(len(index), columns), cache.ap(pattern, vector_offset=offsets), **kw)


def scatter_twice():
    offsets = tile(np.array([[1], [1]], np.int32))
    cache = hbm(np.zeros((6, 3), np.float32))
    nisa.dma_copy(cache.ap([[3, 2], [1, 3]], vector_offset=offsets), ones(2, 3))


def keeps_a_tile():
    kept = []
    nl.fori_loop(0, 2, lambda i: kept.append(empty(1, 1)))


def same_element_twice():
    def kernel(x):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(out, x)
        return out

    simulate(kernel, 2)(np.ones((2, 2), np.float32))


def loops_differently():
    def kernel(x):
        nl.fori_loop(0, 1 + nl.program_id(0), lambda i: None)
        return x

    simulate(kernel, 2)(np.ones((2, 2), np.float32))


class Group(nl.NKIObject):
    def __init__(self, part):
        self.part = part


def pass_argument(value):
    simulate(lambda x, group: x)(np.ones((2, 2), np.float32), value)


# name -> what the refusal says, and the program
FAULTS = {
    "array in a tuple": ("holds a ndarray", lambda: pass_argument((np.ones(1),))),
    "array in a group": ("holds a ndarray", lambda: pass_argument(Group(np.ones(1)))),
    "argument of a list": ("holds a list", lambda: pass_argument([1])),
    "argument of a plain class": ("holds a object", lambda: pass_argument(object())),
    "129 partitions": ("a tile has at most 128", lambda: empty(129, 4)),
    "one dimension": ("at least 2 dimensions", lambda: empty(128)),
    "SBUF full": ("sbuf holds 212992", lambda: [empty(128, 30000) for _ in range(2)]),
    "PSUM full": ("psum holds 16384", lambda: [empty(128, 512, buffer=nl.psum) for _ in range(9)]),
    "buffer by name": ("allowed: nl.sbuf", lambda: empty(128, 4, buffer="sbuf")),
    "reads what nothing wrote": (
        "before it is written",
        lambda: nisa.tensor_copy(empty(8, 4), empty(8, 4)),
    ),
    "DMA of what nothing wrote": (
        "before it is written",
        lambda: nisa.dma_copy(hbm(np.zeros((8, 4))), empty(8, 4)),
    ),
    "DMA from PSUM": (
        "does not reach PSUM",
        lambda: nisa.dma_copy(empty(8, 4), ones(8, 4, buffer=nl.psum)),
    ),
    "DMA transpose: 4 bytes": (
        "allowed: types of 2 bytes",
        lambda: nisa.dma_transpose(empty(4, 8), ones(8, 4)),
    ),
    "DMA transpose: other axes": (
        "allowed: (2, 1, 0)",
        lambda: nisa.dma_transpose(
            empty(4, 8, 2, dtype=nl.bfloat16), ones(8, 2, 4, dtype=nl.bfloat16), axes=(1, 2, 0)
        ),
    ),
    "DMA transpose: the same shape": (
        "(8, 4) into (8, 4)",
        lambda: nisa.dma_transpose(empty(8, 4, dtype=nl.bfloat16), ones(8, 4, dtype=nl.bfloat16)),
    ),
    "DMA transpose: into PSUM": (
        "does not reach PSUM",
        lambda: nisa.dma_transpose(
            empty(4, 8, dtype=nl.bfloat16, buffer=nl.psum), ones(8, 4, dtype=nl.bfloat16)
        ),
    ),
    "DMA transpose: into HBM": (
        "dma_transpose writes SBUF",
        lambda: nisa.dma_transpose(
            hbm(np.zeros((4, 8), nl.bfloat16)), ones(8, 4, dtype=nl.bfloat16)
        ),
    ),
    "DMA transpose: priority": (
        "from the fourth generation on",
        lambda: nisa.dma_transpose(
            empty(4, 8, dtype=nl.bfloat16), ones(8, 4, dtype=nl.bfloat16), priority=0
        ),
    ),
    "DMA with priority": (
        "from the fourth generation on",
        lambda: nisa.dma_copy(empty(8, 4), hbm(np.zeros((8, 4), np.float32)), priority=1),
    ),
    "DMA with an engine": (
        "only hwdge has an engine",
        lambda: nisa.dma_copy(
            empty(8, 4), hbm(np.zeros((8, 4), np.float32)), engine=nisa.engine.sync
        ),
    ),
    "DMA of another size": (
        "(8, 5) into (8, 4)",
        lambda: nisa.dma_copy(empty(8, 4), hbm(np.zeros((8, 5)))),
    ),
    "gather: out of bounds": ("an index is out of bounds", lambda: gather([0, 6])),
    "gather: negative": ("an index is out of bounds", lambda: gather([-1, 0])),
    "gather: past the end": ("reaches past its tensor", lambda: gather([0, 5], columns=4)),
    "gather: hardware descriptors": (
        "needs swdge",
        lambda: gather([0], dge_mode=nisa.dge_mode.hwdge),
    ),
    "scatter: one index twice": ("two rows are scattered to one index", scatter_twice),
    "skip without an index": (
        "only an index can be skipped",
        lambda: nisa.dma_copy(
            empty(8, 4), hbm(np.zeros((8, 4), np.float32)), oob_mode=nisa.oob_mode.skip
        ),
    ),
    "view of another size": ("view of float32 as uint8", lambda: ones(8, 4).view(nl.uint8)),
    "register of a float": (
        "register_load of float32",
        lambda: nisa.register_load(nisa.register_alloc(), ones(1, 1)),
    ),
    "register from PSUM": (
        "register_load does not reach PSUM",
        lambda: nisa.register_load(
            nisa.register_alloc(), ones(1, 1, dtype=nl.int32, buffer=nl.psum)
        ),
    ),
    "register into PSUM": (
        "register_store does not reach PSUM",
        lambda: nisa.register_store(
            empty(1, 1, dtype=nl.int32, buffer=nl.psum), nisa.register_alloc(1)
        ),
    ),
    "index outside": ("index 4 is outside", lambda: empty(8, 4)[:, 4]),
    "slice outside": ("slice 2:5", lambda: empty(8, 4)[:, 2:5]),
    "reshape of partitions": ("keeps the partition dimension", lambda: empty(8, 4).reshape((4, 8))),
    "reshape of another size": ("reshape of (8, 4) to (8, 5)", lambda: empty(8, 4).reshape((8, 5))),
    "register in Python": ("has no value while", lambda: range(nisa.register_alloc(3))),
    "register compared": ("has no value while", lambda: nisa.register_alloc(3) == 3),
    "register plus one": ("has no value while", lambda: nisa.register_alloc(3) + 1),
    "loop variable written": (
        "is read-only",
        lambda: nl.fori_loop(0, 2, lambda i: nisa.register_move(i, 0)),
    ),
    "loop body returns": ("returns None", lambda: nl.fori_loop(0, 2, lambda i: i)),
    "loop keeps a tile": ("outlives it", keeps_a_tile),
    "tile in an if": ("has no value while", lambda: bool(empty(8, 4))),
    "programs write the same": ("write the same element", same_element_twice),
    "programs loop differently": ("loop differently: [1], [2]", loops_differently),
    "pattern over a part": ("whole tensors only", lambda: empty(8, 4)[:, 2:].ap([[4, 8], [0, 2]])),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_refuses(fault):
    message, program = FAULTS[fault]
    with pytest.raises((Violation, TypeError), match=re.escape(message)):
        program()


def test_capacity_follows_the_generation():
    def fill():
        return [empty(128, 50 * 1024) for _ in range(1)]  # 200 KiB a partition

    with emulated(2), pytest.raises(Violation, match="sbuf holds"):
        fill()
    with emulated(3) as third:
        fill()
    assert third.peak["sbuf"] == 200 * 1024 and third.live["sbuf"] == 0


def test_gathers_came_with_the_third_generation():
    with (
        emulated(2),
        pytest.raises(Violation, match="gathers and scatters came with the third generation"),
    ):
        gather([0, 1])


def test_priorities_came_with_the_fourth_generation():
    with emulated(4):
        nisa.dma_copy(empty(8, 4), hbm(np.zeros((8, 4), np.float32)), priority=3)
        with pytest.raises(Violation, match="allowed: 0 to 3"):
            nisa.dma_copy(empty(8, 4), hbm(np.zeros((8, 4), np.float32)), priority=4)
