"""Vision from other packages: torchvision, segmentation models, MONAI, kornia, open_clip, ..."""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surveyed.registry import (
    PROGRAM,
    Registry,
    adamw,
    classifier,
    classify,
    images,
    labels,
    mean_square,
    regress,
    sgd,
    tokens,
)

REGISTRY = Registry(PROGRAM)

# torchvision

VISION: dict[str, tuple[dict[str, Any], int]] = {
    "mobilenet_v2": ({"width_mult": 0.25}, 32),
    "shufflenet_v2_x0_5": ({}, 32),
    "squeezenet1_1": ({}, 64),
    "mnasnet0_5": ({}, 32),
    "regnet_y_400mf": ({}, 32),
    "resnext50_32x4d": ({}, 32),
    "googlenet": ({"aux_logits": False, "init_weights": False}, 64),
}


def _torchvision(name: str, arguments: dict[str, Any], size: int) -> Any:
    def make() -> Any:
        import torchvision

        model = getattr(torchvision.models, name)(num_classes=10, **arguments)
        return classify, model, sgd(model), (images(4, size), labels())

    return make


for _name, (_arguments, _size) in VISION.items():
    REGISTRY.add(_name, _torchvision(_name, _arguments, _size), "torchvision")


@REGISTRY("torchvision")
def swin_tv() -> Any:
    from torchvision.models import SwinTransformer

    model = SwinTransformer(
        patch_size=[2, 2], embed_dim=8, depths=[2, 2], num_heads=[1, 2], window_size=[4, 4],
        num_classes=10, stochastic_depth_prob=0.1,
    )  # fmt: skip
    return classifier(model, images(4, 32))


@REGISTRY("torchvision")
def vit_tv() -> Any:
    from torchvision.models import VisionTransformer

    model = VisionTransformer(
        image_size=32, patch_size=8, num_layers=2, num_heads=2, hidden_dim=32, mlp_dim=48,
        num_classes=10, dropout=0.1,
    )  # fmt: skip
    return classifier(model, images(4, 32))


@REGISTRY("torchvision")
def inception_aux() -> Any:
    from torchvision.models import GoogLeNet

    model = GoogLeNet(num_classes=10, aux_logits=True, init_weights=False)

    def step(model: nn.Module, batch: Any) -> Tensor:
        pictures, targets = batch
        made = model(pictures)
        main = F.cross_entropy(made.logits, targets)
        return main + 0.3 * F.cross_entropy(made.aux_logits1, targets)

    return step, model, sgd(model), (images(2, 96), labels(2))


@REGISTRY("torchvision")
def deeplab() -> Any:
    from torchvision.models.segmentation.deeplabv3 import DeepLabHead
    from torchvision.models.segmentation.fcn import FCNHead

    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=4, padding=1), nn.BatchNorm2d(8), nn.ReLU(), FCNHead(8, 5)
    )
    assert DeepLabHead is not None

    def step(model: nn.Module, batch: Any) -> Tensor:
        pictures, targets = batch
        made = F.interpolate(model(pictures), size=targets.shape[-2:], mode="bilinear")
        return F.cross_entropy(made, targets, ignore_index=4)

    return step, model, sgd(model), (images(4, 32), torch.randint(5, (4, 32, 32)))


# Segmentation


def _segmentation(name: str) -> Any:
    def make() -> Any:
        import segmentation_models_pytorch as smp

        model = getattr(smp, name)("timm-mobilenetv3_small_minimal_100", encoder_weights=None)
        loss = smp.losses.DiceLoss("binary")

        def step(model: nn.Module, batch: Any) -> Tensor:
            pictures, masks = batch
            return loss(model(pictures), masks)

        return step, model, adamw(model), (images(2, 64), torch.rand(2, 1, 64, 64).round())

    return make


for _name in ("Unet", "FPN", "PSPNet", "Linknet", "DeepLabV3Plus", "MAnet"):
    REGISTRY.add(_name, _segmentation(_name), "segmentation_models_pytorch timm torchvision")


# MONAI


def _volumes(step: Any, model: nn.Module, out: int = 2) -> Any:
    return (
        step,
        model,
        adamw(model),
        (torch.randn(2, 1, 16, 16, 16), torch.randint(out, (2, 16, 16, 16))),
    )


@REGISTRY("monai")
def monai_unet() -> Any:
    from monai.networks.nets import UNet

    model = UNet(
        spatial_dims=3, in_channels=1, out_channels=2, channels=(4, 8, 16), strides=(2, 2),
        num_res_units=1,
    )  # fmt: skip
    return _volumes(classify, model)


@REGISTRY("monai")
def monai_dice() -> Any:
    from monai.losses import DiceCELoss
    from monai.networks.nets import BasicUNet

    model = BasicUNet(spatial_dims=2, in_channels=1, out_channels=2, features=(4, 4, 8, 8, 8, 4))
    loss = DiceCELoss(to_onehot_y=True, softmax=True)

    def step(model: nn.Module, batch: Any) -> Tensor:
        pictures, masks = batch
        return loss(model(pictures), masks)

    return step, model, adamw(model), (images(2, 32, 1), torch.randint(2, (2, 1, 32, 32)))


@REGISTRY("monai")
def monai_segresnet() -> Any:
    from monai.networks.nets import SegResNet

    model = SegResNet(
        spatial_dims=3, init_filters=8, in_channels=1, out_channels=2, blocks_down=(1, 1),
        blocks_up=(1,), dropout_prob=0.1,
    )  # fmt: skip
    return _volumes(classify, model)


@REGISTRY("monai einops")
def monai_unetr() -> Any:
    from monai.networks.nets import UNETR

    model = UNETR(
        in_channels=1, out_channels=2, img_size=(16, 16), feature_size=4, hidden_size=16,
        num_heads=2, spatial_dims=2, mlp_dim=32,
    )  # fmt: skip
    return classify, model, adamw(model), (images(2, 16, 1), torch.randint(2, (2, 16, 16)))


@REGISTRY("monai einops")
def monai_swin_unetr() -> Any:
    from monai.networks.nets import SwinUNETR

    model = SwinUNETR(
        in_channels=1, out_channels=2, feature_size=12, depths=(1, 1, 1, 1), num_heads=(1, 1, 2, 2),
        spatial_dims=2, window_size=4,
    )  # fmt: skip
    return classify, model, adamw(model), (images(2, 64, 1), torch.randint(2, (2, 64, 64)))


@REGISTRY("monai")
def monai_densenet() -> Any:
    from monai.networks.nets import DenseNet

    model = DenseNet(
        spatial_dims=2, in_channels=1, out_channels=10, init_features=8, growth_rate=4,
        block_config=(2, 2),
    )  # fmt: skip
    return classifier(model, images(4, 32, 1))


@REGISTRY("monai")
def monai_autoencoder() -> Any:
    from monai.networks.nets import VarAutoEncoder

    model = VarAutoEncoder(
        spatial_dims=2, in_shape=(1, 16, 16), out_channels=1, latent_size=4, channels=(4, 8),
        strides=(2, 2),
    )  # fmt: skip

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        made, mean, variance, _ = model(batch)
        kl = -0.5 * (1 + variance - mean.square() - variance.exp()).mean()
        return F.mse_loss(made, batch) + kl

    return step, model, adamw(model), images(4, 16, 1)


# kornia


@REGISTRY("kornia kornia_rs")
def kornia_augmented() -> Any:
    import kornia.filters

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blur = kornia.filters.GaussianBlur2d((3, 3), (1.0, 1.0))
            self.edges = kornia.filters.Sobel()
            self.out = nn.Linear(3 * 16 * 16, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.out((self.blur(x) + self.edges(x)).flatten(1))

    return classifier(Net(), images(4, 16))


@REGISTRY("kornia kornia_rs")
def kornia_registration() -> Any:
    import kornia.geometry as geometry

    class Homography(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrix = nn.Parameter(torch.eye(3)[None] + 0.01)

        def forward(self, x: Tensor) -> Tensor:
            return geometry.warp_perspective(x, self.matrix.expand(len(x), 3, 3), (16, 16))

    model = Homography()
    return regress, model, torch.optim.Adam(model.parameters()), (images(4, 16), images(4, 16))


@REGISTRY("kornia kornia_rs", "kornia_losses")
def kornia_losses() -> Any:
    from kornia.losses import SSIMLoss, TotalVariation

    model = nn.Conv2d(3, 3, 3, padding=1)
    similarity, smooth = SSIMLoss(5), TotalVariation()

    def step(model: nn.Module, batch: Any) -> Tensor:
        noisy, clean = batch
        made = model(noisy).sigmoid()
        return similarity(made, clean) + 1e-3 * smooth(made).mean()

    return step, model, adamw(model), (torch.rand(4, 3, 16, 16), torch.rand(4, 3, 16, 16))


# Other model collections


@REGISTRY("efficientnet_pytorch")
def efficientnet_b0() -> Any:
    from efficientnet_pytorch import EfficientNet

    model = EfficientNet.from_name("efficientnet-b0", num_classes=10)
    return classifier(model, images(2, 32))


def _pytorchcv(name: str, size: int) -> Any:
    def make() -> Any:
        from pytorchcv.model_provider import get_model

        return classifier(get_model(name, num_classes=10), images(4, size))

    return make


for _name, _size in {
    "resnet20_cifar10": 32, "preresnet20_cifar10": 32, "densenet40_k12_cifar10": 32,
    "seresnet20_cifar10": 32, "pyramidnet110_a48_cifar10": 32, "nin_cifar10": 32,
    "shakeshakeresnet20_2x16d_cifar10": 32, "diaresnet20_cifar10": 32,
}.items():  # fmt: skip
    REGISTRY.add(_name, _pytorchcv(_name, _size), "pytorchcv")


@REGISTRY("open_clip timm torchvision ftfy")
def open_clip() -> Any:
    from open_clip.loss import ClipLoss
    from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg

    vision = CLIPVisionCfg(layers=1, width=32, head_width=16, patch_size=8, image_size=16)
    text = CLIPTextCfg(context_length=16, vocab_size=64, width=32, heads=2, layers=1)
    model, loss = CLIP(embed_dim=16, vision_cfg=vision, text_cfg=text), ClipLoss()

    def step(model: nn.Module, batch: Any) -> Tensor:
        return loss(*model(*batch))

    return step, model, adamw(model), (images(4, 16), tokens())


@REGISTRY("lpips torchvision")
def lpips_loss() -> Any:
    import lpips

    class Denoiser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Conv2d(3, 3, 3, padding=1)
            self.perceptual = lpips.LPIPS(
                net="squeeze", pretrained=False, pnet_rand=True, verbose=False
            ).requires_grad_(False)

        def forward(self, noisy: Tensor, clean: Tensor) -> Tensor:
            return self.perceptual(self.net(noisy), clean).mean()

    model = Denoiser()
    return (lambda m, b: m(*b)), model, adamw(model.net), (images(2, 32), images(2, 32))


@REGISTRY("pytorch_msssim")
def ssim_loss() -> Any:
    from pytorch_msssim import SSIM

    model, ssim = nn.Conv2d(3, 3, 3, padding=1), SSIM(data_range=1.0, win_size=5)

    def step(model: nn.Module, batch: Any) -> Tensor:
        noisy, clean = batch
        return 1 - ssim(model(noisy).sigmoid(), clean)

    return step, model, adamw(model), (torch.rand(4, 3, 16, 16), torch.rand(4, 3, 16, 16))


@REGISTRY("piq torchvision")
def piq_losses() -> Any:
    import piq

    model = nn.Conv2d(3, 3, 3, padding=1)

    def step(model: nn.Module, batch: Any) -> Tensor:
        noisy, clean = batch
        made = model(noisy).sigmoid()
        return piq.GMSDLoss()(made, clean) + piq.TVLoss()(made) * 1e-3

    return step, model, adamw(model), (torch.rand(4, 3, 16, 16), torch.rand(4, 3, 16, 16))


def _metric(name: str, **arguments: Any) -> Any:
    def make() -> Any:
        losses = importlib.import_module("pytorch_metric_learning.losses")
        model, loss = (
            nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 8)),
            getattr(losses, name)(**arguments),
        )

        def step(model: nn.Module, batch: Any) -> Tensor:
            inputs, targets = batch
            return loss(model(inputs), targets)

        return step, model, adamw(model), (torch.randn(8, 12), torch.arange(8) % 4)

    return make


REGISTRY.add("NTXentLoss", _metric("NTXentLoss"), "pytorch_metric_learning")
REGISTRY.add("TripletMarginLoss", _metric("TripletMarginLoss"), "pytorch_metric_learning")
REGISTRY.add("SupConLoss", _metric("SupConLoss"), "pytorch_metric_learning")


@REGISTRY("pytorch_metric_learning")
def arcface() -> Any:
    from pytorch_metric_learning.losses import ArcFaceLoss

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 8))
            self.loss = ArcFaceLoss(num_classes=4, embedding_size=8)

        def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
            return self.loss(self.body(inputs), targets)

    model = Net()
    return (lambda m, b: m(*b)), model, sgd(model), (torch.randn(8, 12), labels(8, 4))


@REGISTRY("resnest")
def resnest() -> Any:
    from resnest.torch.resnet import Bottleneck, ResNet

    model = ResNet(
        Bottleneck, [1, 1, 1, 1], radix=2, groups=1, bottleneck_width=16, deep_stem=True,
        stem_width=8, avg_down=True, num_classes=10,
    )  # fmt: skip
    return classifier(model, images(2, 32))


@REGISTRY("pytorch_pretrained_vit")
def pretrained_vit() -> Any:
    from pytorch_pretrained_vit import ViT

    model = ViT(
        dim=32, num_heads=2, num_layers=2, ff_dim=48, patches=8, image_size=32, num_classes=10
    )
    return classifier(model, images())


@REGISTRY("stylegan2_pytorch kornia vector_quantize_pytorch")
def stylegan_discriminator() -> Any:
    from stylegan2_pytorch.stylegan2_pytorch import Discriminator

    model = Discriminator(image_size=16, network_capacity=2)

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        made, quantize = model(batch)
        return F.relu(1 + made).mean() + quantize.mean()

    return step, model, adamw(model), images(2, 16)


@REGISTRY("pytorch_wavelets")
def wavelets() -> Any:
    from pytorch_wavelets import DWTForward

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.waves, self.out = DWTForward(J=1, wave="haar"), nn.Linear(3 * 8 * 8, 10)

        def forward(self, x: Tensor) -> Tensor:
            low, _ = self.waves(x)
            return self.out(low.flatten(1))

    return classifier(Net(), images(4, 16))


@REGISTRY("ultralytics torchvision cv2")
def yolo() -> Any:
    from ultralytics.nn.modules import SPPF, C2f, Conv

    model = nn.Sequential(
        Conv(3, 8, 3, 2), C2f(8, 8, 1, True), Conv(8, 16, 3, 2), SPPF(16, 16), nn.Flatten(),
        nn.Linear(16 * 64, 10),
    )  # fmt: skip
    return classifier(model, images(4, 32))


@REGISTRY("pytorch_tcn")
def tcn() -> Any:
    from pytorch_tcn import TCN

    model = TCN(num_inputs=3, num_channels=[8, 8], kernel_size=3, dropout=0.1)
    return mean_square, model, adamw(model), torch.randn(4, 3, 16)
