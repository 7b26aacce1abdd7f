"""Branches: how much of the gradient comes through the path on which an error is propagated.

What a function, a layer norm or attention has saved with an error distorts the gradient that it propagates. Where other
paths join, as at the sum of a residual block, the gradient of those is right. Relative to the sum, the error is smaller
by the share that has come through the branch. In a collection step both are measured where they meet.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

from encke.policies.comet.products import leaf_behind
from encke.torch_internals import is_batched_gradient, is_functorch_tensor

if TYPE_CHECKING:
    from encke.policies.comet.measure import WeightGradientSample

JOINTS = 2
"""Joints measured in a branch: gate and up projections of a gated block read one input, then comes the block's sum."""
LONGEST = 100
"""Nodes that are followed to find a joint."""


def single(gradient: Tensor | None) -> TypeGuard[Tensor]:
    """Return whether there is a dense, real gradient, and not several as one tensor, as in a vectorised Jacobian."""
    if gradient is None or gradient.layout is not torch.strided or gradient.is_complex():
        return False
    return not is_batched_gradient(gradient) and not is_functorch_tensor(gradient)


def power(gradient: Tensor) -> Tensor:
    """Return the sum of squares."""
    kind = torch.float64 if gradient.dtype == torch.float64 else torch.float32
    return torch.linalg.vector_norm(gradient.detach(), dtype=kind).square()


class Joint:
    """A place where the gradient of a branch is added to those of other paths."""

    def __init__(self) -> None:
        self.parts: list[Tensor] = []
        """Sums of squares of the gradients that come through the branch."""
        self.total: Tensor | None = None
        """Sum of squares of the sum of all gradients."""

    @property
    def tensor(self) -> Tensor | None:
        """Both sums of squares; None where they were not measured."""
        if self.total is None or not self.parts:
            return None
        return torch.stack([torch.stack(self.parts).sum(), self.total])


@dataclass(slots=True)
class Branch:
    """The path from a node to the places where other paths join, and the weights on it."""

    sections: list[tuple[list[WeightGradientSample], Joint]]
    """Weights between the node and the first joint, between that and the second, and so on."""

    def reach(self, squares: Mapping[int, float], before: float, shares: Mapping[Joint, float]) -> float:
        """Return the sum of `squares` of the weights that an error reaches, each by the share that reaches it.

        Args:
            squares: Squares by id of the weight.
            before: Sum of the squares of all weights in front of the node.
            shares: Share of a joint's gradient that comes through the branch.
        """
        reached, share = 0.0, 1.0
        for samples, joint in self.sections:
            weights = {id(each.weight) for each in samples}
            inside = min(sum(squares.get(weight, 0.0) for weight in weights), before)
            reached += inside * share
            before -= inside
            share *= shares.get(joint, 1.0)
        return reached + before * share


def share_of(numbers: Any) -> float:
    """Return the share of a joint from its `tensor` on the host; 1 where nothing was measured."""
    part, total = numbers.tolist() if isinstance(numbers, Tensor) else (math.nan, math.nan)
    return min(part / total, 1.0) if 0 <= part < math.inf and 0 < total < math.inf else 1.0


Section = tuple[list["WeightGradientSample"], Joint | None, Any]
"""Weights on a path without joints, the joint at its end, and that one's node."""


class Graph:
    """An autograd graph, in which branches are found."""

    def __init__(self, nodes: Iterable[Any], weights: Mapping[Any, Sequence[WeightGradientSample]]) -> None:
        self.edges: dict[Any, list[tuple[Any, int, int]]] = {}
        """Nodes behind each node, with the number of the node's edge and of the result that it leads to; no weights."""
        self.consumers: dict[tuple[Any, int], int] = {}
        """Number of nodes that add to the gradient of each result of an operation, by node and index."""
        for node in nodes:
            self.edges[node] = behind = []
            for i, edge in enumerate(node.next_functions):
                if edge[0] is not None:
                    self.consumers[edge] = self.consumers.get(edge, 0) + 1
                    if leaf_behind(edge[0]) is None:
                        behind.append((edge[0], i, edge[1]))
        self.weights = weights
        """Weights whose gradients a node computes."""
        self._joints: dict[tuple[Any, ...], Joint] = {}
        self._sections: dict[Any, Section] = {}

    def branch(self, start: Any) -> Branch:
        """Follow the gradient that a node propagates until other paths have joined it.

        Paths that part and meet again, as query, key and value do, are one branch. Where others join while several are
        open, the branch ends, and no share is taken there.
        """
        sections: list[tuple[list[WeightGradientSample], Joint]] = []
        node = start
        own: Sequence[WeightGradientSample] = ()
        while len(sections) < JOINTS:
            # Many branches have the same end.
            section = self._sections.get(node)
            if section is None:
                section = self._sections[node] = self._section(node)
            weights, joint, following = section
            if joint is None:
                break
            sections.append(([*own, *weights], joint))
            node, own = following, self.weights.get(following, ())
        return Branch(sections)

    def _section(self, node: Any) -> Section:
        """Return the weights behind a node up to the first joint, that joint, and its node; no joint if none comes."""
        weights: list[WeightGradientSample] = []
        # A node's gradient is complete when all nodes behind it have run: those created later.
        open_nodes: dict[Any, list[tuple[Any, int, int]]] = {}
        latest: list[tuple[int, int, Any]] = []
        for _ in range(LONGEST):
            behind = self.edges[node]
            if len(behind) == 1 and not open_nodes:
                # As below, without the search for the latest of several.
                before, ((node, i, index),) = node, behind
                if self.consumers[node, index] > 1:
                    return weights, self._joint(node, index, [(before, i, index)]), node
                weights += self.weights.get(node, ())
                continue
            for source, i, index in behind:
                if source not in open_nodes:
                    open_nodes[source] = []
                    heapq.heappush(latest, (-source._sequence_nr(), id(source), source))
                open_nodes[source].append((node, i, index))
            if not open_nodes:
                break
            node = heapq.heappop(latest)[2]
            edges = open_nodes.pop(node)
            results = {index for _, _, index in edges} if len(edges) > 1 else {edges[0][2]}
            consumers = 0
            for index in results:
                consumers += self.consumers[node, index]
            if consumers > len(edges):
                if open_nodes or len(results) > 1:
                    break
                return weights, self._joint(node, results.pop(), edges), node
            weights += self.weights.get(node, ())
        return weights, None, None

    def _joint(self, node: Any, index: int, edges: list[tuple[Any, int, int]]) -> Joint:
        """Return the joint at a node, with hooks that measure it in backward."""
        key = (node, index, *[(source, i) for source, i, _ in edges])
        joint = self._joints.get(key)
        if joint is not None:
            return joint
        joint = self._joints[key] = Joint()

        def take_total(gradients: tuple[Tensor | None, ...], joint: Joint = joint) -> None:
            gradient = gradients[index]
            if single(gradient):
                joint.total = power(gradient)

        node.register_prehook(take_total)
        for source, i, _ in edges:

            def take_part(computed: tuple[Tensor | None, ...], _: Any, i: int = i, joint: Joint = joint) -> None:
                gradient = computed[i]
                if single(gradient):
                    joint.parts.append(power(gradient))

            source.register_hook(take_part)
        return joint


class ScoresShare:
    """The share of the gradient behind attention that goes to queries and keys: that which wrong values distort."""

    def __init__(self, node: Any) -> None:
        self.tensor: Tensor | None = None
        """Sums of squares of the gradients of queries and keys, and of these and the values."""

        def take(computed: tuple[Tensor | None, ...], _: Any) -> None:
            if len(computed) > 2 and all(single(gradient) for gradient in computed[:3]):
                query, key, value = (power(gradient) for gradient in computed[:3] if gradient is not None)
                self.tensor = torch.stack([query + key, query + key + value])

        node.register_hook(take)
