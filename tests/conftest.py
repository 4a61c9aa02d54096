"""One thread for every test: on a small or busy machine two of torch's threads wait for one another."""

import torch

torch.set_num_threads(1)
