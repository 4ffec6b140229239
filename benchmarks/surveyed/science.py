"""Scientific machine learning: neural operators, flows, Gaussian processes, spiking nets, ODEs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surveyed.registry import PROGRAM, Registry, adamw, classifier, classify, labels, regress

REGISTRY = Registry(PROGRAM)


@REGISTRY("neuralop tensorly tltorch")
def fno() -> Any:
    from neuralop.models import FNO

    model = FNO(
        n_modes=(4, 4), in_channels=1, out_channels=1, hidden_channels=8, n_layers=2,
        projection_channel_ratio=1,
    )  # fmt: skip
    return regress, model, adamw(model), (torch.randn(2, 1, 8, 8), torch.randn(2, 1, 8, 8))


@REGISTRY("", "fno_from_fft")
def spectral_layer() -> Any:
    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4, 3, 2) * 0.1)
            self.point = nn.Conv1d(4, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            modes = torch.fft.rfft(x)[..., :3]
            made = torch.einsum("bim,iom->bom", modes, torch.view_as_complex(self.weight))
            return torch.fft.irfft(made, n=x.shape[-1]) + self.point(x)

    model = Spectral()
    return regress, model, adamw(model), (torch.randn(4, 4, 16), torch.randn(4, 4, 16))


def _likelihood(model: Any, batch: Tensor) -> Tensor:
    return -model().log_prob(batch).mean()


def _zuko(name: str, **arguments: Any) -> Any:
    def make() -> Any:
        import zuko

        model = getattr(zuko.flows, name)(3, transforms=2, hidden_features=(16, 16), **arguments)
        return _likelihood, model, adamw(model), torch.randn(8, 3)

    return make


for _name in ("MAF", "NSF", "NICE"):
    REGISTRY.add(_name, _zuko(_name), "zuko")


def _nflow(model: Any, batch: Tensor) -> Tensor:
    return -model.log_prob(inputs=batch).mean()


@REGISTRY("nflows")
def nflows_maf() -> Any:
    from nflows.flows import MaskedAutoregressiveFlow

    model = MaskedAutoregressiveFlow(4, 16, num_layers=2, num_blocks_per_layer=1)
    return _nflow, model, adamw(model), torch.randn(8, 4)


@REGISTRY("nflows")
def nflows_realnvp() -> Any:
    from nflows.flows import SimpleRealNVP

    model = SimpleRealNVP(4, 16, num_layers=2, num_blocks_per_layer=1)
    return _nflow, model, adamw(model), torch.randn(8, 4)


@REGISTRY("normflows")
def normflows_realnvp() -> Any:
    import normflows as nf

    flows = []
    for _ in range(2):
        flows += [nf.flows.AffineCouplingBlock(nf.nets.MLP([1, 16, 2])), nf.flows.Permute(2)]
    model = nf.NormalizingFlow(nf.distributions.base.DiagGaussian(2), flows)

    def step(model: Any, batch: Tensor) -> Tensor:
        return model.forward_kld(batch)

    return step, model, adamw(model), torch.randn(8, 2)


@REGISTRY("gpytorch linear_operator jaxtyping")
def gaussian_process() -> Any:
    import gpytorch

    inputs, targets = torch.linspace(0, 1, 12), torch.randn(12)

    class Exact(gpytorch.models.ExactGP):
        def __init__(self, likelihood: Any) -> None:
            super().__init__(inputs, targets, likelihood)
            self.mean = gpytorch.means.ConstantMean()
            self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x: Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))

    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    model = Exact(likelihood)
    marginal = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)

    def step(model: Any, batch: Tensor) -> Tensor:
        return -marginal(model(inputs), batch)

    return step, model, torch.optim.Adam(model.parameters(), lr=0.1), targets


@REGISTRY("torchdiffeq")
def neural_ode_rk4() -> Any:
    from torchdiffeq import odeint

    class Field(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))

        def forward(self, t: Tensor, y: Tensor) -> Tensor:
            return self.net(y**3)

    model, times = Field(), torch.linspace(0.0, 1.0, 3)

    def step(model: nn.Module, batch: Any) -> Tensor:
        start, path = batch
        return F.mse_loss(odeint(model, start, times, method="rk4"), path)

    return step, model, torch.optim.RMSprop(model.parameters()), (
        torch.randn(4, 2), torch.randn(3, 4, 2),
    )  # fmt: skip


@REGISTRY("torchdiffeq")
def neural_ode_adaptive(method: str = "dopri5") -> Any:
    from torchdiffeq import odeint

    class Field(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))

        def forward(self, t: Tensor, y: Tensor) -> Tensor:
            return self.net(y)

    model, times = Field(), torch.linspace(0.0, 1.0, 3)

    def step(model: nn.Module, batch: Any) -> Tensor:
        start, path = batch
        return F.mse_loss(odeint(model, start, times, method=method), path)

    return step, model, adamw(model), (torch.randn(4, 2), torch.randn(3, 4, 2))


@REGISTRY("snntorch")
def spiking() -> Any:
    import snntorch as snn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.spike = nn.Linear(8, 16), snn.Leaky(beta=0.9)
            self.second, self.last = nn.Linear(16, 10), snn.Leaky(beta=0.9)

        def forward(self, x: Tensor) -> Tensor:
            one, two = self.spike.init_leaky(), self.last.init_leaky()
            potentials = []
            for _ in range(3):
                spikes, one = self.spike(self.first(x), one)
                _, two = self.last(self.second(spikes), two)
                potentials.append(two)
            return torch.stack(potentials).mean(0)

    return classifier(Net(), torch.randn(4, 8))


@REGISTRY("spikingjelly")
def spikingjelly_net() -> Any:
    from spikingjelly.activation_based import functional, layer, neuron, surrogate

    model = nn.Sequential(
        layer.Flatten(), layer.Linear(16, 10), neuron.LIFNode(surrogate_function=surrogate.ATan())
    )

    def step(model: nn.Module, batch: Any) -> Tensor:
        inputs, targets = batch
        functional.reset_net(model)
        made = sum(model(inputs) for _ in range(3)) / 3
        functional.reset_net(model)
        return F.mse_loss(made, F.one_hot(targets, 10).float())

    return step, model, adamw(model), (torch.randn(4, 4, 4), labels())


@REGISTRY("blitz")
def bayesian_linear() -> Any:
    from blitz.modules import BayesianLinear

    model = nn.Sequential(BayesianLinear(8, 16), nn.ReLU(), BayesianLinear(16, 10))

    def step(model: nn.Module, batch: Any) -> Tensor:
        inputs, targets = batch
        made = F.cross_entropy(model(inputs), targets)
        priors = sum(
            m.log_variational_posterior - m.log_prior for m in model if hasattr(m, "log_prior")
        )
        return made + 1e-3 * priors

    return step, model, adamw(model), (torch.randn(4, 8), labels())


@REGISTRY("bayesian_torch")
def bayesian_flipout() -> Any:
    from bayesian_torch.layers import LinearFlipout

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = LinearFlipout(8, 16), LinearFlipout(16, 10)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x, one = self.first(x)
            x, two = self.second(x.relu())
            return x, one + two

    def step(model: nn.Module, batch: Any) -> Tensor:
        inputs, targets = batch
        made, kl = model(inputs)
        return F.cross_entropy(made, targets) + kl / len(inputs)

    model = Net()
    return step, model, adamw(model), (torch.randn(4, 8), labels())


@REGISTRY("torchbnn")
def torchbnn_net() -> Any:
    import torchbnn as bnn

    model = nn.Sequential(
        bnn.BayesLinear(prior_mu=0, prior_sigma=0.1, in_features=8, out_features=16), nn.ReLU(),
        bnn.BayesLinear(prior_mu=0, prior_sigma=0.1, in_features=16, out_features=10),
    )  # fmt: skip
    kl = bnn.BKLLoss(reduction="mean")

    def step(model: nn.Module, batch: Any) -> Tensor:
        return classify(model, batch) + 0.01 * kl(model).squeeze()

    return step, model, adamw(model), (torch.randn(4, 8), labels())


@REGISTRY("kan matplotlib sklearn pandas narwhals")
def pykan() -> Any:
    from kan import KAN

    model = KAN(width=[2, 3, 1], grid=3, k=3, auto_save=False, seed=0, symbolic_enabled=False)
    model.save_act = False
    return regress, model, adamw(model), (torch.rand(8, 2), torch.rand(8, 1))


@REGISTRY("e3nn opt_einsum_fx")
def e3nn_tensor_product() -> Any:
    from e3nn import o3

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.product = o3.FullyConnectedTensorProduct("2x0e+2x1o", "0e+1o", "4x0e")

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.product(x, y).sum(-1)

    def step(model: nn.Module, batch: Any) -> Tensor:
        x, y, target = batch
        return F.mse_loss(model(x, y), target)

    model = Net()
    return step, model, adamw(model), (torch.randn(6, 8), torch.randn(6, 4), torch.randn(6))


@REGISTRY("torchsde")
def latent_sde() -> Any:
    import torchsde

    class Sde(nn.Module):
        noise_type, sde_type = "diagonal", "ito"

        def __init__(self) -> None:
            super().__init__()
            self.drift, self.spread = nn.Linear(2, 2), nn.Linear(2, 2)

        def f(self, t: Tensor, y: Tensor) -> Tensor:
            return self.drift(y)

        def g(self, t: Tensor, y: Tensor) -> Tensor:
            return self.spread(y).sigmoid()

    model, times = Sde(), torch.linspace(0.0, 1.0, 3)

    def step(model: Any, batch: Tensor) -> Tensor:
        return torchsde.sdeint(model, batch, times, dt=0.5, method="euler")[-1].square().mean()

    return step, model, adamw(model), torch.randn(4, 2)


@REGISTRY("compressai")
def image_compression() -> Any:
    from compressai.models import FactorizedPrior

    model = FactorizedPrior(8, 12)

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        made = model(batch)
        bits = sum(torch.log(p).sum() for p in made["likelihoods"].values())
        return F.mse_loss(made["x_hat"], batch) - 0.01 * bits / batch.numel()

    trained = [p for n, p in model.named_parameters() if not n.endswith("quantiles")]
    return step, model, torch.optim.Adam(trained, lr=1e-4), torch.rand(2, 3, 32, 32)


@REGISTRY("schnetpack")
def schnetpack_radial() -> Any:
    from schnetpack.nn.radial import GaussianRBF

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.radial, self.out = GaussianRBF(8, 5.0, trainable=True), nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.radial(x)).squeeze(-1)

    model = Net()
    return regress, model, adamw(model), (torch.rand(12) * 5, torch.randn(12))
