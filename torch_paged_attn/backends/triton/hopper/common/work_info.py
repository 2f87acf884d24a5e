"""What the first producer tells the other warps about a tile of queries, in shared memory."""

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from torch_paged_attn.backends.triton.common.names import Names
from torch_paged_attn.backends.triton.hopper.common.records import record

# its name until Triton 3.6, and later
thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier


# the words of a tile. No tiles of keys: the work is done. KV_STOP is one past the last tile of
# keys: a key, or with a layout the number of an entry in the list that begins at FIRST_ENTRY.
# PIECE: which piece of a tile it is, of how many, and the tile's first part: see `pieces.py`
Words = namedtuple(
    "Words",
    "NUM_KV_TILES FIRST_KEY KV_STOP KEY_LEN Q_START STOP_TOKEN FIRST_TOKEN HEAD"
    " CONTEXT_LEN FIRST_ENTRY NUM_ENTRIES BATCH K_START PIECE PIECES FIRST_PART",
)
WORDS = gl.constexpr(len(Words._fields))
WORD = Names(Words(*range(len(Words._fields))))


@record
class WorkInfo:
    """The words of the last STAGES tiles. Tile number n of a program has stage n % STAGES, that of
    its queries: producers wait for `published`, consumers for the queries themselves.
    """

    words: gl.shared_memory_descriptor
    # a barrier for each stage; those of the queries where every reader waits for these
    published: gl.shared_memory_descriptor
    STAGES: gl.constexpr

    @gluon.jit
    def put(self, n, WORD: gl.constexpr, value):
        """Write a word about tile n."""
        one: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        word = self.words.index(n % self.STAGES * WORDS + WORD)
        word.store(gl.full([1], 0, gl.int32, one) + value)

    @gluon.jit
    def get(self, n, WORD: gl.constexpr):
        """A word about tile n."""
        one: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        return gl.sum(self.words.index(n % self.STAGES * WORDS + WORD).load(one), 0)

    @gluon.jit
    def publish(self, n):
        """Let the other producers read the words of tile n."""
        mbarrier.arrive(self.published.index(n % self.STAGES), count=1)

    @gluon.jit
    def wait(self, n):
        """Wait, as a producer, until the words of tile n are there."""
        mbarrier.wait(self.published.index(n % self.STAGES), (n // self.STAGES) & 1)


@gluon.jit
def new_work_info(STAGES: gl.constexpr, published):
    """Room for the words of STAGES tiles. `published`: see `WorkInfo`."""
    word: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    words = gl.allocate_shared_memory(gl.int32, [STAGES * WORDS, 1], word)
    return WorkInfo(words, published, STAGES)
