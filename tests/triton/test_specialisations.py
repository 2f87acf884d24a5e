"""How many kernels a model takes, whatever it is called with; compiled ahead, none is left."""

import itertools
import random

import cross_compile
import pytest
import torch
from missed_by_warmup import MOST_SEQUENCES, MOST_TOKENS, missed_by_warmup
from triton.runtime.jit import JITFunction

import torch_paged_attn
from torch_paged_attn import BlockSparseLayout, _model_calls, _warmup
from torch_paged_attn.testing import Layout, Problem

BF16 = torch.bfloat16
HAS_GPU = torch.cuda.is_available()


def model(seqs, page_size=16, **options):
    return Problem("model", tuple(seqs), 8, 2, 64, dtype=BF16, page_size=page_size, **options)


@pytest.fixture
def specialisations(compiler):
    def found(problems):
        return compiler.submit(cross_compile.specialisations, "sm90", problems).result()

    return found


def test_one_kernel_for_all_lengths(specialisations):
    lengths = (300, 301, 16 * 29, 16 * 30 - 1, 500)
    problems = [
        model([(1, n), (1, n // 3), (1, 2)], spare_pages=spare)
        for n, spare in itertools.product(lengths, (0, 1, 16))
    ]
    assert specialisations(problems) == {"_attention_fwd_kernel": 1}
    ragged = [model([(n, 0), (n + 7, 90), (1, n)], page_size=None) for n in range(700, 705)]
    # sizes of 1 and of multiples of 16, of which Triton would compile kernels of their own
    ragged += [model([(n, 0)] * b, page_size=None) for n, b in ((1024, 1), (1031, 1), (256, 16))]
    # packed and paged; of packed ones, where one head fills its tiles and where it does not. One
    # kernel lists tiles of any size of packed calls, and one of paged ones that are cut
    for cached, lists in ((60, 1), (16000, 2)):
        paged = [model([(n, cached), (n, 0)]) for n in range(700, 705)]
        found = specialisations([*ragged, *paged])
        assert found == {"_hopper_attention_fwd_kernel": 3, "_tile_order_kernel": lists}


def test_few_kernels_for_all_batches(specialisations):
    """A kernel for each number of sequences looked at at a time, and each class of tiles."""
    decode = [model([(1, 30 + b % 5)] * b) for b in (1, 2, 3, 5, 8, 11, 21, 32, 47, 90, 130, 200)]
    assert specialisations(decode)["_attention_fwd_kernel"] <= 6


def drawn_steps(count):
    """Decodes, draft tokens, chunks of prompts, and mixed batches."""
    g = random.Random(1)
    for number in range(count):
        batch = int(MOST_SEQUENCES ** g.random())
        queries = [1 if number % 2 else g.randint(1, 8)] * batch
        if number % 4 > 1:
            queries[-1] = int((MOST_TOKENS - sum(queries[:-1])) ** g.random())
        longest = int(100 * 1000 ** g.random())
        # tables as wide as the step needs, or as the engine's longest sequence
        columns = 0 if number % 3 else g.choice((64, 256, 1024, 4096))
        yield queries, [n + g.randint(longest // 2, longest) for n in queries], columns


def test_warmup_leaves_nothing_to_compile(compiler):
    steps = list(drawn_steps(200))
    warmed, missed = compiler.submit(missed_by_warmup, "sm90", steps).result()
    assert missed == []
    assert warmed <= 110


def test_warmup_on_cpu():
    assert torch_paged_attn.warmup(8, 2, 64, device="cpu") is None
    with pytest.raises(ValueError, match=r"expected device to be .* got xla"):
        torch_paged_attn.warmup(8, 2, 64, device="xla")


def test_warmup_of_lists(monkeypatch):
    """It makes the calls that `compile` makes for models of lists, which test_first_use.py counts
    the kernels of; they follow the other calls."""
    asked = []
    monkeypatch.setattr(_model_calls, "selected_attention", lambda *args, **o: asked.append(o))
    made = []
    job = _model_calls.selected_calls_of(
        *(8, 1, 72, 64, {}, torch.bfloat16, torch.bfloat16, 16, 2, 64, 32, 1)
    )

    def first(device):
        return [lambda: made.append(device)]

    described, make = _warmup.in_turn(("first", first), job)
    calls = make(torch.device("cpu"))
    assert asked == made == []
    for line in calls.lines:
        for i in line:
            calls[i]()
    assert described.startswith("first; selected") and made == [torch.device("cpu")]
    assert len(asked) > 10 and {x["select_size"] for x in asked} == {1}
    with pytest.raises(ValueError, match=r"warmup\(\): expected page_size"):
        torch_paged_attn.warmup(8, 2, 64, device="cpu", num_units=4)


def test_one_kernel_for_all_layout_sizes(specialisations):
    layouts = (Layout(heads="all", density=density) for density in (0.1, 0.3, 0.5, 0.8))
    problems = [
        model([(1500 + 90 * i, 0), (130, 1000 * i)], layout=layout)
        for i, layout in enumerate(layouts)
    ]
    assert specialisations(problems) == {
        "_hopper_attention_fwd_kernel": 1,
        "_tile_order_kernel": 1,
        "_block_lists_kernel": 1,
    }


@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
@pytest.mark.parametrize(
    "layout, max_batch, max_tokens", [(None, 3, 24), ("shared", 2, 12), ("batched", 2, 12)]
)
def test_warmup_compiles_everything(layout, max_batch, max_tokens, monkeypatch):
    compiled = []
    g = torch.Generator().manual_seed(0)

    def randint(most):
        return int(torch.randint(1, most + 1, (), generator=g))

    def some_layout(batch=1):
        """Every row lists the same number of blocks, of a sequence's first."""
        rows, listed = 30 + randint(9), randint(4)
        shape = (batch, 8) if layout == "batched" else (8,)
        crow = (torch.arange(rows + 1) * listed).int().expand(*shape, -1)
        col = (torch.arange(rows * listed) % listed).int().expand(*shape, -1)
        return BlockSparseLayout(crow.cuda(), col.cuda(), 64, 64)

    torch_paged_attn.warmup(
        8, 2, 64, page_size=16, causal=True, max_batch=max_batch, max_tokens=max_tokens,
        layout=layout and some_layout(),
    )  # fmt: skip
    compile_kernel = JITFunction._do_compile

    def note(self, *args):
        compiled.append(self.__name__)
        return compile_kernel(self, *args)

    monkeypatch.setattr(JITFunction, "_do_compile", note)
    for _ in range(60):
        batch = randint(max_batch)
        lengths = [randint(max_tokens // batch) if randint(2) > 1 else 1 for _ in range(batch)]
        contexts = [n + randint(900) for n in lengths]
        width = -(-max(contexts) // 16) + randint(9)
        cache = torch.randn(2, batch * width, 16, 2, 64, device="cuda").bfloat16().transpose(2, 3)
        new = torch.randn(2, sum(lengths), 2, 64, device="cuda").bfloat16()
        slots = torch.randperm(batch * width * 16, device="cuda")[: sum(lengths)]
        torch_paged_attn.reshape_and_cache(*new, (cache[0], cache[1]), slots)
        arguments = dict(
            q=torch.randn(sum(lengths), 8, 64, device="cuda").bfloat16(),
            k=cache[0],
            v=cache[1],
            cu_seqlens_q=torch.tensor([0, *itertools.accumulate(lengths)]).int().cuda(),
            seqused_k=torch.tensor(contexts).int().cuda(),
            block_table=torch.arange(batch * width, device="cuda").view(batch, width).int(),
            causal=True,
        )
        state = torch_paged_attn.flash_varlen(**arguments)
        if layout is not None:
            listed = some_layout(batch).arguments()
            state = torch_paged_attn.blocksparse(**arguments, **listed)
        torch_paged_attn.merge_states(*state, *state)
    assert compiled == []


def test_cores_are_counted_where_linux_does_not_say_which_are_allowed(monkeypatch):
    monkeypatch.delattr("os.sched_getaffinity")
    monkeypatch.setattr("os.cpu_count", lambda: 6)
    assert _warmup.usable_cores() == 6
