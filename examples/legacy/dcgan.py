"""A DCGAN of 2019 with Apex: two models, two optimizers, three losses with a scale each. It does not mention halfstep.

The data is made here: 8x8 pictures with one bright stripe. Run it with ``halfstep run examples/legacy/dcgan.py``.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn as nn
import torch.optim as optim
from apex import amp

parser = argparse.ArgumentParser()
parser.add_argument("--batchSize", type=int, default=16)
parser.add_argument("--nz", type=int, default=8, help="size of the latent vector")
parser.add_argument("--niter", type=int, default=30, help="number of batches")
parser.add_argument("--lr", type=float, default=0.002)
parser.add_argument("--beta1", type=float, default=0.5)
parser.add_argument("--opt_level", default="O1", help="amp opt_level")
opt = parser.parse_args()
print(opt)

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def weights_init(m: nn.Module) -> None:
    """Initialise as the paper does."""
    if isinstance(m, (nn.Conv2d, nn.ConvTranspose2d)):
        m.weight.data.normal_(0.0, 0.02)
    elif isinstance(m, nn.BatchNorm2d):
        m.weight.data.normal_(1.0, 0.02)
        m.bias.data.fill_(0)


netG = nn.Sequential(
    nn.ConvTranspose2d(opt.nz, 16, 4, 1, 0, bias=False),
    nn.BatchNorm2d(16),
    nn.ReLU(True),
    nn.ConvTranspose2d(16, 1, 4, 2, 1, bias=False),
    nn.Tanh(),
).to(device)
netG.apply(weights_init)

netD = nn.Sequential(
    nn.Conv2d(1, 16, 4, 2, 1, bias=False),
    nn.BatchNorm2d(16),
    nn.LeakyReLU(0.2, inplace=True),
    nn.Conv2d(16, 1, 4, 1, 0, bias=False),
    nn.Flatten(0),
).to(device)
netD.apply(weights_init)

criterion = nn.BCEWithLogitsLoss()
optimizerD = optim.Adam(netD.parameters(), lr=opt.lr, betas=(opt.beta1, 0.999))
optimizerG = optim.Adam(netG.parameters(), lr=opt.lr, betas=(opt.beta1, 0.999))

[netD, netG], [optimizerD, optimizerG] = amp.initialize(
    [netD, netG], [optimizerD, optimizerG], opt_level=opt.opt_level, num_losses=3
)

for i in range(opt.niter):
    # the discriminator: real pictures, then made ones
    netD.zero_grad()
    real = -torch.ones(opt.batchSize, 1, 8, 8, device=device)
    real[torch.arange(opt.batchSize), :, torch.randint(0, 8, (opt.batchSize,))] = 1.0
    output = netD(real)
    errD_real = criterion(output, torch.ones_like(output))
    with amp.scale_loss(errD_real, optimizerD, loss_id=0) as errD_real_scaled:
        errD_real_scaled.backward()

    noise = torch.randn(opt.batchSize, opt.nz, 1, 1, device=device)
    fake = netG(noise)
    output = netD(fake.detach())
    errD_fake = criterion(output, torch.zeros_like(output))
    with amp.scale_loss(errD_fake, optimizerD, loss_id=1) as errD_fake_scaled:
        errD_fake_scaled.backward()
    errD = errD_real + errD_fake
    optimizerD.step()

    # the generator
    netG.zero_grad()
    output = netD(fake)
    errG = criterion(output, torch.ones_like(output))
    with amp.scale_loss(errG, optimizerG, loss_id=2) as errG_scaled:
        errG_scaled.backward()
    optimizerG.step()

    if i % 10 == 0 or i == opt.niter - 1:
        print(f"[{i}/{opt.niter}] Loss_D: {errD.item():.4f} Loss_G: {errG.item():.4f}")

print("scales:", [state["loss_scale"] for state in amp.state_dict().values()])
