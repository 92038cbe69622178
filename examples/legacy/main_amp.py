"""A training script of 2019 for image classification, as many wrote it for Apex: it does not mention halfstep.

Options come as text from argparse and go to ``amp.initialize`` as they are. The data is made here: 8x8 pictures of four
classes. Run it with ``halfstep run examples/legacy/main_amp.py --opt-level O2``.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.nn as nn
import torch.nn.functional as F
from apex import amp
from apex.parallel import DistributedDataParallel as DDP
from apex.parallel import convert_syncbn_model


class Block(nn.Module):
    """Two convolutions with BatchNorm around a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return features of `x`."""
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += self.shortcut(x)
        return F.relu(y)


def resnet(width: int, classes: int) -> nn.Module:
    """Return a small residual network."""
    return nn.Sequential(
        Block(3, width),
        Block(width, 2 * width, stride=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * width, classes),
    )


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="image classification with Apex")
    parser.add_argument("--epochs", default=2, type=int)
    parser.add_argument("--iterations", default=12, type=int, help="batches in an epoch")
    parser.add_argument("-b", "--batch-size", default=32, type=int)
    parser.add_argument("--lr", default=0.1, type=float)
    parser.add_argument("--momentum", default=0.9, type=float)
    parser.add_argument("--weight-decay", "--wd", default=1e-4, type=float)
    parser.add_argument("--resume", default="", type=str)
    parser.add_argument("--save", default="", type=str)
    parser.add_argument("--local_rank", default=0, type=int)
    parser.add_argument("--sync_bn", action="store_true")
    parser.add_argument("--opt-level", type=str)
    parser.add_argument("--keep-batchnorm-fp32", type=str, default=None)
    parser.add_argument("--loss-scale", type=str, default=None)
    return parser.parse_args()


def batches(count: int, size: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return noisy pictures of four classes: each has its own bright corner."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        target = torch.randint(0, 4, (size,), generator=generator)
        pictures = torch.randn(size, 3, 8, 8, generator=generator)
        for row, label in enumerate(target.tolist()):
            top, left = 4 * (label // 2), 4 * (label % 2)
            pictures[row, :, top : top + 4, left : left + 4] += 1.0
        made.append((pictures, target))
    return made


def accuracy(output: torch.Tensor, target: torch.Tensor) -> float:
    """Return the share of right answers in percent."""
    return 100.0 * float((output.argmax(1) == target).float().mean())


def main() -> None:
    """Train, validate, save."""
    args = parse()
    print(f"opt_level = {args.opt_level}")
    print(f"keep_batchnorm_fp32 = {args.keep_batchnorm_fp32} {type(args.keep_batchnorm_fp32)}")
    print(f"loss_scale = {args.loss_scale} {type(args.loss_scale)}")
    distributed = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if distributed:
        torch.distributed.init_process_group(backend="gloo", init_method="env://")
    torch.manual_seed(0)
    device = torch.device("cuda", args.local_rank) if torch.cuda.is_available() else torch.device("cpu")

    model = resnet(8, 4)
    if args.sync_bn:
        print("using apex synced BN")
        model = convert_syncbn_model(model)
    model = model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=args.momentum, weight_decay=args.weight_decay)
    model, optimizer = amp.initialize(
        model,
        optimizer,
        opt_level=args.opt_level,
        keep_batchnorm_fp32=args.keep_batchnorm_fp32,
        loss_scale=args.loss_scale,
    )
    if distributed:
        model = DDP(model, delay_allreduce=True)
    criterion = nn.CrossEntropyLoss().to(device)

    start = 0
    if args.resume:
        checkpoint = torch.load(args.resume)
        start = checkpoint["epoch"]
        model.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        amp.load_state_dict(checkpoint["amp"])

    for epoch in range(start, args.epochs):
        adjust_learning_rate(optimizer, epoch, args)
        train(batches(args.iterations, args.batch_size, seed=epoch), model, criterion, optimizer, epoch, device)
        prec1 = validate(batches(4, args.batch_size, seed=1000), model, criterion, device)
        print(f" * Epoch {epoch} Prec@1 {prec1:.3f}")
        if args.save and args.local_rank == 0:
            checkpoint = {
                "epoch": epoch + 1,
                "state_dict": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "amp": amp.state_dict(),
            }
            torch.save(checkpoint, args.save)


def adjust_learning_rate(optimizer: torch.optim.Optimizer, epoch: int, args: argparse.Namespace) -> None:
    """Divide the learning rate by 10 in the last third."""
    for group in optimizer.param_groups:
        group["lr"] = args.lr * (0.1 if 3 * epoch >= 2 * args.epochs else 1.0)


def train(
    loader: list[tuple[torch.Tensor, torch.Tensor]],
    model: nn.Module,
    criterion: nn.Module,
    optimizer: torch.optim.Optimizer,
    epoch: int,
    device: torch.device,
) -> None:
    """Train one epoch."""
    model.train()
    for i, (pictures, target) in enumerate(loader):
        pictures, target = pictures.to(device), target.to(device)
        output = model(pictures)
        loss = criterion(output, target)

        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()

        if i % 4 == 0:
            prec1 = accuracy(output.detach(), target)
            print(f"Epoch: [{epoch}][{i}/{len(loader)}]\tLoss {loss.item():.6f}\tPrec@1 {prec1:.3f}")


def validate(
    loader: list[tuple[torch.Tensor, torch.Tensor]], model: nn.Module, criterion: nn.Module, device: torch.device
) -> float:
    """Return the mean accuracy."""
    model.eval()
    total = 0.0
    for pictures, target in loader:
        with torch.no_grad():
            total += accuracy(model(pictures.to(device)), target.to(device))
    return total / len(loader)


if __name__ == "__main__":
    main()
