"""The example under torchrun on two nodes, as a person would run it."""

import importlib.util
import os
import subprocess

import pytest
from daemon_process import DaemonProcess
from ranks import free_port
from virtual_network import VirtualNetwork

torch = pytest.importorskip("torch")  # the example trains with it

from digits_training import EXAMPLE, TORCHRUN, assert_close, jobs, train  # noqa: E402


class TwoNodes:
    """Two nodes with a daemon each, until close()."""

    def __init__(self):
        self._network = VirtualNetwork(2)
        print("network:", self._network.description)
        self._nodes = self._network.nodes
        if self._network.real:
            # The daemons' default port is free there, so MASTER_ADDR is enough. There is no name
            # server: nothing should wait for one.
            port = ""
            self._environment = {
                "GLOO_SOCKET_IFNAME": "eth0",
                "RES_OPTIONS": "timeout:1 attempts:1",
            }
        else:
            port = f":{free_port()}"
            self._environment = {"GRADSYNC_COORDINATOR": self._nodes[0]["address"] + port}
        self.daemons = [
            DaemonProcess(
                f"--peer_listen={node['address']}{port}",
                "--peer_plain_text=true",
                f"--node_name=node-{number}",
                command_prefix=node["command_prefix"],
            )
            for number, node in enumerate(self._nodes)
        ]

    def torchrun(self, *arguments, ranks):
        """Runs the example with `ranks` on each node; returns what it printed on both."""
        endpoint = f"{self._nodes[0]['address']}:{free_port()}"
        agents = [
            subprocess.Popen(
                [*node["command_prefix"], *TORCHRUN, "--nnodes=2", f"--nproc_per_node={ranks}"]
                + ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=digits"]
                # A real node finds this out by its own name.
                + [f"--rdzv-conf=is_host={int(number == 0)}", f"--local-addr={node['address']}"]
                + [EXAMPLE, *arguments],
                env={
                    **os.environ,
                    **self._environment,
                    "GRADSYNC_SOCKET": daemon.socket,
                    "OMP_NUM_THREADS": "1",
                },
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for number, (node, daemon) in enumerate(zip(self._nodes, self.daemons))
        ]
        try:
            said = [agent.communicate(timeout=200)[0] for agent in agents]
        finally:
            for agent in agents:
                agent.kill()
        assert [agent.returncode for agent in agents] == [0, 0], "\n".join(said)
        return "".join(said)

    def close(self):
        for daemon in self.daemons:
            daemon.close()
        self._network.close()


@pytest.fixture
def nodes():
    two = TwoNodes()
    yield two
    two.close()


def train_alone(steps, nodes, ranks):
    """Final parameters of one process that adds what the ranks add: per node, then over nodes."""
    specification = importlib.util.spec_from_file_location("train_digits", EXAMPLE)
    example = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(example)
    torch.set_num_threads(1)
    images, digits = example.load(example._DATA)
    learned = torch.arange(len(images)) % example._HELD_OUT != 0
    images, digits = images[learned], digits[learned]
    module = example.make_module()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    shuffle = torch.Generator().manual_seed(2)
    world_size = nodes * ranks
    for _ in range(steps):
        batch = torch.randint(len(images), (example._BATCH,), generator=shuffle)
        gradients, buffers = [], []
        before = [buffer.clone() for buffer in module.buffers()]
        for rank in range(world_size):
            # Every rank has its own buffers, and gets rank 0's after the step.
            for buffer, value in zip(module.buffers(), before):
                buffer.copy_(value)
            shard = batch[rank::world_size]
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(module(images[shard]), digits[shard]).backward()
            gradients.append([parameter.grad for parameter in module.parameters()])
            buffers.append([buffer.clone() for buffer in module.buffers()])
        for buffer, value in zip(module.buffers(), buffers[0]):
            buffer.copy_(value)
        for parameter, of_rank in zip(module.parameters(), zip(*gradients)):
            firsts = range(0, world_size, ranks)
            of_node = [sum(of_rank[k + 1 : k + ranks], of_rank[k]) for k in firsts]
            parameter.grad = sum(of_node[1:], of_node[0]) / world_size
        optimizer.step()
    return module.state_dict()


def test_two_ranks_on_each_end_as_one_process(nodes, tmp_path):
    # There is no comparison with PyTorch's wrapper: it adds four gradients in another order. A ReLU
    # that this rounding flips makes a difference of 1e-3 within 60 steps.
    end = train(
        lambda *arguments: nodes.torchrun(*arguments, ranks=2), "gradsync", tmp_path / "end", 4
    )
    assert_close(end, train_alone(200, nodes=2, ranks=2))
    # The job was one, with the daemon of rank 0's node.
    (job,) = jobs(nodes.daemons[0])
    assert [int(layout["steps_complete"]) for layout in job["layouts"]] == [200]
    assert jobs(nodes.daemons[1]) == []
