"""Statistics of causal patterns straight from queries and keys.

Every function has two forms. The torch form goes through the rows in blocks of bounded size and works on every device;
it is the definition. The Triton form computes tiles of the pattern inside the chip and sums them there, so that no
[query, key] block is ever written to memory; it is taken on NVIDIA GPUs that can run it (`choice.can_fuse`). It never
waits for the device.
"""

from attnprobe.kernels.columns import ColumnSums, column_sums
from attnprobe.kernels.sketch import sketch_rows

__all__ = ["ColumnSums", "column_sums", "sketch_rows"]
