"""Networks between the nodes of a machine: their links, and the links that a message passes.

A node has one port for each NIC.  If it has fewer ranks than NICs, it has one port for each rank,
and each port drives several NICs.  The ranks of a node are dealt to its ports in turn.  Every
cable is two links, one each way.  Switches are infinitely fast.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

import numpy as np

from a2d_mpi.planning.machine import Machine

NETWORKS = ("switch", "fat tree", "dragonfly")
PORTS = 32  # ports of a leaf switch towards nodes


@dataclass(frozen=True)
class Network:
    """Connections between the ports of all nodes.

    Attributes
    ----------
    kind : {"switch", "fat tree", "dragonfly"}
        "switch": one switch for all ports.  "fat tree": leaf switches of `PORTS` ports, each with
        a cable to every spine switch.  The receiver's port decides the spine switch of a message,
        as in InfiniBand's static routing.  "dragonfly": the smallest balanced one with enough
        ports (Kim et al. 2008).  A group has 2p routers, each with p ports and p cables to other
        groups.  Routing is adaptive: links inside a group are no bottleneck, and a message between
        two groups passes a third one (Valiant).  So half of a group's bandwidth serves its own
        messages.
    oversubscription : float
        Ports of a leaf switch of a fat tree, divided by its cables to spine switches.
    """

    kind: str = "switch"
    oversubscription: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in NETWORKS:
            raise ValueError(f"kind must be one of {', '.join(NETWORKS)}, got {self.kind!r}")
        if not 1 <= self.oversubscription <= PORTS:
            raise ValueError(
                f"oversubscription must be from 1 to {PORTS}, got {self.oversubscription}"
            )
        if self.oversubscription > 1 and self.kind != "fat tree":
            raise ValueError(f"only a fat tree may be oversubscribed, got a {self.kind}")

    @property
    def name(self) -> str:
        """Name that `parse_network` reads."""
        return self.kind + f":{self.oversubscription:g}" * (self.oversubscription > 1)


SWITCH = Network()


def parse_network(text: str) -> Network:
    """Return a network by its name: "switch", "fat tree:2" (oversubscribed), "dragonfly".

    Raises
    ------
    ValueError
        If there is no network of this name, or its oversubscription is out of bounds.
    """
    kind, _, factor = text.replace("_", " ").strip().partition(":")
    try:
        return Network(kind, float(factor or 1))
    except ValueError as error:
        raise ValueError(f"network {text[:40]!r}: {error}") from None


class Cables:
    """The links of a machine's first nodes, and the route from any rank to another.

    Parameters
    ----------
    network : Network
    machine : Machine
    ranks : int
        Number of ranks, which fill the nodes one after the other.

    Attributes
    ----------
    bandwidth : (links,) float64
        Bytes/s.

    Raises
    ------
    ValueError
        If the machine's profile lacks a link that the ranks use.
    """

    def __init__(self, network: Network, machine: Machine, ranks: int) -> None:
        self._network, self._per_node = network, machine.ranks_per_node
        self._inside, self._between = machine.links(ranks)
        nodes = -(-ranks // self._per_node)
        self._ports = min(self._between.nics, self._per_node)  # ports of a node
        self._all, self._ranks = nodes * self._ports, ranks
        one = self._between.bandwidth * self._between.nics / self._ports
        ports = np.full(self._all, one)
        links = [np.full(2 * ranks, self._inside.bandwidth), ports, ports]
        self._first = 2 * (ranks + self._all)  # index of the first link between switches
        if network.kind == "fat tree":
            self._leaves = -(-self._all // PORTS)
            self._spines = max(1, round(PORTS / network.oversubscription))
            links.append(np.full(2 * self._leaves * self._spines, one))
        elif network.kind == "dragonfly":
            p = next(p for p in count(1) if 2 * p * p * (2 * p * p + 1) >= self._all)
            self._group = 2 * p * p
            self._groups = -(-self._all // self._group)
            links.append(np.full(2 * self._groups, one * self._group / 2))
        self.bandwidth = np.concatenate(links)

    def routes(self, source: np.ndarray, to: np.ndarray) -> np.ndarray:
        """Return the links from world ranks to others, (n, most links) int64, padded with -1."""
        nodes = source // self._per_node, to // self._per_node
        ports = [
            x * self._ports + rank % self._per_node % self._ports
            for x, rank in zip(nodes, (source, to))
        ]
        up, down = ports[0] + 2 * self._ranks, ports[1] + 2 * self._ranks + self._all
        ways = {
            "switch": lambda *_: [],
            "fat tree": self._over_spine,
            "dragonfly": self._over_groups,
        }
        far = np.stack([up, *ways[self._network.kind](*ports), down], axis=1)
        near = np.full_like(far, -1)
        near[:, 0], near[:, 1] = source, to + self._ranks
        return np.where((nodes[0] == nodes[1])[:, None], near, far)

    def latency(self, source: np.ndarray, to: np.ndarray) -> np.ndarray:
        """Return the seconds until the shortest message arrives, (n,) float64."""
        near = source // self._per_node == to // self._per_node
        return np.where(near, self._inside.latency, self._between.latency)

    def _over_spine(self, port: np.ndarray, to: np.ndarray) -> list[np.ndarray]:
        leaf, other, spine = port // PORTS, to // PORTS, to % self._spines
        up = self._first + leaf * self._spines + spine
        down = self._first + (self._leaves + other) * self._spines + spine
        return [np.where(leaf == other, -1, x) for x in (up, down)]

    def _over_groups(self, port: np.ndarray, to: np.ndarray) -> list[np.ndarray]:
        group, other = port // self._group, to // self._group
        links = self._first + group, self._first + self._groups + other
        return [np.where(group == other, -1, x) for x in links]
