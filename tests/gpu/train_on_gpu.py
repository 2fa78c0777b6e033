"""Trains two ranks of gradsync.torch on GPU 0, and one process on the same data: train_on_gpu.py
BUNDLE. Exit status 0 if they end with the same parameters, 77 without PyTorch or its GPU.
"""

import os
import pathlib
import subprocess
import sys
import tempfile


def train(bundle):
    sys.path.insert(0, str(bundle / "python"))
    try:
        import torch
    except ImportError as error:
        print(f"no PyTorch: {error}")
        return 77
    if not torch.cuda.is_available():
        print("PyTorch sees no GPU")
        return 77
    rank = os.environ.get("RANK")
    if rank is None:
        return train_ranks(bundle)
    import gradsync.torch

    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 8))
    plain = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 8))
    plain.load_state_dict(model.state_dict())
    model, plain = model.cuda(), plain.cuda()
    wrapped = gradsync.torch.DistributedDataParallel(model)
    for step in range(20):
        inputs = torch.randn(2, 32, 64, generator=torch.Generator().manual_seed(step)).cuda()
        for module, batch in ((wrapped, inputs[int(rank)]), (plain, inputs.flatten(0, 1))):
            module.zero_grad()
            module(batch).square().mean().backward()
        with torch.no_grad():
            for ours, theirs in zip(model.parameters(), plain.parameters()):
                ours -= 0.05 * ours.grad
                theirs -= 0.05 * theirs.grad
    difference = max(
        float((ours - theirs).detach().abs().max())
        for ours, theirs in zip(model.parameters(), plain.parameters())
    )
    print(f"PyTorch {torch.__version__}: largest difference to one process {difference:.1e}")
    sys.stdout.flush()
    return 0 if difference < 1e-4 else 1


def train_ranks(bundle):
    with tempfile.TemporaryDirectory() as folder:
        socket = os.path.join(folder, "gradsyncd.sock")
        logs = os.environ.get("GRADSYNC_TEST_DAEMON_LOGS", folder)
        # Not into the output: its last line is the answer.
        with open(os.path.join(logs, "gradsyncd.log"), "wb") as log:
            daemon = subprocess.Popen([bundle / "bin/gradsyncd", f"--socket={socket}"], stderr=log)
        variables = {**os.environ, "GRADSYNC_SOCKET": socket, "WORLD_SIZE": "2"}
        variables.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
        try:
            ranks = [
                subprocess.Popen(
                    [sys.executable, os.path.realpath(__file__), str(bundle)],
                    env={**variables, "RANK": str(rank), "LOCAL_RANK": "0"},
                )
                for rank in range(2)
            ]
            return max(abs(rank.wait()) for rank in ranks)
        finally:
            daemon.kill()
            daemon.wait()


if __name__ == "__main__":
    sys.exit(train(pathlib.Path(sys.argv[1])))
