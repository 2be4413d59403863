"""FSDP2 with a rank that has only text and one that has only images, against one rank that has it all."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from evenpack.scheduler import ProcessGroups
from evenpack.scheduler.testing import run_ranks

from ...scheduler.helpers import VISION, image_sample, open_scheduler, text_sample
from .tiny import model_of

PER_RANK, STEPS = 4, 3


def rows(rank):
    """Return a rank's samples: text of very different lengths, or images of different sizes."""
    if rank == 0:
        return [text_sample(5 + 9 * (index % 5), f"text-{index}") for index in range(PER_RANK * STEPS)]
    sizes = [2 + 2 * (index % 4) for index in range(PER_RANK * STEPS)]
    return [image_sample([(1, 4, size)], f"image-{size}-{index}", seed=index) for index, size in enumerate(sizes)]


def train(model, source, per_rank):
    """Train a few steps and return the losses of the group."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    with open_scheduler(source, adapter=VISION, samples_per_step=per_rank, max_tokens=48, sync="microbatch") as scheduler:
        for step in scheduler:
            total = torch.zeros(())
            for batch in step:
                with step.sync_on_last(model, batch):
                    loss = step.loss(model(**batch.forward_kwargs(model)).logits, batch)
                    loss.backward()
                total += loss.detach() / dist.get_world_size()
            optimizer.step()
            optimizer.zero_grad()
            dist.all_reduce(total)
            losses.append(total.item())
    return losses


def test_loss_equals_that_of_one_rank():
    def sharded(rank, num_ranks):
        mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("dp",))
        assert ProcessGroups.from_mesh(mesh).num_ranks == num_ranks
        model = model_of()
        for part in (model.model.visual, *model.model.language_model.layers, model):
            fully_shard(part, mesh=mesh)
        return train(model, rows(rank), PER_RANK)

    def whole(rank, num_ranks):
        # Step by step what both ranks bring.
        starts = range(0, PER_RANK * STEPS, PER_RANK)
        everything = [row for at in starts for part in (rows(0), rows(1)) for row in part[at : at + PER_RANK]]
        return train(model_of(), everything, 2 * PER_RANK)

    (expected,) = run_ranks(whole, 1, backend="gloo")
    for losses in run_ranks(sharded, 2, backend="gloo"):
        assert len(losses) == STEPS
        assert max(abs(loss / other - 1) for loss, other in zip(losses, expected, strict=True)) < 1e-5
