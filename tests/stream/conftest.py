"""One thread: two on a busy two-core machine are many times slower on tensors this small."""

import torch

torch.set_num_threads(1)
