"""Graphs of layers that a backward pass leaves alive, and when they are gone.

Most passes free what a layer has saved as they use it. Those of zero-bubble pipelines come twice: the first
computes the gradients of inputs and retains the graph, a later one those of weights, and until then a layer
that keeps its activations holds all of them. The later pass need not come through the layer's output, where
backward is noticed, and frees only what it uses; the rest goes with the nodes of the graph. So each node of
such a layer holds one common object, whose end is that of the last of them.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from tba_offload.layers.graph import nearest_nodes

if TYPE_CHECKING:
    from collections.abc import Callable

_KEY = "tba_offload.retained"
"""Key of the common object in the metadata of a node."""

MOST_NODES = 4096
"""Nodes of a layer that are looked at; a node takes about 1 us."""


class Life:
    """Lives as long as a node that holds it."""

    __slots__ = ("__weakref__",)


def is_retained() -> bool:
    """Whether the backward pass that is under way leaves the graph alive."""
    engine: Any = torch._C._autograd
    # Outside of a pass, where compiled autograd runs hooks, the engine says that it does.
    return torch._C._current_graph_task_id() != -1 and bool(engine._get_current_graph_task_keep_graph())


def life_of_layer(after: int, ended: Callable[[weakref.ref[Life]], object]) -> weakref.ref[Life]:
    """Return the life of the part of the graph that lies before the node that backward is at.

    Args:
        after: Only nodes that were made later than the one of this number in autograd's sequence.
        ended: Called when it is over, perhaps by the cyclic collector: it must take no lock.
    """
    life = Life()
    root: Any = torch._C._current_autograd_node()
    for node in nearest_nodes(root, MOST_NODES, after=after):
        metadata: Any = node.metadata
        metadata[_KEY] = life
    return weakref.ref(life, ended)
