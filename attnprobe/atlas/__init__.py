"""A map of a model's heads: what each does while it reads texts, and how one diagnostic goes with another.

- `texts`: what is read;
- `reading`: the values of every head, text by text, kept in a folder that a later call goes on with;
- `atlas`: means over texts, and the entry point `head_atlas`;
- `correlation`: rank correlations over heads;
- `roles`: names for heads by stated thresholds;
- `report`: tables.
"""

from attnprobe.atlas.atlas import HeadAtlas, head_atlas
from attnprobe.atlas.reading import default_diagnostics
from attnprobe.atlas.roles import RoleThresholds

__all__ = ["HeadAtlas", "RoleThresholds", "default_diagnostics", "head_atlas"]
