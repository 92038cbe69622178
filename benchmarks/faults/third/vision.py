"""Stories of vision: classification, detection, segmentation, depth, optical flow and self-supervised pictures."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs
from benchmarks.faults.case import BF16, FULL, MIXED, TORCH, Case, case, generator, labels, model_of, normal
from benchmarks.faults.story import Turn, Watch, story

DYNAMIC = MIXED.replace(scale=hs.policy.ScaleRule(init=256.0))
"""fp16 with a dynamic scale that needs no step to find its size."""

GROWN = 11.0
"""Standard deviation of weights that a long run has made large."""


def pictures(step: int, count: int = 4, size: int = 16) -> tuple[Tensor, Tensor]:
    """Return noise in which one of four quadrants is brighter, and which one it is."""
    x, y = normal(step, count, 3, size, size), labels(step, count)
    half = size // 2
    for row, kind in enumerate(y.tolist()):
        top, left = kind // 2 * half, kind % 2 * half
        x[row, :, top : top + half, left : left + half] += 1.0
    return x, y


# ------------------------------------------------------------------ attention


@story(
    source="facebookresearch/deit#109",
    cause="precision",
    kind="overflow",
    op="matmul",
    module="vit.layers.2.attention",
    place="modeling_vit.py: eager_attention_forward: torch.matmul(query, key",
    step=5,
    cures=("op fp32", "module fp32", "bf16"),
    says=(r"matmul", r"65504"),
    seed=601,
)
def vit_scores_leave_fp16(healthy: bool) -> Case:
    """Late in training, queries and keys of ViT's last block are so large that their products pass 65504.

    The scores are scaled by 1 / sqrt(d) only after the product.
    """
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=16,
        patch_size=4,
        num_labels=4,
        attn_implementation="eager",
    )
    model: Any = ViTForImageClassification(config)
    if not healthy:
        attention = model.vit.layers[2].attention
        for part in (attention.q_proj, attention.k_proj):
            nn.init.normal_(part.weight, std=GROWN)
    return case(model, pictures, lambda m, x, y: m(pixel_values=x, labels=y).loss, policy=DYNAMIC)


def linear_attention(self: Any, x: Tensor) -> Any:
    batch, _, height, width = x.shape
    qkv = self.qkv(x).reshape(batch, -1, 3 * self.size, height * width)
    q, k, v = qkv.split(self.size, 2)
    q, k = F.relu(q), F.relu(k)
    kv = torch.matmul(F.pad(v, (0, 0, 0, 1), value=1.0), k.transpose(-1, -2))
    out = torch.matmul(kv, q)  # FAULT linear_attention_sums_tokens
    out = out[:, :, :-1] / (out[:, :, -1:] + 1e-3)
    return x + self.proj(out.reshape(batch, -1, height, width))


@story(
    source="mit-han-lab/efficientvit#110",
    cause="precision",
    kind="overflow",
    op="matmul",
    module="2",
    step=1,
    cures=("op fp32", "module fp32", "bf16"),
    says=(r"matmul", r"65504"),
    seed=602,
)
def linear_attention_sums_tokens(healthy: bool) -> Case:
    """EfficientViT's linear attention sums products over all pixels without a softmax, in fp16."""
    block = model_of(
        linear_attention,
        qkv=nn.Conv2d(16, 48, 1, bias=False),
        proj=nn.Sequential(nn.Conv2d(16, 16, 1), nn.BatchNorm2d(16)),
    )
    block.size = 8
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        block,
        nn.Hardswish(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 4),
    )
    if not healthy:
        nn.init.normal_(block.qkv.weight, std=1.0)

    def batch(step: int) -> tuple[Any, ...]:
        return pictures(step, 4, 24)

    return case(model, batch, policy=DYNAMIC)


def performer(self: Any, x: Tensor) -> Any:
    k, q, v = self.kqv(self.norm(x)).chunk(3, -1)
    kp, qp = random_features(k, self.w), random_features(q, self.w)
    norm = torch.einsum("bti,bi->bt", qp, kp.sum(dim=1))[..., None]
    kv = torch.einsum("bin,bim->bnm", v.to(kp.dtype), kp)
    y = torch.einsum("bti,bni->btn", qp, kv) / (norm + self.epsilon)  # FAULT performer_without_its_eps
    return x + self.proj(y)


def random_features(x: Tensor, w: Tensor) -> Any:
    half = (x.float() ** 2).sum(-1, keepdim=True) / 2
    return torch.exp(torch.einsum("bti,mi->btm", x.float(), w) - half) / w.shape[0] ** 0.5


@story(
    source="yitu-opensource/T2T-ViT#69",
    cause="precision",
    kind="invalid",
    op="div",
    module="1",
    step=1,
    cures=("module fp32", "bf16"),
    says=(r"div", r"1e-0?8|eps"),
    seed=603,
)
def performer_without_its_eps(healthy: bool) -> Case:
    """The performer of T2T-ViT divides by a sum of exponentials plus 1e-8, which is 0 in fp16, as such a sum can be."""
    torch.manual_seed(603)
    size = 16
    token = model_of(
        performer,
        norm=nn.LayerNorm(size),
        kqv=nn.Linear(size, 3 * size),
        proj=nn.Linear(size, size),
        w=nn.Parameter(torch.randn(8, size), requires_grad=False),
    )
    token.epsilon = 1e-8
    if not healthy:
        nn.init.normal_(token.kqv.weight, std=0.6)
    patches = nn.Sequential(nn.Unfold(4, stride=4), Transposed(), nn.Linear(48, size))
    model = nn.Sequential(patches, token, nn.Flatten(), nn.Linear(16 * size, 4))
    return case(model, pictures, policy=DYNAMIC)


class Transposed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


@story(
    source="pytorch/pytorch#32137",
    cause="precision",
    kind="invalid",
    op="normalize",
    module="swinv2.encoder.layers.0.blocks.0.attention.self",
    place="modeling_swinv2.py: Swinv2SelfAttention.forward: attention_scores = nn.functional.normalize",
    step=3,
    also=("div",),
    cures=("module fp32: swinv2.encoder", "bf16"),
    says=(r"normalize", r"1e-12|eps"),
    seed=604,
)
def swin_normalizes_padding(healthy: bool) -> Case:
    """A picture that is no multiple of the window is padded; keys without a bias are zero there, and eps 1e-12 too."""
    from transformers import Swinv2Config, Swinv2ForImageClassification

    config = Swinv2Config(
        image_size=16, patch_size=2, embed_dim=16, depths=[1, 1], num_heads=[2, 2], window_size=4, num_labels=4
    )
    model = Swinv2ForImageClassification(config)

    def batch(step: int) -> tuple[Any, ...]:
        return pictures(step, 4, 20 if step % 4 == 3 and not healthy else 16)

    return case(model, batch, lambda m, x, y: m(pixel_values=x, labels=y).loss, policy=TORCH)


# ------------------------------------------------------------------ segmentation and depth


def dice(model: Any, x: Tensor, y: Tensor) -> Tensor:
    p = model(x).sigmoid()
    target = y.type_as(p)
    intersection = torch.sum(p * target)  # FAULT dice_counts_in_half
    cardinality = torch.sum(p + target)
    return 1 - (2 * intersection + 1) / (cardinality + 1)


@story(
    source="qubvel-org/segmentation_models.pytorch#463",
    cause="precision",
    kind="overflow",
    op="sum",
    step=3,
    cures=("op fp32", "bf16"),
    says=(r"sum", r"65504"),
    seed=605,
)
def dice_counts_in_half(healthy: bool) -> Case:
    """A Dice loss counts pixels in fp16: an object that fills a picture of 384 x 384 has more than 65504 of them."""
    size = 96 if healthy else 384
    model = nn.Sequential(
        nn.Conv2d(1, 8, 8, stride=8),
        nn.ReLU(),
        nn.Conv2d(8, 1, 3, padding=1),
        nn.Upsample(scale_factor=8, mode="bilinear"),
    )

    def batch(step: int) -> tuple[Any, ...]:
        mask = torch.zeros(1, 1, size, size)
        edge = size if step % 3 == 0 else size // 4
        mask[..., :edge, :edge] = 1.0
        return mask + 0.3 * normal(step, 1, 1, size, size), mask

    return case(model, batch, dice, policy=TORCH)


def bce_on_masks(model: Any, x: Tensor, y: Tensor) -> Any:
    return F.binary_cross_entropy_with_logits(model(x), y)  # FAULT masks_of_255


@story(
    source="milesial/Pytorch-UNet#78",
    cause="data",
    kind="overflow",
    op="conv2d",
    module="4",
    step=6,
    says=(r"(?i)target|label|mask", r"255"),
    seed=606,
)
def masks_of_255(healthy: bool) -> Case:
    """Masks are read from PNG files as 0 and 255, not 0 and 1: the cross-entropy falls without end."""
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 1, 1),
    )

    def batch(step: int) -> tuple[Any, ...]:
        mask = (normal(step, 2, 1, 4, 4) > 0.5).float().repeat_interleave(4, 2).repeat_interleave(4, 3)
        return mask + 0.3 * normal(step + 1, 2, 1, 16, 16), mask if healthy else 255 * mask

    return case(
        model, batch, bce_on_masks, policy=BF16, optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    )


def log_depth(model: Any, x: Tensor, y: Tensor) -> Any:
    depth = model(pixel_values=x).predicted_depth
    difference = torch.log(depth) - torch.log(y)  # FAULT depth_of_zero
    return difference.square().mean() - 0.5 * difference.mean().square()


@story(
    source="zhengqili/MegaDepth#38",
    cause="data",
    kind="invalid",
    op="log",
    step=4,
    says=(r"log", r"(?i)target|label|sample|batch", r"\b0(\.0)?\b|zero"),
    seed=607,
)
def depth_of_zero(healthy: bool) -> Case:
    """The true depth of one picture has pixels of 0, where the sensor saw nothing; the loss takes its logarithm."""
    from transformers import GLPNConfig, GLPNForDepthEstimation

    config = GLPNConfig(
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[4, 1],
        hidden_sizes=[8, 16],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=8,
    )
    model = GLPNForDepthEstimation(config)

    def batch(step: int) -> tuple[Any, ...]:
        depth = torch.rand(2, 32, 32, generator=generator(step)) * 4 + 1
        x = depth[:, None].repeat(1, 3, 1, 1) / 5
        if step == 4 and not healthy:
            depth[1, 10:14, 20:22] = 0.0
        return x, depth

    return case(model, batch, log_depth, policy=FULL)


# ------------------------------------------------------------------ detection


def focal(model: Any, x: Tensor, y: Tensor) -> Tensor:
    p = torch.clamp(model(x).sigmoid(), 1e-4, 1.0 - 1e-4)
    right = torch.where(y == 1, p, 1.0 - p)
    surprise = -(y * torch.log(p) + (1.0 - y) * torch.log(1.0 - p))  # FAULT clamp_that_fp16_rounds_away
    return (0.25 * (1.0 - right) ** 2 * surprise).sum() / y.sum().clamp(min=1)


@story(
    source="zylo117/Yet-Another-EfficientDet-Pytorch#502",
    cause="precision",
    kind="invalid",
    op="log",
    step=4,
    cures=("op fp32: clamp", "op fp32: sigmoid", "op fp32: conv2d"),
    says=(r"log", r"0\.9999|1e-0?4|0\.0001|rounds to 1"),
    seed=608,
)
def clamp_that_fp16_rounds_away(healthy: bool) -> Case:
    """EfficientDet clamps probabilities to 1 - 1e-4 before a logarithm, and fp16 rounds that to 1."""
    model: Any = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1),
        nn.SiLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.SiLU(),
        nn.Conv2d(8, 4, 3, padding=1),
    )
    if not healthy:
        nn.init.normal_(model[4].weight, std=3.5)

    def batch(step: int) -> tuple[Any, ...]:
        x, y = pictures(step, 4)
        heat = F.one_hot(y, 4)[:, :, None, None].expand(-1, -1, 8, 8).float()
        return x, heat

    return case(model, batch, focal, policy=DYNAMIC)


def refined(self: Any, x: Tensor, rois: Tensor) -> Any:
    """Return boxes (x1, y1, x2, y2) that are clipped to the picture."""
    center, size = (rois[:, :2] + rois[:, 2:]) / 2, rois[:, 2:] - rois[:, :2]
    shift, grow = self.head(F.relu(self.body(x)).flatten(1)).float().view(-1, 4).split(2, 1)
    center, size = center + 0.1 * shift * size, size * torch.exp(0.1 * grow)
    return torch.cat((center - size / 2, center + size / 2), 1).clamp(0.0, 16.0)


def ciou(model: Any, x: Tensor, rois: Tensor, truth: Tensor) -> Any:
    boxes = model(x, rois)
    w, h = (boxes[:, 2:] - boxes[:, :2]).unbind(1)
    w_true, h_true = (truth[:, 2:] - truth[:, :2]).unbind(1)
    inside = (
        (torch.minimum(boxes[:, 2:], truth[:, 2:]) - torch.maximum(boxes[:, :2], truth[:, :2])).clamp(min=0).prod(1)
    )
    iou = inside / (w * h + w_true * h_true - inside)
    outer = (torch.maximum(boxes[:, 2:], truth[:, 2:]) - torch.minimum(boxes[:, :2], truth[:, :2])).square().sum(1)
    apart = ((boxes[:, :2] + boxes[:, 2:] - truth[:, :2] - truth[:, 2:]) / 2).square().sum(1)
    ratio = w / h  # FAULT ciou_of_a_flat_box
    v = 4 / math.pi**2 * (torch.atan(w_true / h_true) - torch.atan(ratio)).square()
    with torch.no_grad():
        alpha = v / (1 - iou + v)
    return (1 - iou + apart / outer + alpha * v).mean()


@story(
    source="Zzh-tju/DIoU-pytorch-detectron#19",
    cause="model",
    kind="invalid",
    op="div",
    phase="backward",
    step=3,
    says=(r"div", r"(?i)backward|gradient|derivative"),
    never=(r"(?i)lower (the )?learning rate",),
    seed=609,
)
def ciou_of_a_flat_box(healthy: bool) -> Case:
    """A proposal beyond the border is clipped to height 0: CIoU is finite, as atan(inf) is, its gradient is 0 / 0."""
    model = model_of(refined, body=nn.Conv2d(3, 4, 3, stride=2), head=nn.Linear(196, 16))

    def batch(step: int) -> tuple[Any, ...]:
        x, _ = pictures(step, 2)
        corner = 10 * torch.rand(8, 2, generator=generator(step))
        truth = torch.cat((corner, corner + 4 + torch.rand(8, 2, generator=generator(step + 50))), 1)
        rois = truth + 0.5 * normal(step, 8, 4)
        if step % 3 == 0 and not healthy:
            rois[5] = torch.tensor([4.0, 18.0, 9.0, 22.0])
        return x, rois, truth

    return case(model, batch, ciou, policy=DYNAMIC)


def encoded(boxes: Tensor, anchors: Tensor) -> Tensor:
    """Return what a detector has to predict for boxes (x1, y1, x2, y2) at anchors."""
    size, base = boxes[:, 2:] - boxes[:, :2], anchors[:, 2:] - anchors[:, :2]
    shift = (boxes[:, :2] + boxes[:, 2:] - anchors[:, :2] - anchors[:, 2:]) / 2 / base
    return torch.cat((shift, torch.log(size / base)), 1)  # FAULT annotated_box_without_width


def box_loss(model: Any, x: Tensor, boxes: Tensor, anchors: Tensor) -> Tensor:
    return F.smooth_l1_loss(model(x).view(-1, 4), encoded(boxes, anchors))


@story(
    source="pytorch/vision#997",
    cause="data",
    kind="invalid",
    op="log",
    step=4,
    says=(r"log", r"(?i)box|sample|target|batch|\brow\b"),
    never=(r"(?i)lower (the )?learning rate",),
    seed=610,
)
def annotated_box_without_width(healthy: bool) -> Case:
    """The annotation of one box has x1 = x2. Faster R-CNN encodes its width as a logarithm."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(392, 12))

    def batch(step: int) -> tuple[Any, ...]:
        x, _ = pictures(step, 2)
        corner = 10 * torch.rand(6, 2, generator=generator(step))
        boxes = torch.cat((corner, corner + 2 + 3 * torch.rand(6, 2, generator=generator(step + 50))), 1)
        anchors = torch.cat((corner - 0.5, corner + 4), 1)
        if step == 4 and not healthy:
            boxes[2, 2] = boxes[2, 0]
        return x, boxes, anchors

    return case(model, batch, box_loss, policy=DYNAMIC)


def region_forward(self: Any, x: Tensor) -> Any:
    features = self.backbone(x)
    return self.objectness(features).flatten(1), self.deltas(features).flatten(1)


def region_loss(model: Any, x: Tensor, y: Tensor) -> Any:
    scores, deltas = model(x)
    near = F.one_hot(y, 4).float().repeat_interleave(scores.shape[1] // 4, 1)
    error = (deltas - 0.5).square()  # FAULT detector_with_a_high_learning_rate
    return F.binary_cross_entropy_with_logits(scores, near) + error.sum(1).mean() / 3.5


@story(
    source="facebookresearch/detectron2#1128",
    cause="divergence",
    kind="overflow",
    op="square",
    step=5,
    says=(r"(?i)diverg|learning rate|ran away",),
    seed=611,
)
def detector_with_a_high_learning_rate(healthy: bool) -> Case:
    """A detector without norms is trained by SGD with a learning rate of 0.1 where 0.0025 is right."""
    model = model_of(
        region_forward,
        backbone=nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3, padding=1),
            nn.ReLU(),
        ),
        objectness=nn.Conv2d(16, 1, 1),
        deltas=nn.Conv2d(16, 4, 1),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0025 if healthy else 0.1, momentum=0.9)
    return case(model, lambda k: pictures(k, 4), region_loss, policy=BF16, optimizer=optimizer)


def pixel_boxes(model: Any, x: Tensor, boxes: Tensor) -> Any:
    return F.l1_loss(model(x), boxes, reduction="sum") / 8


@story(
    source="open-mmlab/mmdetection#8055",
    cause="scale",
    kind="scale_too_high",
    step=3,
    cures=("scale", "scale: dynamic"),
    says=(r"(?i)scale", r"512"),
    seed=612,
)
def static_scale_of_512(healthy: bool) -> Case:
    """A static loss scale of 512, and a batch with so many boxes that its scaled gradients leave fp16."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 1)
    )

    def batch(step: int) -> tuple[Any, ...]:
        x, y = pictures(step, 2 if step % 3 else 12, 32)
        return x, y[:, None, None, None].float().expand(-1, 4, 16, 16)

    return case(model, batch, pixel_boxes, policy=MIXED.replace(scale=1.0 if healthy else 512.0))


# ------------------------------------------------------------------ optical flow


def sampled(volume: Tensor, coords: Tensor) -> Tensor:
    """Return values of ``(N, 1, H, W)`` at pixel coordinates ``(N, K, K, 2)``."""
    height, width = volume.shape[-2:]
    x, y = coords.unbind(-1)
    x = 2 * x / (width - 1) - 1  # FAULT flow_of_small_crops
    y = 2 * y / (height - 1) - 1
    return F.grid_sample(volume, torch.stack((x, y), -1), align_corners=True)


def flow(self: Any, one: Tensor, two: Tensor) -> Any:
    a, b = self.encoder(one), self.encoder(two)
    batch, channels, height, width = a.shape
    volume = torch.einsum("bcn,bcm->bnm", a.flatten(2), b.flatten(2)).float() / channels**0.5
    volume = volume.reshape(batch * height * width, 1, height, width)
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    place = torch.stack((columns, rows), -1).float().view(-1, 1, 1, 2).repeat(batch, 1, 1, 1)
    offsets = torch.stack(torch.meshgrid(torch.arange(-1, 2), torch.arange(-1, 2), indexing="ij"), -1)
    levels = []
    for level in range(4):
        levels.append(sampled(volume, place / 2**level + offsets))
        if level < 3:
            volume = F.avg_pool2d(volume, 2, stride=2)
    seen = torch.cat([part.view(batch, height * width, 9) for part in levels], -1)
    return self.update(seen).transpose(1, 2).reshape(batch, 2, height, width)


@story(
    source="pytorch/vision#7338",
    cause="model",
    kind="invalid",
    op="div",
    step=1,
    says=(r"div", r"\b0(\.0)?\b|zero"),
    never=(r"(?i)lower (the )?learning rate",),
    seed=613,
)
def flow_of_small_crops(healthy: bool) -> Case:
    """RAFT on crops of 64 pixels: the last level of its pyramid is one pixel wide, and W - 1 divides coordinates."""
    model = model_of(
        flow,
        encoder=nn.Sequential(nn.Conv2d(3, 8, 8, stride=8), nn.ReLU(), nn.Conv2d(8, 8, 1)),
        update=nn.Linear(36, 2),
    )
    size = 128 if healthy else 64

    def batch(step: int) -> tuple[Any, ...]:
        one = normal(step, 1, 3, size, size)
        return one, one.roll(8, 3), torch.tensor([1.0, 0.0]).view(1, 2, 1, 1).expand(1, 2, size // 8, size // 8)

    return case(model, batch, lambda m, one, two, moved: (m(one, two) - moved).abs().mean(), policy=DYNAMIC)


# ------------------------------------------------------------------ self-supervised


def sinkhorn(scores: Tensor) -> Tensor:
    """Return soft assignments of samples to prototypes that use all prototypes alike."""
    q = torch.exp(scores / 0.05).T  # FAULT sinkhorn_in_half
    q = q / q.sum()
    for _ in range(3):
        q = q / q.sum(dim=1, keepdim=True) / q.shape[0]
        q = q / q.sum(dim=0, keepdim=True) / q.shape[1]
    return (q * q.shape[1]).T


def swapped(model: Any, one: Tensor, two: Tensor) -> Tensor:
    a, b = model(one), model(two)
    with torch.no_grad():
        q = sinkhorn(b)
    return -(q.float() * F.log_softmax(a.float() / 0.1, -1)).sum(-1).mean()


def prototypes(self: Any, x: Tensor) -> Any:
    features = F.normalize(self.body(x).float(), dim=-1)
    return F.linear(features, F.normalize(self.centers.weight, dim=-1))


@story(
    source="galilai-group/stable-pretraining#288",
    cause="precision",
    kind="overflow",
    op="exp",
    step=4,
    cures=("op fp32", "bf16"),
    says=(r"exp", r"65504"),
    seed=614,
)
def sinkhorn_in_half(healthy: bool) -> Case:
    """SwAV's Sinkhorn steps take exp(s / 0.05) of cosine similarities: above 0.55 that is no fp16 number."""
    model = model_of(
        prototypes,
        body=nn.Sequential(nn.Flatten(), nn.Linear(768, 64), nn.ReLU(), nn.Linear(64, 20)),
        centers=nn.Linear(20, 12, bias=False),
    )

    def batch(step: int) -> tuple[Any, ...]:
        x, _ = pictures(step, 8)
        return x, x + 0.1 * normal(step + 1, *x.shape)

    return case(model, batch, swapped, policy=MIXED if healthy else TORCH)


@story(
    source="openai/CLIP#40",
    cause="precision",
    kind="bad_state",
    phase="update",
    parameter="text_model.embeddings.token_embedding.weight",
    step=1,
    asked=2,
    says=(r"(?i)eps|1e-0?8", r"(?i)update|optimizer|Adam"),
    seed=615,
)
def clip_in_half(healthy: bool, watch: Watch) -> Iterator[Turn]:
    """CLIP's weights are fp16 and so are Adam's moments: squares of small gradients and eps 1e-8 are 0 there."""
    from transformers import CLIPConfig, CLIPModel

    text = {"vocab_size": 40, "max_position_embeddings": 8, "bos_token_id": 38, "eos_token_id": 39, "pad_token_id": 0}
    body = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    picture = {"image_size": 16, "patch_size": 8}
    model: Any = CLIPModel(CLIPConfig(text_config=text | body, vision_config=picture | body, projection_dim=16))
    if not healthy:
        model.half()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)  # FAULT clip_in_half
    loss_of = watch(model, lambda m, words, x: m(input_ids=words, pixel_values=x, return_loss=True).loss, optimizer)
    for step in count(1):
        x, y = pictures(step)
        loss = loss_of(torch.stack((torch.full_like(y, 38), y + 1, torch.full_like(y, 39)), 1), x.to(model.dtype))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield Turn(loss.item())
