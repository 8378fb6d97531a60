"""Set-up of every test run."""

import torch

# The models are tiny: a second thread costs more in hand-overs than it brings.
torch.set_num_threads(1)
