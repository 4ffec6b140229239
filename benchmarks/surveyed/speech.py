"""Speech and music: speechbrain, asteroid, encodec, demucs, open-unmix, nnAudio, conformers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surveyed.registry import PROGRAM, Registry, adamw, classifier, mean_square, regress

REGISTRY = Registry(PROGRAM)
BRAIN = "speechbrain hyperpyyaml sentencepiece torchaudio"


@REGISTRY(BRAIN)
def ecapa() -> Any:
    from speechbrain.lobes.models.ECAPA_TDNN import ECAPA_TDNN

    model = ECAPA_TDNN(
        8, lin_neurons=10, channels=[8, 8, 8, 8, 24], attention_channels=4, res2net_scale=2,
        se_channels=4,
    )  # fmt: skip

    def step(model: nn.Module, batch: Any) -> Tensor:
        features, speakers = batch
        return F.cross_entropy(model(features).squeeze(1), speakers)

    return step, model, adamw(model), (torch.randn(4, 20, 8), torch.randint(10, (4,)))


@REGISTRY(BRAIN)
def xvector() -> Any:
    from speechbrain.lobes.models.Xvector import Xvector

    model = Xvector(
        in_channels=8, tdnn_channels=[8, 8, 8, 8, 16], lin_neurons=10,
    )  # fmt: skip

    def step(model: nn.Module, batch: Any) -> Tensor:
        features, speakers = batch
        return F.cross_entropy(model(features).squeeze(1), speakers)

    return step, model, adamw(model), (torch.randn(4, 20, 8), torch.randint(10, (4,)))


@REGISTRY(BRAIN)
def crdnn(**more: Any) -> Any:
    from speechbrain.lobes.models.CRDNN import CRDNN

    model = CRDNN(
        input_shape=(4, 12, 8), cnn_channels=[4, 4], rnn_layers=1, rnn_neurons=8, dnn_neurons=8,
        inter_layer_pooling_size=[2, 2], **more,
    )  # fmt: skip
    return mean_square, model, adamw(model), torch.randn(4, 12, 8)


@REGISTRY(BRAIN)
def transformer_asr() -> Any:
    from speechbrain.lobes.models.transformer.TransformerASR import TransformerASR

    model = TransformerASR(
        tgt_vocab=20, input_size=8, d_model=16, nhead=2, num_encoder_layers=1,
        num_decoder_layers=1, d_ffn=32, dropout=0.1,
    )  # fmt: skip

    def step(model: nn.Module, batch: Any) -> Tensor:
        features, text = batch
        encoded, decoded = model(features, text)
        return encoded.square().mean() + decoded.square().mean()

    return step, model, adamw(model), (torch.randn(4, 12, 8), torch.randint(1, 20, (4, 6)))


@REGISTRY("asteroid asteroid_filterbanks julius torchaudio pytorch_lightning")
def conv_tasnet() -> Any:
    from asteroid.models import ConvTasNet

    model = ConvTasNet(
        n_src=2, n_blocks=2, n_repeats=1, bn_chan=8, hid_chan=16, skip_chan=8, n_filters=16
    )
    return regress, model, adamw(model), (torch.randn(2, 1, 256), torch.randn(2, 2, 256))


@REGISTRY("encodec einops torchaudio")
def seanet_autoencoder() -> Any:
    from encodec.modules import SEANetDecoder, SEANetEncoder

    how = {"n_filters": 4, "dimension": 8, "ratios": [2, 2], "n_residual_layers": 1, "lstm": 1}
    model = nn.Sequential(SEANetEncoder(**how), SEANetDecoder(**how))

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        return F.l1_loss(model(batch), batch)

    return step, model, adamw(model), torch.randn(2, 1, 64)


@REGISTRY("encodec einops torchaudio")
def encodec_quantizer(**more: Any) -> Any:
    from encodec.quantization.core_vq import ResidualVectorQuantization

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.Conv1d(1, 8, 4, stride=4)
            self.quantize = ResidualVectorQuantization(
                num_quantizers=2, dim=8, codebook_size=16, kmeans_init=False, **more
            )
            self.up = nn.ConvTranspose1d(8, 1, 4, stride=4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            made, _, losses = self.quantize(self.down(x))
            return self.up(made), losses

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        made, losses = model(batch)
        return F.l1_loss(made, batch) + losses.sum()

    model = Net()
    return step, model, adamw(model), torch.randn(2, 1, 64)


@REGISTRY("demucs julius einops dora")
def demucs() -> Any:
    from demucs.demucs import Demucs

    model = Demucs(
        ["a", "b"], audio_channels=1, channels=4, depth=2, lstm_layers=1, dconv_mode=0,
        resample=False,
    )  # fmt: skip
    return regress, model, adamw(model), (torch.randn(2, 1, 340), torch.randn(2, 2, 1, 340))


@REGISTRY("openunmix torchaudio")
def open_unmix() -> Any:
    from openunmix.model import OpenUnmix

    model = OpenUnmix(nb_bins=16, nb_channels=1, hidden_size=8, nb_layers=1)
    return regress, model, adamw(model), (torch.rand(2, 1, 16, 10), torch.rand(2, 1, 16, 10))


@REGISTRY("nnAudio")
def mel_classifier() -> Any:
    from nnAudio.features import MelSpectrogram

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mel = MelSpectrogram(
                sr=8000, n_fft=64, n_mels=8, hop_length=32, verbose=False, trainable_STFT=True
            )
            self.out = nn.Linear(8, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(torch.log(self.mel(x) + 1e-3).mean(-1))

    return classifier(Net(), torch.randn(4, 512))


@REGISTRY("torchlibrosa librosa")
def spectrogram_classifier() -> Any:
    from torchlibrosa.stft import LogmelFilterBank, Spectrogram

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.spectrum = Spectrogram(n_fft=64, hop_length=32)
            self.mel = LogmelFilterBank(sr=8000, n_fft=64, n_mels=8)
            self.out = nn.Linear(8, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.mel(self.spectrum(x)).mean((1, 2)))

    model = Net()
    trained = torch.optim.AdamW(model.out.parameters())
    from surveyed.registry import classify, labels

    return classify, model, trained, (torch.randn(4, 512), labels())


@REGISTRY("bs_roformer rotary_embedding_torch hyper_connections PoPE_pytorch")
def band_split_roformer() -> Any:
    from bs_roformer import BSRoformer

    model = BSRoformer(
        dim=8, depth=1, time_transformer_depth=1, freq_transformer_depth=1, heads=2, dim_head=4,
        freqs_per_bands=(4, 5, 8), stft_n_fft=32, stft_hop_length=16, stft_win_length=32,
        dim_freqs_in=17, multi_stft_resolutions_window_sizes=(32, 16), multi_stft_hop_size=8,
        flash_attn=False,
    )  # fmt: skip

    def step(model: nn.Module, batch: Any) -> Tensor:
        return model(*batch)

    return step, model, adamw(model), (torch.randn(2, 256), torch.randn(2, 256))
