"""Small models, and how tests train each."""

import contextlib

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

# So small that each of these models has several buckets.
SMALL_BUCKETS = {"bucket_cap_mb": 0.002, "first_bucket_cap_mb": 0.0005}


class Mlp(nn.Module):
    def __init__(self, inputs=6, hidden=24, outputs=3):
        super().__init__()
        self.first = nn.Linear(inputs, hidden)
        self.second = nn.Linear(hidden, hidden)
        self.third = nn.Linear(hidden, outputs)

    def forward(self, x):
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Cnn(nn.Module):
    """With batch normalization, in the memory format channels_last."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.first_norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, stride=2)
        self.second_norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 3)
        self.to(memory_format=torch.channels_last)

    def forward(self, x):
        x = x.contiguous(memory_format=torch.channels_last)
        x = F.relu(self.first_norm(self.first(x)))
        x = F.relu(self.second_norm(self.second(x)))
        return self.head(x.mean((2, 3)))


class Transformer(nn.Module):
    """Predicts the next token; input and output embeddings are one weight."""

    TOKENS = 17

    def __init__(self, width=16):
        super().__init__()
        self.embedding = nn.Embedding(self.TOKENS, width)
        self.position = nn.Parameter(torch.randn(5, width) * 0.1)
        self.block = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, self.TOKENS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.block(self.embedding(tokens) * 0.3 + self.position))


class Branching(nn.Module):
    """Has a branch. In a step all, some or no ranks use it."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(6, 12)
        self.branch = nn.Linear(12, 12)
        self.head = nn.Linear(12, 3)

    def forward(self, x, use_branch):
        x = torch.tanh(self.trunk(x))
        if use_branch:
            x = x + torch.tanh(self.branch(x))
        return self.head(x)


class Frozen(Mlp):
    """The second layer is not trained."""

    def __init__(self):
        super().__init__()
        self.second.requires_grad_(False)


class Checkpointed(nn.Module):
    """The middle blocks are computed again in the backward pass."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.use_reentrant = use_reentrant
        self.stem = nn.Linear(6, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)) for _ in range(2)
        )
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.head(x)


class Lesson:
    """A model, its data and its training. Subclasses override what differs."""

    name = ""
    options = {}  # of the wrapper
    learning_rate = 0.05

    def build(self):
        """Modules by name; each is wrapped separately."""
        raise NotImplementedError

    def batch(self, random, rank, step):
        return torch.randn(4, 6, generator=random), torch.randint(3, (4,), generator=random)

    def loss(self, modules, batch):
        inputs, targets = batch
        return F.cross_entropy(modules["model"](inputs).float(), targets)

    def optimizer(self, module, rate):
        return torch.optim.SGD(module.parameters(), lr=rate, momentum=0.9)

    def step(self, modules, optimizers, batches):
        """One optimizer step over `batches`; all but the last only accumulate."""
        for optimizer in optimizers.values():
            optimizer.zero_grad(set_to_none=True)
        for index, batch in enumerate(batches):
            with accumulating(modules, index + 1 < len(batches)):
                (self.loss(modules, batch) / len(batches)).backward()
        for optimizer in optimizers.values():
            optimizer.step()


@contextlib.contextmanager
def accumulating(modules, on):
    with contextlib.ExitStack() as stack:
        for module in modules.values():
            if on and hasattr(module, "no_sync"):
                stack.enter_context(module.no_sync())
        yield


class MlpLesson(Lesson):
    name = "mlp"

    def build(self):
        return {"model": Mlp()}


class CnnLesson(Lesson):
    name = "cnn"

    def build(self):
        return {"model": Cnn()}

    def batch(self, random, rank, step):
        images = torch.randn(4, 3, 8, 8, generator=random)
        return images, torch.randint(3, (4,), generator=random)


class TransformerLesson(Lesson):
    name = "transformer"

    def build(self):
        return {"model": Transformer()}

    def batch(self, random, rank, step):
        tokens = torch.randint(Transformer.TOKENS, (4, 6), generator=random)
        return tokens[:, :-1], tokens[:, 1:]

    def loss(self, modules, batch):
        inputs, targets = batch
        return F.cross_entropy(modules["model"](inputs).float().flatten(0, 1), targets.flatten())


class BranchingLesson(Lesson):
    name = "branching"
    options = {"find_unused_parameters": True}

    def build(self):
        return {"model": Branching()}

    def batch(self, random, rank, step):
        inputs, targets = super().batch(random, rank, step)
        return inputs, targets, step % 3 != 2 and (rank + step) % 2 == 0

    def optimizer(self, module, rate):
        return torch.optim.SGD(module.parameters(), lr=rate)

    def loss(self, modules, batch):
        inputs, targets, use_branch = batch
        return F.cross_entropy(modules["model"](inputs, use_branch).float(), targets)


class FrozenLesson(Lesson):
    name = "frozen"

    def build(self):
        return {"model": Frozen()}

    def optimizer(self, module, rate):
        trained = [p for p in module.parameters() if p.requires_grad]
        return torch.optim.SGD(trained, lr=rate, momentum=0.9)


class CheckpointLesson(Lesson):
    name = "checkpoint"
    use_reentrant = False

    def build(self):
        return {"model": Checkpointed(self.use_reentrant)}


class ReentrantCheckpointLesson(CheckpointLesson):
    name = "checkpoint-reentrant"
    use_reentrant = True

    def batch(self, random, rank, step):
        inputs, targets = super().batch(random, rank, step)
        return inputs.requires_grad_(), targets


class GanLesson(Lesson):
    """Generator and discriminator, each wrapped; the generator's backward passes through both."""

    name = "gan"

    def build(self):
        return {"generator": Mlp(4, 16, 6), "discriminator": Mlp(6, 16, 1)}

    def batch(self, random, rank, step):
        real = torch.randn(4, 6, generator=random) + rank
        return real, torch.randn(4, 4, generator=random)

    def step(self, modules, optimizers, batches):
        generator, discriminator = modules["generator"], modules["discriminator"]

        def judged(samples, verdict):
            score = discriminator(samples).float()
            return F.binary_cross_entropy_with_logits(score, torch.full_like(score, verdict))

        optimizers["discriminator"].zero_grad(set_to_none=True)
        for index, (real, noise) in enumerate(batches):
            with accumulating(modules, index + 1 < len(batches)):
                with torch.no_grad():
                    fake = generator(noise)
                (judged(real, 1.0) + judged(fake, 0.0)).backward()
        optimizers["discriminator"].step()

        optimizers["generator"].zero_grad(set_to_none=True)
        for index, (_, noise) in enumerate(batches):
            with accumulating(modules, index + 1 < len(batches)):
                judged(generator(noise), 1.0).backward()
        optimizers["generator"].step()


LESSONS = [
    MlpLesson(),
    CnnLesson(),
    TransformerLesson(),
    BranchingLesson(),
    FrozenLesson(),
    CheckpointLesson(),
    ReentrantCheckpointLesson(),
    GanLesson(),
]
