"""The edge to model libraries. A host says where attention is and shows what passes there; it computes nothing."""

from attnprobe.hosts.base import Attention, Call, Generation, HeadOutputs, Host, Listener, Site
from attnprobe.hosts.find import host_of

__all__ = ["Attention", "Call", "Generation", "HeadOutputs", "Host", "Listener", "Site", "host_of"]
