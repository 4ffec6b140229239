"""Diffusion and flow matching: diffusers' networks and schedulers, lucidrains' diffusion."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surveyed.registry import PROGRAM, Registry, adamw, images, own_loss

REGISTRY = Registry(PROGRAM)


def _denoise(model: nn.Module, batch: Any) -> Tensor:
    """The usual step of diffusers' training scripts, with noise and times in the batch."""
    noisy, times, noise = batch
    return F.mse_loss(model(noisy, times).sample, noise)


def _noisy(channels: int = 3, size: int = 16) -> Any:
    shape = (4, channels, size, size)
    return torch.randn(shape), torch.randint(0, 1000, (4,)), torch.randn(shape)


@REGISTRY("diffusers")
def unet2d() -> Any:
    from diffusers import UNet2DModel

    model = UNet2DModel(
        sample_size=16, in_channels=3, out_channels=3, layers_per_block=1,
        block_out_channels=(8, 16), norm_num_groups=4, attention_head_dim=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    return _denoise, model, adamw(model), _noisy()


@REGISTRY("diffusers")
def unet2d_with_scheduler() -> Any:
    from diffusers import DDPMScheduler, UNet2DModel

    model = UNet2DModel(
        sample_size=16, in_channels=3, out_channels=3, layers_per_block=1,
        block_out_channels=(8, 16), norm_num_groups=4,
        down_block_types=("DownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    schedule = DDPMScheduler(num_train_timesteps=100)

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        noise = torch.randn_like(batch)
        times = torch.randint(0, 100, (batch.shape[0],))
        noisy = schedule.add_noise(batch, noise, times)
        return F.mse_loss(model(noisy, times, return_dict=False)[0], noise)

    return step, model, adamw(model), images(4, 16)


@REGISTRY("diffusers")
def unet2d_condition() -> Any:
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, layers_per_block=1,
        block_out_channels=(8, 16), cross_attention_dim=8, attention_head_dim=4, norm_num_groups=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip

    def step(model: nn.Module, batch: Any) -> Tensor:
        noisy, times, noise, text = batch
        return F.mse_loss(model(noisy, times, encoder_hidden_states=text).sample, noise)

    return step, model, adamw(model), (*_noisy(4, 8), torch.randn(4, 5, 8))


@REGISTRY("diffusers")
def controlnet() -> Any:
    from diffusers import ControlNetModel

    model = ControlNetModel(
        in_channels=4, block_out_channels=(8, 16), layers_per_block=1, cross_attention_dim=8,
        attention_head_dim=4, norm_num_groups=4, conditioning_embedding_out_channels=(4, 8),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
    )  # fmt: skip

    def step(model: nn.Module, batch: Any) -> Tensor:
        noisy, times, _, text, hint = batch
        made = model(noisy, times, encoder_hidden_states=text, controlnet_cond=hint)
        return made.mid_block_res_sample.square().mean() + sum(
            one.square().mean() for one in made.down_block_res_samples
        )

    batch = (*_noisy(4, 8), torch.randn(4, 5, 8), torch.randn(4, 3, 16, 16))
    return step, model, adamw(model), batch


@REGISTRY("diffusers")
def dit() -> Any:
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=4, num_layers=2,
        sample_size=8, patch_size=2, num_embeds_ada_norm=1000, norm_num_groups=4,
    )  # fmt: skip

    def step(model: nn.Module, batch: Any) -> Tensor:
        noisy, times, noise, kinds = batch
        return F.mse_loss(model(noisy, times, class_labels=kinds).sample, noise)

    return step, model, adamw(model), (*_noisy(4, 8), torch.randint(10, (4,)))


@REGISTRY("diffusers")
def pixart() -> Any:
    from diffusers import PixArtTransformer2DModel

    model = PixArtTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=4, num_layers=2,
        sample_size=8, cross_attention_dim=16, caption_channels=8, norm_num_groups=4,
        use_additional_conditions=False,
    )  # fmt: skip

    def step(model: nn.Module, batch: Any) -> Tensor:
        noisy, times, noise, text = batch
        conditions = {"resolution": None, "aspect_ratio": None}
        made = model(
            noisy, encoder_hidden_states=text, timestep=times, added_cond_kwargs=conditions
        )
        return F.mse_loss(made.sample, noise)

    return step, model, adamw(model), (*_noisy(4, 8), torch.randn(4, 5, 8))


@REGISTRY("diffusers")
def flux() -> Any:
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=8, pooled_projection_dim=8,
        axes_dims_rope=(4, 4, 8),
    )  # fmt: skip

    def step(model: nn.Module, batch: Any) -> Tensor:
        latents, text, pooled, times, target = batch
        made = model(
            hidden_states=latents, encoder_hidden_states=text, pooled_projections=pooled,
            timestep=times, img_ids=torch.zeros(16, 3), txt_ids=torch.zeros(5, 3),
        )  # fmt: skip
        return F.mse_loss(made.sample, target)

    batch = (
        torch.randn(2, 16, 4), torch.randn(2, 5, 8), torch.randn(2, 8), torch.rand(2),
        torch.randn(2, 16, 4),
    )  # fmt: skip
    return step, model, adamw(model), batch


@REGISTRY("diffusers")
def sd3() -> Any:
    from diffusers import SD3Transformer2DModel

    model = SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=8,
        num_attention_heads=2, joint_attention_dim=8, caption_projection_dim=16,
        pooled_projection_dim=8, out_channels=4, pos_embed_max_size=8,
    )  # fmt: skip

    def step(model: nn.Module, batch: Any) -> Tensor:
        latents, text, pooled, times, target = batch
        made = model(
            hidden_states=latents, encoder_hidden_states=text, pooled_projections=pooled,
            timestep=times,
        )  # fmt: skip
        return F.mse_loss(made.sample, target)

    batch = (
        torch.randn(2, 4, 8, 8), torch.randn(2, 5, 8), torch.randn(2, 8), torch.rand(2),
        torch.randn(2, 4, 8, 8),
    )  # fmt: skip
    return step, model, adamw(model), batch


@REGISTRY("diffusers")
def autoencoder_kl() -> Any:
    from diffusers import AutoencoderKL

    model = AutoencoderKL(
        in_channels=3, out_channels=3, block_out_channels=(8, 8), latent_channels=4,
        norm_num_groups=4, down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2, sample_size=16,
    )  # fmt: skip

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        posterior = model.encode(batch).latent_dist
        made = model.decode(posterior.sample()).sample
        return F.mse_loss(made, batch) + 1e-6 * posterior.kl().mean()

    return step, model, adamw(model), images(2, 16)


@REGISTRY("diffusers")
def vq_model() -> Any:
    from diffusers import VQModel

    model = VQModel(
        in_channels=3, out_channels=3, block_out_channels=(8, 8), latent_channels=4,
        norm_num_groups=4, num_vq_embeddings=16, down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2, sample_size=16,
    )  # fmt: skip

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        made = model(batch)
        return F.mse_loss(made.sample, batch) + made.commit_loss.mean()

    return step, model, adamw(model), images(2, 16)


@REGISTRY("diffusers", "unet1d")
def unet1d_diffusers() -> Any:
    from diffusers import UNet1DModel

    model = UNet1DModel(
        sample_size=16, in_channels=2, out_channels=2, block_out_channels=(8, 16),
        extra_in_channels=16, down_block_types=("DownBlock1DNoSkip", "DownBlock1D"),
        up_block_types=("UpBlock1D", "UpBlock1DNoSkip"),
    )  # fmt: skip

    def step(model: nn.Module, batch: Any) -> Tensor:
        noisy, noise = batch
        return F.mse_loss(model(noisy, 10).sample, noise)

    return step, model, adamw(model), (torch.randn(4, 2, 16), torch.randn(4, 2, 16))


@REGISTRY("denoising_diffusion_pytorch accelerate ema_pytorch torchvision")
def gaussian_diffusion() -> Any:
    from denoising_diffusion_pytorch import GaussianDiffusion, Unet

    net = Unet(dim=8, dim_mults=(1, 2), flash_attn=False)
    model = GaussianDiffusion(net, image_size=16, timesteps=100)
    return own_loss, model, adamw(model), torch.rand(2, 3, 16, 16)


@REGISTRY("denoising_diffusion_pytorch accelerate ema_pytorch torchvision")
def gaussian_diffusion_1d() -> Any:
    from denoising_diffusion_pytorch import GaussianDiffusion1D, Unet1D

    net = Unet1D(dim=8, dim_mults=(1, 2), channels=4)
    model = GaussianDiffusion1D(net, seq_length=16, timesteps=100, objective="pred_v")
    return own_loss, model, adamw(model), torch.rand(2, 4, 16)


@REGISTRY("denoising_diffusion_pytorch accelerate ema_pytorch torchvision")
def karras_unet() -> Any:
    from denoising_diffusion_pytorch.karras_unet import KarrasUnet

    model = KarrasUnet(
        image_size=16, dim=8, dim_max=16, channels=3, num_downsamples=1, num_blocks_per_stage=1,
        attn_res=(8,), attn_dim_head=8,
    )  # fmt: skip

    def step(model: nn.Module, batch: Any) -> Tensor:
        noisy, times, noise = batch
        return F.mse_loss(model(noisy, times), noise)

    return step, model, adamw(model), (images(2, 16), torch.rand(2), images(2, 16))


@REGISTRY("rectified_flow_pytorch einx hyper_connections x_unet")
def rectified_flow() -> Any:
    from rectified_flow_pytorch import RectifiedFlow

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.time = nn.Conv2d(3, 3, 3, padding=1), nn.Linear(1, 3)

        def forward(self, x: Tensor, times: Tensor) -> Tensor:
            return self.net(x) + self.time(times.reshape(-1, 1))[..., None, None]

    model = RectifiedFlow(Net())
    return own_loss, model, adamw(model), torch.rand(2, 3, 8, 8)
