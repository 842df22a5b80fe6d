"""Networks between the nodes of a machine: their links, and those that a message passes.

Nodes have ports: as many as NICs, or as ranks if there are fewer, who then drive several NICs
each.  Ranks send through the ports of their nodes in turn.  Every cable is two links, one each
way; what is switched inside a switch takes no time.  Built from a profile; no simulator is needed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from a2d_mpi.planning.machine import Machine

KINDS = ("switch", "fat tree", "dragonfly")
PORTS = 32  # of a leaf switch, towards nodes


@dataclass(frozen=True)
class Network:
    """How the ports of all nodes are connected.

    Attributes
    ----------
    kind : str
        "switch": one switch for all.  "fat tree": leaf switches of `PORTS` ports, each with a
        cable to each of the spine switches, of which that of a message follows from the port
        where it goes, as InfiniBand's static routes do.  "dragonfly": routers in groups; see
        `_dragonfly`.
    oversubscription : float
        Of a fat tree: ports of a leaf switch, over its cables to spine switches.
    slow_port : float
        The first port of the first node has so many times less bandwidth.
    """

    kind: str = "switch"
    oversubscription: float = 1.0
    slow_port: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"no network {self.kind!r}; one of: {', '.join(KINDS)}")
        for name in ("oversubscription", "slow_port"):
            if not 1 <= getattr(self, name) <= PORTS:
                raise ValueError(f"{name} must be from 1 to {PORTS}, got {getattr(self, name)}")
        if self.oversubscription > 1 and self.kind != "fat tree":
            raise ValueError(f"a {self.kind} has no oversubscription")

    @property
    def name(self) -> str:
        """As `parse_network` reads it; a slow port is not named."""
        return self.kind + f":{self.oversubscription:g}" * (self.oversubscription > 1)


def parse_network(text: str) -> Network:
    """A network by its name: "switch", "fat tree:2" (oversubscribed), "dragonfly".

    Raises
    ------
    ValueError
    """
    kind, _, factor = text.replace("_", " ").strip().partition(":")
    try:
        return Network(kind, float(factor or 1))
    except ValueError as error:
        raise ValueError(f"network {text[:40]!r}: {error}") from None


class Cables:
    """The links of a machine's first nodes, and the way from any rank to another.

    Parameters
    ----------
    network : Network
    machine : Machine
    ranks : int
        They fill the nodes one after the other.

    Attributes
    ----------
    bandwidth : (links,) float64
        Bytes/s.
    """

    def __init__(self, network: Network, machine: Machine, ranks: int) -> None:
        self._network, self._per_node = network, machine.ranks_per_node
        self._inside, self._between = machine.links(ranks)
        nodes = -(-ranks // self._per_node)
        self._ports = min(self._between.nics, self._per_node)  # of a node
        self._all, self._ranks = nodes * self._ports, ranks
        one = self._between.bandwidth * self._between.nics / self._ports
        ports = np.full(self._all, one)
        ports[0] /= network.slow_port
        links = [np.full(2 * ranks, self._inside.bandwidth), ports, ports]
        self._first = 2 * (ranks + self._all)  # of those between switches
        if network.kind == "fat tree":
            self._leaves = -(-self._all // PORTS)
            self._spines = max(1, round(PORTS / network.oversubscription))
            links.append(np.full(2 * self._leaves * self._spines, one))
        elif network.kind == "dragonfly":
            links += self._dragonfly(one)
        self.bandwidth = np.concatenate(links)

    def routes(self, source: np.ndarray, to: np.ndarray) -> np.ndarray:
        """The links from some physical ranks to others, (n, most) int64; -1: no more."""
        nodes = source // self._per_node, to // self._per_node
        ports = [
            x * self._ports + rank % self._per_node % self._ports
            for x, rank in zip(nodes, (source, to))
        ]
        up, down = ports[0] + 2 * self._ranks, ports[1] + 2 * self._ranks + self._all
        ways = {"switch": lambda *_: [], "fat tree": self._over_spine, "dragonfly": self._over_groups}
        far = np.stack([up, *ways[self._network.kind](*ports), down], axis=1)
        near = np.full_like(far, -1)
        near[:, 0], near[:, 1] = source, to + self._ranks
        return np.where((nodes[0] == nodes[1])[:, None], near, far)

    def latency(self, source: np.ndarray, to: np.ndarray) -> np.ndarray:
        """Seconds until a message arrives, however short, (n,) float64."""
        near = source // self._per_node == to // self._per_node
        return np.where(near, self._inside.latency, self._between.latency)

    def _over_spine(self, port: np.ndarray, to: np.ndarray) -> list[np.ndarray]:
        leaf, other, spine = port // PORTS, to // PORTS, to % self._spines
        up = self._first + leaf * self._spines + spine
        down = self._first + (self._leaves + other) * self._spines + spine
        return [np.where(leaf == other, -1, x) for x in (up, down)]

    def _dragonfly(self, one: float) -> list[np.ndarray]:
        """Bandwidths in the least balanced dragonfly (Kim et al. 2008) that has all ports.

        A router has p ports and p cables to other groups, a group 2p routers, each with a cable
        to each other.  The cables of a group are divided evenly among the groups that there are;
        those of two groups count as one link, as messages spread over them.
        """
        p = 1
        while 2 * p * p * (2 * p * p + 1) < self._all:
            p += 1
        self._p, self._routers = p, 2 * p
        groups = self._groups = -(-self._all // (2 * p * p))
        inside = np.full(groups * (2 * p) ** 2, one)
        between = np.full(groups**2, one * 2 * p * p / max(1, groups - 1))
        return [inside, between]

    def _over_groups(self, port: np.ndarray, to: np.ndarray) -> list[np.ndarray]:
        routers = self._routers
        here, there = port // self._p, to // self._p
        group, other = here // routers, there // routers
        same = group == other
        # The routers that hold the cables between two groups: one of them, by the port.
        way_out = (to + other) % routers
        way_in = (to + group) % routers

        def local(group: np.ndarray, one: np.ndarray, other: np.ndarray) -> np.ndarray:
            link = self._first + (group * routers + one) * routers + other
            return np.where(one == other, -1, link)

        first = self._first + self._groups * routers**2
        across = np.where(same, -1, first + group * self._groups + other)
        out = local(group, here % routers, np.where(same, there % routers, way_out))
        into = np.where(same, -1, local(other, way_in, there % routers))
        return [out, across, into]


