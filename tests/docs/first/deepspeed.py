"""What a reader of the DeepSpeed example has already: a launcher's variables, a model, an
optimizer, a configuration and batches.
"""

import os
import socket

os.environ["DS_ACCELERATOR"] = "cpu"
with socket.create_server(("127.0.0.1", 0)) as free:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}

import deepspeed  # noqa: E402
import torch  # noqa: E402

# compiled at run time, only for inference
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-4)
steps, loader = 2, [torch.randn(4, 8) for _ in range(2)]
batches = loader
config = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 1_000_000},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}
