"""The graphs that torch.compile makes of a call and of its backward."""

import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition


class Graphs:
    """A compiler that runs graphs as they are and keeps the names of their operators."""

    def __init__(self):
        self.forward, self.backward = [], []

    def keep(self, names):
        def compiler(graph, _):
            names.append([str(n.target) for n in graph.graph.nodes if n.op == "call_function"])
            return make_boxed_func(graph.forward)

        return compiler

    def compile(self, function, **options):
        from torch._dynamo.backends.common import aot_autograd

        torch._dynamo.reset()
        backend = aot_autograd(
            fw_compiler=self.keep(self.forward),
            bw_compiler=self.keep(self.backward),
            partition_fn=min_cut_rematerialization_partition,
        )
        return torch.compile(function, fullgraph=True, backend=backend, **options)

    def count(self, op):
        """How often an operator stands in the forward graph, and in the backward's."""
        target = f"paged_attn.{op}.default"
        assert len(self.forward) == len(self.backward) == 1
        return self.forward[0].count(target), self.backward[0].count(target)
