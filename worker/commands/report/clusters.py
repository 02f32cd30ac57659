"""Clusters of near-duplicates: traces that are linked by their nearest neighbours."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from worker.commands.shared.scored import Rows


def clusters_of(
    ids: npt.NDArray[Any], nearest: npt.NDArray[Any], similarity: npt.NDArray[np.float64], near: npt.NDArray[np.bool_]
) -> list[tuple[Rows, npt.NDArray[np.float64]]]:
    """Return (traces, similarities of their links) of each cluster of two or more, largest first.

    `ids` and `nearest`: hashes of each trace's id and its neighbour's; `near`: whether the two are linked, shape (n,)
    each. Nodes are ids: a neighbour that is not among the traces still holds its followers together.
    """
    nodes, ends = np.unique(np.concatenate([ids[near], nearest[near]]), return_inverse=True)
    parents = list(range(len(nodes)))

    def root(node: int) -> int:
        while parents[node] != node:
            parents[node] = parents[parents[node]]
            node = parents[node]
        return node

    half = len(ends) // 2
    for one, other in zip(ends[:half].tolist(), ends[half:].tolist(), strict=True):
        a, b = root(one), root(other)
        parents[max(a, b)] = min(a, b)
    members = np.flatnonzero(np.isin(ids, nodes))
    roots = np.array([root(node) for node in np.searchsorted(nodes, ids[members]).tolist()], dtype=np.intp)
    order = np.argsort(roots, kind="stable")
    members, roots = members[order], roots[order]
    parts = np.split(members, np.flatnonzero(np.diff(roots)) + 1)
    found = [(part, similarity[part[near[part]]]) for part in parts if len(part) >= 2]
    return sorted(found, key=lambda item: (-len(item[0]), int(item[0][0])))
