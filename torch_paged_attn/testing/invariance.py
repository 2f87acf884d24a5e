"""A check of a user's own stack: do a sequence's bits depend on what else is in the batch?"""

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_paged_attn.ops.checks import fail

ModelFn = Callable[[list[Any]], Sequence[Tensor]]


def assert_batch_invariant(
    model_fn: ModelFn, inputs: Sequence[Any], *others: ModelFn, subsets: int = 4, seed: int = 0
) -> None:
    """Assert that `model_fn` gives each input the same bits in every batch.

    The batches are each input alone, all of them, all in reverse, and random subsets in random
    order.

    Args:
        model_fn: takes a list of inputs, and returns one tensor for each; such as the
            log-probabilities of each prompt's tokens
        inputs: two or more of anything that `model_fn` understands
        others: other ways to compute the same tensors, such as by chunks of a prompt or by decode
            after prefill; their bits must be equal to those of `model_fn`, too
        subsets: how many random subsets are tried
        seed: of these subsets

    Raises:
        AssertionError: a bit depends on the batch. The text names the input, the batch, and the
            largest difference.
        ValueError: there are fewer than two inputs, whose batches would all be equal.
    """
    if len(inputs) < 2:
        fail("assert_batch_invariant", "inputs", f"{len(inputs)}", "two or more")
    every = list(range(len(inputs)))
    draw = random.Random(seed)
    batches = [[i] for i in every] + [every, every[::-1]]
    batches += [draw.sample(every, draw.randint(1, len(every))) for _ in range(subsets)]
    expected: dict[int, Tensor] = {}
    for n, function in enumerate((model_fn, *others)):
        for batch in batches:
            results = function([inputs[i] for i in batch])
            if len(results) != len(batch):
                raise AssertionError(
                    f"assert_batch_invariant(): expected model_fn to return {len(batch)} tensors,"
                    f" one for each input, got {len(results)}"
                )
            for i, result in zip(batch, results, strict=True):
                # a later call may reuse the memory of this one's result
                first = expected.setdefault(i, result.detach().clone())
                _assert_same_bits(first, result.detach(), f"input {i}", f"batch {batch}", n)


def _assert_same_bits(first: Tensor, result: Tensor, which: str, batch: str, function: int) -> None:
    where = f"{which} in {batch}" + (f", by function {function} of `others`" if function else "")
    if (first.shape, first.dtype) != (result.shape, result.dtype):
        raise AssertionError(
            f"assert_batch_invariant(): {where} has shape {tuple(result.shape)} and dtype"
            f" {result.dtype}, and alone {tuple(first.shape)} and {first.dtype}"
        )
    a, b = (
        x.contiguous().view(torch.uint8) if x.dim() else x[None].view(torch.uint8)
        for x in (first, result)
    )
    if torch.equal(a, b):
        return
    differs = (a != b).unflatten(-1, (-1, first.element_size())).any(-1)
    largest = (first.double() - result.double()).abs().nan_to_num().max().item()
    raise AssertionError(
        f"assert_batch_invariant(): {where} differs from the result alone in"
        f" {int(differs.sum())} of {differs.numel()} numbers, by {largest:.3g} at most"
    )
