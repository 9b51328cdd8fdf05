"""Ray, and only here: placement and actors around the plain classes. It wraps; it decides nothing."""

from slimelite.cluster.cluster import Cluster, ClusterError, launch

__all__ = ["Cluster", "ClusterError", "launch"]
